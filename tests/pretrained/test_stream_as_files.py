"""``as_in_files``: names and tensors as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.checkpoint.pieces import Pieces
from fsdp_engine.pretrained import streamed_tensors
from fsdp_engine.pretrained import weight_version as version_file
from tests.matrices import thorough_but
from tests.models import Chain, Mlp
from tests.pool import Ranks, on_few_ranks
from tests.pretrained.families import FAMILIES, build, builder
from tests.pretrained.folders import in_files
from tests.pretrained.receiver import Receiver, edit, of_all_ranks, received, same_bits, sent_state


def streamed(family: str, folder: str, level: str) -> None:
    """All three forms of the tensors in ``folder``; then of other values, saved beside it."""
    engine = fe.shard(builder(family)(), strategy=level, initial_values="empty")
    fe.load_pretrained(engine, folder)
    expected = in_files(Path(folder))
    version = fe.WeightVersion()
    changes = fe.weight_stream(engine, changed_since=version, as_in_files=True)
    receiver = Receiver(expected)
    receiver.take(of_all_ranks(changes))
    receiver.once()
    receiver.check(expected)
    generator = torch.Generator().manual_seed(0)

    def few(param: Tensor) -> None:
        where = torch.rand(param.shape, generator=generator) < 0.05
        param[where] += 1

    with patch.object(version_file, "CHUNK", 128):
        edit(engine, few)
        receiver.take(of_all_ranks(changes))
    fe.save_pretrained(engine, f"{folder}/edited")
    expected = in_files(Path(folder) / "edited")
    receiver.check(expected)
    pieces = of_all_ranks(fe.weight_stream(engine, pieces=True, as_in_files=True))
    for stream in (fe.weight_stream(engine, as_in_files=True), pieces):
        received(stream, expected)
    if dist.is_initialized():
        dist.barrier()


@pytest.mark.parametrize("family", thorough_but(["mixtral", "llama tied"], FAMILIES))
def test_a_receiver_has_what_files_have(ranks: Ranks, tmp_path: Path, family: str) -> None:
    torch.manual_seed(0)
    for world_size, level in ((1, "no_shard"), (2, "optim_grads_params")):
        folder = str(tmp_path / str(world_size))
        build(family).save_pretrained(folder)
        ranks.run(streamed, family, folder, level, world_size=world_size)


def joined(model: nn.Module, held: dict[str, Pieces]) -> dict[str, Pieces]:
    """A layout that no family has: tensors of several units in one, and some that are turned."""
    found = dict(held)
    ups = [found.pop(f"blocks.{index}.up.weight") for index in range(3)]
    found["ups"] = torch.stack([each.t() for each in ups], 1)  # type: ignore[call-overload]
    both = torch.cat([found.pop("blocks.0.up.bias"), found.pop("blocks.2.up.bias")])  # type: ignore[call-overload]
    found["biases"] = both.reshape(2, -1)
    found["turned"] = found.pop("blocks.1.down.weight").t()
    return found


def as_joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found: Any = joined(nn.Module(), dict(state))  # type: ignore[arg-type]
    return {name: value.contiguous() for name, value in found.items()}


@on_few_ranks
def test_a_tensor_of_several_units() -> None:
    model = Chain(Mlp(), Mlp(), Mlp())
    engine = fe.shard(
        model, strategy="optim_grads_params", units=[Mlp], options=fe.Options(min_unit_size=0)
    )
    assert len(engine.units) == 4
    expected = as_joined(sent_state(engine, torch.bfloat16))
    with (
        patch.object(streamed_tensors, "as_on_disk", joined),
        patch.object(version_file, "CHUNK", 40),
    ):
        options: dict[str, Any] = {"dtype": torch.bfloat16, "as_in_files": True}
        changes = fe.weight_stream(engine, changed_since=fe.WeightVersion(), **options)
        receiver = Receiver(expected)
        receiver.take(of_all_ranks(changes))
        receiver.once()
        receiver.check(expected)
        received(of_all_ranks(fe.weight_stream(engine, pieces=True, **options)), expected)
        edit(engine, lambda param: param.view(-1)[::7].add_(1))
        receiver.take(of_all_ranks(changes))
        expected = as_joined(sent_state(engine, torch.bfloat16))
        receiver.check(expected)
        for name, tensor in fe.weight_stream(engine, **options):
            assert tensor.is_contiguous()
            assert same_bits(tensor, expected.pop(name)), name
        assert not expected
