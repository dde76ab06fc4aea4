"""Rows in the user's cache folder: equal to computed rows, and used only for the same job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fsdp_engine as fe
from fsdp_engine.planner import job, plan_cache, strategy_search
from fsdp_engine.planner.plan_cache import cache_folder, digest
from tests.planner.made_plans import Words, quick_plan, words

SCRIPT = """
    import sys, torch
    from torch import nn
    import fsdp_engine as fe
    from fsdp_engine.planner import job
    from helper import width

    def build():
        return nn.Sequential(nn.Linear(8, width()), nn.Linear(width(), 8))

    number, simulate = 0, job.simulate

    def counted(*args, **options):
        global number
        number += 1
        return simulate(*args, **options)

    job.simulate = counted
    found = fe.plan(
        build, torch.zeros(2, 8), world_size=2, quick=True, cache=True, compile=len(sys.argv) > 1
    )
    print(number, *(each.peak_bytes for each in found.outcomes))
"""


def planned(**options: Any) -> fe.StrategyPlan:
    """A plan with one candidate, of level 3."""
    given = {"build": Words, "batch": words, "world_size": 16, "meshes": [(2, 8)], **options}
    activations = given.pop("checkpointing", (True,))
    return quick_plan(fitting=1, checkpointing=activations, cache=True, **given)


@pytest.fixture(autouse=True)
def sources_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat source files that pytest or an editor changes during the tests as unchanged."""
    monkeypatch.setattr(plan_cache, "_STARTED_NS", 2**63)


@pytest.fixture
def no_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not read thousands of source files for each row."""
    monkeypatch.setattr(plan_cache, "loaded_sources", dict)


def test_cached_rows_are_exactly_those_computed(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path, no_sources: None
) -> None:
    tried: list[Any] = []
    simulate = job.simulate

    def counted(*args: Any, **options: Any) -> fe.Simulation:
        tried.append(args)
        return simulate(*args, **options)

    monkeypatch.setattr(job, "simulate", counted)
    arguments = {"world_size": 16, "meshes": [(16,)], "checkpointing": (True,)}
    first = fe.plan(Words, words, cache=True, **arguments)
    assert len(tried) == 6  # four levels, and two variations of the choice
    assert cache_folder() == cache_home / "fsdp_engine" / "plans"
    assert len(list(cache_folder().glob("*.json"))) == 1
    again = fe.plan(Words, words, cache=True, **arguments)
    limit = min(each.peak_bytes for each in first.outcomes)
    tight = fe.plan(Words, words, cache=True, memory=limit, offload=None, **arguments)
    assert len(tried) <= 6 + 2  # variations of another choice
    assert (again.outcomes, again.trials) == (first.outcomes, first.trials)
    assert tight.outcomes == first.within(limit).outcomes
    tried.clear()
    assert fe.plan(Words, words, **arguments).outcomes == first.outcomes
    assert len(tried) == 6


def with_an_attribute() -> nn.Module:
    model = Words()
    model.blocks[0].scale = 3
    return model


def scaled(factor: float) -> Callable[[Any], Tensor]:
    return lambda output: factor * output


CHANGES: list[dict[str, Any]] = [
    {"build": partial(Words, dim=64)},
    {"build": with_an_attribute},
    {"compile": True},
    {"batch": words(5)},
    {"machine": replace(fe.H100, host_seconds=9e-6)},
    {"machine": replace(fe.H100, processor=replace(fe.H100.processor, memory_bytes=81e9))},
    {"world_size": 32, "meshes": [(4, 8)]},
    {"microbatches": 2},
    {"mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    {"optimizer": torch.optim.SGD},
    {"loss": scaled(2.0)},
    {"stages": Words},
    {"stage_loss": scaled(2.0)},
    {"units": ["blocks.*"]},
    {"min_unit_size": 0},
    {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)},
]


def test_another_job_is_not_answered_from_the_cache(simulated: list[Any], no_sources: None) -> None:
    """Also another version of the engine or of torch, or another setting of the compiler."""
    for number, changes in enumerate([{}, *CHANGES], 1):
        planned(**changes)
        assert len(simulated) == number, changes
    for changes in ({}, {"compile": True}, CHANGES[-1]):
        planned(**changes)
    assert len(simulated) == number
    for options, owner, name, value in (
        ({}, fe, "__version__", "9.9.9"),
        ({}, torch, "__version__", "9.9.9"),
        ({"compile": True}, inductor_config, "_micro_pipeline_tp", True),
    ):
        simulated.clear()
        with patch.object(owner, name, value):
            planned(**options)
        assert len(simulated) == 1, name


class _Unpicklable:
    def __call__(self, output: Any) -> Tensor:
        return output

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_a_digest_is_that_of_code_and_values() -> None:
    assert digest(scaled(2.0)) == digest(scaled(2.0)) is not None
    assert digest(scaled(2.0)) != digest(scaled(3.0))
    assert digest([open]) is not None
    assert digest(iter([]).__class__) is not None
    # A GenerationConfig has a hash attribute, which differs between processes.
    config = pytest.importorskip("transformers").GenerationConfig
    first, second, longer = config(), config(), config(max_length=7)
    first._original_object_hash, second._original_object_hash = 1, 2
    assert digest(first) == digest(second) is not None
    assert digest(first) != digest(longer)
    words = [f"word {number}" for number in range(100)]
    other = set[str]()
    other.update(words[::-1])
    assert digest({"of": set(words)}) == digest({"of": other})
    # An object that cannot be pickled is not cached.
    assert digest(each for each in ()) is None


def optimizer_of(cls: type) -> Callable[..., Any]:
    return lambda params: cls(params, lr=1e-3)


def local_class(factor: float) -> type:
    class Local(torch.optim.SGD):
        default = factor

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=self.default)

        @property
        def rate(self) -> float:
            return factor

        @staticmethod
        def again(params: Any) -> Any:
            return Local(params)

    return Local


def test_a_captured_class_is_part_of_the_digest() -> None:
    """The class may be an argument itself, or be defined within a function."""
    for made in (optimizer_of, lambda cls: cls, lambda cls: partial(cls, lr=1e-3)):
        found = [digest({"optimizer": made(cls)}) for cls in (torch.optim.SGD, torch.optim.AdamW)]
        assert None not in found
        assert found[0] != found[1]
    assert digest(local_class(1.0)) == digest(local_class(1.0)) is not None
    assert digest(local_class(1.0)) != digest(local_class(2.0))
    assert digest(optimizer_of(local_class(1.0))) != digest(optimizer_of(local_class(2.0)))
    assert digest(local_class(1.0).__init__) is not None


def test_optimizers_captured_as_classes_are_of_different_jobs(
    simulated: list[Any], no_sources: None
) -> None:
    for number, cls in enumerate((torch.optim.AdamW, torch.optim.SGD), 1):
        planned(optimizer=optimizer_of(cls))
        assert len(simulated) == number


def mask_of(documents: int) -> BlockMask:
    def is_same(_row: Any, _head: Any, query: Tensor, key: Tensor) -> Tensor:
        return of_token[query] == of_token[key]

    of_token = torch.arange(512).div(512 // documents, rounding_mode="floor")
    return create_block_mask(is_same, 1, 1, 512, 512, device="cpu")


def test_values_of_tensors_are_part_of_the_digest_but_not_those_of_the_batch(
    simulated: list[Any], no_sources: None
) -> None:
    """Simulations read values of a mask's blocks, but tensors of the batch are fake."""
    assert digest(mask_of(1)) == digest(mask_of(1)) is not None
    assert digest(mask_of(1)) != digest(mask_of(4))
    assert digest(torch.zeros(3)) != digest(torch.ones(3))
    assert digest(nn.Parameter(torch.zeros(3))) != digest(nn.Parameter(torch.ones(3)))
    assert digest(torch.zeros(3, device="meta")) is not None
    assert digest(torch.eye(3).to_sparse()) is None  # not described, and therefore not cached
    planned()
    planned(batch=words() + 1)
    assert len(simulated) == 1


def test_a_changed_source_file_is_not_answered(simulated: list[Any]) -> None:
    """Rows are recomputed if a source of the engine, of the model or of an imported library has
    changed, or if the cached file is damaged."""
    expected = planned().outcomes
    (path,) = cache_folder().glob("*.json")
    content = json.loads(path.read_text())
    files = (strategy_search.__file__, __file__, sys.modules["numpy"].__file__)
    changed = [path.read_text() for _ in files]
    for number, file in enumerate(files):
        other = json.loads(changed[number])
        other["files"][file][1] -= 1
        changed[number] = json.dumps(other)
    for text in (*changed, "", "[1]", '{"files": {}}', '{"files": 3, "rows": {}}'):
        path.write_text(text)
        simulated.clear()
        assert planned().outcomes == expected
        assert len(simulated) == 1, text[:40]
    assert json.loads(path.read_text()) == content  # written anew each time
    planned()
    assert len(simulated) == 1


def test_nothing_is_kept_of_newer_sources_of_policies_and_in_a_folder_without_access(
    monkeypatch: pytest.MonkeyPatch, cache_home: Path, simulated: list[Any]
) -> None:
    for count in (1, 2):
        planned(checkpointing=(fe.Recompute(policy=[torch.ops.aten.mm.default]),))
        assert len(simulated) == count
    planned(loss=_Unpicklable())
    monkeypatch.setattr(plan_cache, "_STARTED_NS", Path(__file__).stat().st_mtime_ns - 1)
    planned()
    assert not list(cache_folder().glob("*.json"))
    monkeypatch.setattr(plan_cache, "_STARTED_NS", 2**63)
    if cache_home.exists():
        shutil.rmtree(cache_home)
    cache_home.write_text("a file")
    with pytest.warns(UserWarning, match="found .* Results are not cached"):
        planned()


def test_the_oldest_jobs_are_removed(monkeypatch: pytest.MonkeyPatch, simulated: list[Any]) -> None:
    monkeypatch.setattr(plan_cache, "_MOST_JOBS", 2)
    cache_folder().mkdir(parents=True)
    for age in (3, 2, 1):
        file = cache_folder() / f"{age}.json"
        file.write_text("{}")
        os.utime(file, ns=(0, (10 - age) * 10**9))
    planned()
    assert sorted(each.name for each in cache_folder().glob("?.json")) == ["1.json"]


def test_a_file_that_another_process_deletes_is_no_failure(
    simulated: list[Any], no_sources: None
) -> None:
    """And a failed write leaves no file."""
    cache_folder().mkdir(parents=True)
    (cache_folder() / "gone.json").symlink_to("nowhere")  # is listed, but has no modification time
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned()
    assert len(list(cache_folder().glob("*.json"))) >= 1
    with (
        patch.object(Path, "replace", side_effect=OSError("no space")),
        pytest.warns(UserWarning, match="cache: expected a writable file; found no space"),
    ):
        planned(microbatches=2)
    assert not list(cache_folder().glob("*.new"))


@pytest.mark.thorough
@pytest.mark.parametrize("is_compiled", [False, True])
def test_processes_share_rows_until_a_helper_changes(tmp_path: Path, is_compiled: bool) -> None:
    """A file that the model imports, with the same size as before."""
    helper = tmp_path / "helper.py"
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))

    def run(width: int) -> list[str]:
        helper.write_text(f"def width():\n    return {width}\n")
        os.utime(helper, ns=(0, width * 10**9))  # before the process starts
        os.utime(tmp_path / "script.py", ns=(0, 0))
        done = subprocess.run(
            [sys.executable, "-B", "script.py", *["compile"] * is_compiled],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(fe.__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = run(64)
    assert int(first[0]) > 0
    assert run(64) == ["0", *first[1:]]
    other = run(65)
    assert int(other[0]) > 0
    assert other[1:] != first[1:]
