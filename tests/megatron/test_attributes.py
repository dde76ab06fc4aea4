"""A wrapped model has the attributes that megatron-core reads, or docs/internals/megatron.md
says why it does not have them."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.torch_version import TorchVersion

from tests.pool import on_ranks
from tools import megatron_attributes as attributes

# The page lists attributes of megatron-core 0.19, some of which earlier versions do not use.
of_the_page = pytest.mark.skipif(
    TorchVersion(importlib.metadata.version("megatron-core")) < (0, 19),
    reason="the table in docs/internals/megatron.md describes megatron-core 0.19",
)


@of_the_page
@on_ranks(1)
def test_the_documentation_has_the_table_of_the_installed_wheel_and_reasons() -> None:
    uses = attributes.uses_of(attributes.installed())
    lines = attributes.table(uses, attributes.make_wrapper())
    names = {line.split("`")[1]: "| yes |" in line for line in lines[2:]}
    assert {"set_is_first_microbatch", "buffers", "ddp_config", "scale_gradients"} <= names.keys()
    text = attributes.DOCS.read_text()
    assert attributes.with_table(text, lines) == text, "tools/megatron_attributes.py --write"
    missing = {name for name, is_there in names.items() if not is_there}
    assert attributes.NOT_THERE.keys() <= missing


SAMPLE = """
def step(model_chunks, model, flag, buffer_name):
    for model_chunk in model_chunks:
        model_chunk.was_called(1)
        model_chunk.was_set = flag
        if hasattr(model_chunk, "was_tested"):
            getattr(model_chunk, buffer_name)
    get_attr_wrapped_model(model[0], "was_sought")
    return self.model_chunks[0].was_read + model_chunks.count + flag.other
step(None, None, None, buffer_name="was_named")
"""


def test_every_kind_of_use_is_found(tmp_path: Path) -> None:
    file = tmp_path / "megatron" / "core" / "optimizer" / "sample.py"
    file.parent.mkdir(parents=True)
    file.write_text(SAMPLE)
    uses = attributes.uses_of(tmp_path)
    assert {name: sorted(use.kinds) for name, use in uses.items()} == {
        "was_called": ["called"],
        "was_named": ["tested"],
        "was_read": ["read"],
        "was_set": ["assigned"],
        "was_sought": ["looked up"],
        "was_tested": ["tested"],
    }
    wrapper = SimpleNamespace(was_called=1, was_named=1, was_read=1, was_set=1)
    with pytest.raises(ValueError, match=r"was_tested: expected .* core/optimizer/sample\.py:6"):
        attributes.table(uses, wrapper)
