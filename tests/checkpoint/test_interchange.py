"""Checkpoints to and from FSDP2 and unsharded models."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
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


@pytest.mark.parametrize("number", [4, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_unsharded_and_an_fsdp2_model_load_what_was_saved_here(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    for world_size, tied in ((0, False), (2, True)):
        folder = tmp_path / str(world_size)
        expected = run_on(ranks, world_size, save_here, str(folder), tied)[0]
        for place in (folder / "run" / "step-00000002", folder / "one"):
            model = plain(5, tied)
            found = load_elsewhere(str(place), model, two_groups(model, lr=0.5))
            assert different(found, expected) == []
            call = (load_into_fsdp2, str(place))
            for found in () if tied else ranks.run(*call, world_size=number):
                assert different(found, expected) == []


@pytest.mark.parametrize(
    "strategy", [pytest.param("no_shard", marks=pytest.mark.thorough), "optim_grads_params"]
)
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
