"""Checkpoints have global shapes: any parallelism loads what any other has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from tests.checkpoint.scene import shared_folder
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for
from tests.pool import Ranks, on_ranks
from tests.reference import full

Shape = dict[str, int]
# (data-parallel, tensor-parallel) ranks and level.
Cut = tuple[int, int, str]
CUTS: dict[str, Cut] = {
    "tp2 dp2": (2, 2, "optim_grads_params"),
    "tp2 dp2 optim": (2, 2, "optim"),
    "tp2 dp2 no_shard": (2, 2, "no_shard"),
    "dp4": (4, 1, "optim_grads_params"),
    "tp4": (1, 4, "optim_grads_params"),
    "alone": (1, 1, "optim_grads_params"),
}
THOROUGH = pytest.mark.thorough
SHAPES = [
    pytest.param({"hidden": 17, "width": 6}, id="17"),
    pytest.param({}, id="even", marks=THOROUGH),
    pytest.param({"hidden": 3, "width": 5}, id="3", marks=THOROUGH),
]


def steps(model: nn.Module, optimizer: Any, num: int) -> None:
    for step in range(num):
        model(tokens_for(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(how: Cut, shape: Shape, num_steps: int) -> tuple[fe.Engine, Any]:
    num_data, num_tensor, level = how
    torch.manual_seed(num_steps)  # other values than the saved ones
    model, data = Model(**shape), None
    if num_data * num_tensor > 1:
        mesh = mesh_of((num_data, num_tensor), ("dp", "tp"))
        data = mesh["dp"]
        if num_tensor > 1:
            cut(model, mesh["tp"], sequence=True)
    engine = fe.shard(model, data, level)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    steps(model, optimizer, num_steps)
    return engine, optimizer


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param) for name, param in model.named_parameters()}


def everything(engine: fe.Engine, optimizer: Any) -> dict[str, Tensor]:
    found = weights_of(engine.model)
    for name, param in engine.model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = full(value)
    return found


def save(folder: str, how: Cut, shape: Shape) -> dict[str, Tensor]:
    engine, optimizer = trained(how, shape, 2)
    fe.save_checkpoint(f"{folder}/ours", engine, optimizer)
    fe.export_safetensors(engine, f"{folder}/weights")
    return everything(engine, optimizer)


def load(folder: str, how: Cut, shape: Shape) -> dict[str, Tensor]:
    engine, optimizer = trained(how, shape, 1)
    fe.load_safetensors(engine, f"{folder}/weights")
    weights = weights_of(engine.model)
    with torch.no_grad():
        for param in engine.model.parameters():
            param.zero_()
    fe.load_checkpoint(f"{folder}/ours", engine, optimizer)
    found = everything(engine, optimizer)
    assert_same({name: found[name] for name in weights}, weights)
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("saved", "loads"),
    [
        ("tp2 dp2", ["tp2 dp2 optim", "dp4", "tp4"]),
        *(pytest.param(each, list(CUTS), marks=THOROUGH) for each in CUTS),
    ],
)
def test_any_cut_loads_what_any_other_saved(
    ranks: Ranks, tmp_path: Path, saved: str, loads: list[str], shape: Shape
) -> None:
    def run_on(fn: Any, how: str) -> dict[str, Tensor]:
        world_size = CUTS[how][0] * CUTS[how][1]
        found: Any = ranks.run(fn, str(tmp_path), CUTS[how], shape, world_size=world_size)
        return found[0]

    expected = run_on(save, saved)
    for loaded in loads:
        assert_same(run_on(load, loaded), expected)


@on_ranks(4)
def test_a_save_in_the_background_copies_dtensors() -> None:
    folder = shared_folder()
    for name in ("tp2 dp2 no_shard", "tp2 dp2"):
        engine, optimizer = trained(CUTS[name], {}, 2)
        checkpointer = fe.Checkpointer(f"{folder}/{name}", engine, optimizer)
        checkpointer.save_async(1)
        expected = {key: value.clone() for key, value in everything(engine, optimizer).items()}
        steps(engine.model, optimizer, 1)
        checkpointer.load()
        assert_same(everything(engine, optimizer), expected)
        checkpointer.close()


def through_dcp(model: Any, optimizer: Any, folder: str, saves: bool) -> dict[str, Tensor]:
    """Save, or load; returns the full weights after that."""
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1]}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **loaded)
    return weights_of(model)


def with_fsdp2(folder: str, shape: Shape, saves: bool) -> dict[str, Tensor]:
    """Save or load the model under FSDP2 with the same tensor parallelism, with DCP."""
    torch.manual_seed(1 + saves)
    model: Any = Model(**shape)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    cut(model, mesh["tp"], sequence=True)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    steps(model, optimizer, 1)
    return through_dcp(model, optimizer, folder, saves)


def by_dcp(folder: str, shape: Shape, saves: bool) -> dict[str, Tensor]:
    """Save or load the engine's model with DCP and torch's functions for state dicts."""
    engine, optimizer = trained(CUTS["tp2 dp2"], shape, 2 if saves else 1)
    return through_dcp(engine.model, optimizer, folder, saves)


@pytest.mark.parametrize("shape", SHAPES)
def test_to_and_from_fsdp2_with_the_same_tensor_parallelism(
    ranks: Ranks, tmp_path: Path, shape: Shape
) -> None:
    for number, (saves, loads) in enumerate([(with_fsdp2, by_dcp), (by_dcp, with_fsdp2)]):
        folder = str(tmp_path / str(number))
        expected = ranks.run(saves, folder, shape, True)[0]
        assert_same(ranks.run(loads, folder, shape, False)[0], expected)


class Scaled(nn.Module):
    """A 0-d parameter beside a matrix, both DTensors."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        weight = torch.arange(8.0).view(4, 2)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        self.scale = nn.Parameter(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]))


@on_ranks(2)
def test_a_0d_dtensor_is_exported_and_loaded() -> None:
    folder = shared_folder()
    mesh = mesh_of((1, 2), ("dp", "tp"))
    model = Scaled(mesh["tp"])
    engine = fe.shard(model, mesh["dp"])
    fe.export_safetensors(engine, folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fe.load_safetensors(engine, folder)
    assert engine.full_tensor("scale") == 3
    assert torch.equal(engine.full_tensor("weight"), torch.arange(8.0).view(4, 2))
