"""Checkpoints know global shapes: whatever cut a model when it was saved, any cut loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from tests.checkpoint.scene import shared_folder
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for, whole
from tests.pool import Ranks, on_ranks

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


def trained(how: Cut, shape: dict[str, int], steps: int) -> tuple[fe.Engine, Any]:
    num_data, num_tensor, level = how
    torch.manual_seed(steps)  # loading has to change everything
    model = Model(**shape)
    if num_data * num_tensor == 1:
        engine = fe.shard(model, strategy=level)
    else:
        mesh = mesh_of((num_data, num_tensor), ("dp", "tp"))
        if num_tensor > 1:
            cut(model, mesh["tp"], sequence=True)
        engine = fe.shard(model, mesh["dp"], level)
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(steps):
        engine.model(tokens_for(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, optimizer


def everything(engine: fe.Engine, optimizer: Any) -> dict[str, Tensor]:
    found = {}
    for name, param in engine.model.named_parameters():
        found[name] = whole(param)
        for key, value in optimizer.state[param].items():
            found[f"{name} {key}"] = whole(value)
    return found


def save(folder: str, how: Cut, shape: dict[str, int]) -> dict[str, Tensor]:
    engine, optimizer = trained(how, shape, 2)
    fe.save_checkpoint(f"{folder}/ours", engine, optimizer)
    fe.export_safetensors(engine, f"{folder}/weights")
    return everything(engine, optimizer)


def load(folder: str, how: Cut, shape: dict[str, int]) -> dict[str, Tensor]:
    engine, optimizer = trained(how, shape, 1)
    fe.load_safetensors(engine, f"{folder}/weights")
    weights = {name: whole(param) for name, param in engine.model.named_parameters()}
    for param in engine.model.parameters():
        with torch.no_grad():
            param.zero_()
    fe.load_checkpoint(f"{folder}/ours", engine, optimizer)
    found = everything(engine, optimizer)
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    return found


def run_on(
    ranks: Ranks, fn: Any, folder: Path, how: str, shape: dict[str, int]
) -> dict[str, Tensor]:
    world = CUTS[how][0] * CUTS[how][1]
    results = ranks.run(fn, str(folder), CUTS[how], shape, world_size=world)
    return results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "saved",
    [
        "tp2 dp2",
        pytest.param("tp2 dp2 optim", marks=THOROUGH),
        pytest.param("tp2 dp2 no_shard", marks=THOROUGH),
        pytest.param("dp4", marks=THOROUGH),
        pytest.param("tp4", marks=THOROUGH),
        pytest.param("alone", marks=THOROUGH),
    ],
)
def test_any_cut_loads_what_any_other_saved(
    ranks: Ranks, tmp_path: Path, saved: str, shape: dict[str, int]
) -> None:
    expected = run_on(ranks, save, tmp_path, saved, shape)
    for loaded in CUTS if saved in ("tp2 dp2", "dp4") else ("tp2 dp2", "dp4"):
        found = run_on(ranks, load, tmp_path, loaded, shape)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{saved} to {loaded}: {name}"


def through_dcp(model: Any, optimizer: Any, folder: str, saves: bool) -> dict[str, Tensor]:
    """Save, or load; the whole weights after that."""
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optimizer": parts[1]}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return {name: whole(param) for name, param in model.named_parameters()}


def with_fsdp2(folder: str, shape: dict[str, int], saves: bool) -> dict[str, Tensor]:
    """The same model under FSDP2 with the same tensor parallelism, by DCP."""
    torch.manual_seed(1 + saves)
    model: Any = Model(**shape)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    cut(model, mesh["tp"], sequence=True)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(tokens_for(0, 0, 0)).backward()
    optimizer.step()
    return through_dcp(model, optimizer, folder, saves)


def by_dcp(folder: str, shape: dict[str, int], saves: bool) -> dict[str, Tensor]:
    """Ours, by DCP and torch's own functions for state dicts."""
    engine, optimizer = trained(CUTS["tp2 dp2"], shape, 2 if saves else 1)
    return through_dcp(engine.model, optimizer, folder, saves)


@pytest.mark.parametrize("shape", SHAPES)
def test_to_and_from_fsdp2_with_the_same_tensor_parallelism(
    ranks: Ranks, tmp_path: Path, shape: dict[str, int]
) -> None:
    for number, (saves, loads) in enumerate([(with_fsdp2, by_dcp), (by_dcp, with_fsdp2)]):
        folder = str(tmp_path / str(number))
        expected = ranks.run(saves, folder, shape, True)[0]
        found = ranks.run(loads, folder, shape, False)[0]
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


class Scaled(nn.Module):
    """A 0-d parameter beside a matrix, both DTensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        )
        self.scale = nn.Parameter(distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]))


@on_ranks(2)
def test_a_0d_dtensor_is_exported_and_loaded() -> None:
    folder = shared_folder()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Scaled(mesh["tp"])
    engine = fe.shard(model, mesh["dp"])
    fe.export_safetensors(engine, folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fe.load_safetensors(engine, folder)
    assert engine.full_tensor("scale") == 3
    assert torch.equal(engine.full_tensor("weight"), torch.arange(8.0).view(4, 2))
