"""Checkpoints to and from FSDP2 and unsharded models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from fsdp_engine.checkpoint.reader import ReadBuffer, read_box
from tests.checkpoint.scene import contents, different, run_on, train, two_groups
from tests.models import Transformer, token_batch
from tests.pool import Ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:You are using .torch.load."),
]


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(seed)
    for module in (*model.blocks, model):
        fully_shard(module)
    return model, two_groups(model)


def plain(seed: int, tied: bool = False) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(num_blocks=1, tied=tied)


def save_here(folder: str, tied: bool) -> dict[str, Any]:
    model = plain(0, tied)
    engine = fe.shard(model)
    optimizer = two_groups(model)
    train(model, optimizer)
    fe.Checkpointer(f"{folder}/run", engine, optimizer).save(2)
    fe.save_checkpoint(f"{folder}/one", engine, optimizer)
    return contents(model, optimizer)


def load_elsewhere(folder: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """By torch.distributed.checkpoint alone."""
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    return contents(model, optimizer)


def load_into_fsdp2(folder: str) -> dict[str, Any]:
    return load_elsewhere(folder, *fsdp2(1))


def save_elsewhere(folder: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=f"{folder}/weights")
    both = {"model": weights, "optimizer": state, "epoch": 3}
    dcp.save(both, checkpoint_id=f"{folder}/optimizer")
    return contents(model, optimizer)


def save_fsdp2(folder: str) -> dict[str, Any]:
    model, optimizer = fsdp2(0)
    train(model, optimizer)
    return save_elsewhere(folder, model, optimizer)


def load_here(folder: str, strategy: str, tied: bool, expected: dict[str, Any]) -> list[str]:
    model = plain(1, tied)
    engine = fe.shard(model, strategy=strategy)
    assert fe.load_checkpoint(f"{folder}/weights", engine) == {}
    weights = {key: value for key, value in expected.items() if key.startswith("model.")}
    lines = different(contents(model), weights)
    optimizer = two_groups(model, swap=True, lr=0.5)
    with pytest.raises(ValueError, match=r"optimizer\.param_groups.*found none"):
        fe.load_checkpoint(f"{folder}/weights", engine, optimizer)
    assert fe.load_checkpoint(f"{folder}/optimizer", engine, optimizer) == {}
    return lines + different(contents(model, optimizer), expected)


def test_an_unsharded_and_an_fsdp2_model_load_what_was_saved_here(
    ranks: Ranks, tmp_path: Path
) -> None:
    for world_size, tied in ((0, False), (2, True)):
        folder = tmp_path / str(world_size)
        expected = run_on(ranks, world_size, save_here, str(folder), tied)[0]
        for place in (folder / "run" / "step-00000002", folder / "one"):
            model = plain(5, tied)
            found = load_elsewhere(str(place), model, two_groups(model, lr=0.5))
            assert different(found, expected) == []
            for number in () if tied else (2, 4):
                for found in ranks.run(load_into_fsdp2, str(place), world_size=number):
                    assert different(found, expected) == []


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_checkpoints_of_unsharded_and_fsdp2_models_are_loaded_here(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    model = plain(0, tied=True)
    optimizer = two_groups(model)
    model(*token_batch(2, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = {
        "plain": save_elsewhere(str(tmp_path / "plain"), model, optimizer),
        "fsdp2": ranks.run(save_fsdp2, str(tmp_path / "fsdp2"), world_size=4)[0],
    }
    for (name, expected), world_size in itertools.product(saved.items(), (0, 2)):
        call = (load_here, str(tmp_path / name), strategy, name == "plain", expected)
        for lines in run_on(ranks, world_size, *call):
            assert lines == []


def test_any_box_of_a_tensor_is_read_through_a_buffer_of_any_size(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 4), (1, 9), (6, 1)]
    for shape, num_bytes in itertools.product(shapes, (2, 16, 50, 4096)):
        tensor = torch.rand(shape, generator=draw)
        path = tmp_path / "tensor"
        path.write_bytes(b"before" + tensor.numpy().tobytes())
        for _ in range(10):
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=draw).tolist()) for n in shape]
            offsets, lengths = [a for a, _ in ends], [b - a for a, b in ends]
            expected = tensor[tuple(slice(a, b) for a, b in ends)]
            targets: list[Tensor] = [
                torch.zeros(lengths),
                torch.zeros(lengths, dtype=torch.float64),
                torch.zeros([2 * n for n in lengths])[tuple(slice(0, None, 2) for _ in lengths)],
            ]
            for target in targets:
                with open(path, "rb") as file:
                    arguments: Any = (offsets, lengths, target, ReadBuffer(num_bytes))
                    read_box(file, 6, shape, torch.float32, *arguments)
                assert torch.equal(target.to(torch.float32), expected)
    path.write_bytes(b"before")
    with open(path, "rb") as file, pytest.raises(EOFError, match="tensor: expected 16 bytes more"):
        read_box(file, 6, (4,), torch.float32, [0], [4], torch.zeros(4), ReadBuffer(64))
