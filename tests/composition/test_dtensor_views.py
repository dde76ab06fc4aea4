"""What users see of a sharded parameter that is a DTensor: one tensor of the global shape."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for, whole
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS

UNEVEN = {"width": 6, "hidden": 17}


def both(level: str, **shape: int) -> tuple[Model, fe.Engine]:
    """The plain model, and the sharded one of the same values."""
    torch.manual_seed(5)
    model = Model(**shape)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    twin = cut(copy.deepcopy(model), mesh["tp"], sequence=True)
    return model, fe.shard(twin, mesh["dp"], level)


def pairs(model: nn.Module, engine: fe.Engine) -> list[tuple[str, Any, Any]]:
    plain = dict(model.named_parameters())
    return [(name, plain[name], param) for name, param in engine.model.named_parameters()]


@on_ranks(4)
def test_shape_placements_and_mesh() -> None:
    _, engine = both("optim_grads_params")
    weight: Any = engine.model.get_parameter("blocks.0.up.weight")
    assert isinstance(weight, FlatDTensor)
    assert weight.shape == (20, 12)
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert [str(each) for each in weight.placements][1] == "S(0)"
    assert weight.placements[0].is_shard()
    # This rank holds half of the half that tensor parallelism left it, or thereabouts.
    held = torch.tensor(weight.to_local().numel())
    dist.all_reduce(held)
    assert held == weight.numel() == 240
    norm: Any = engine.model.get_parameter("blocks.0.norm.weight")
    assert norm.placements[1] == Replicate()


@on_ranks(4)
def test_values_are_those_of_one_tensor() -> None:
    for level in LEVELS:
        for shape in ({}, UNEVEN) if level == LEVELS[-1] else (UNEVEN,):
            model, engine = both(level, **shape)
            state = engine.full_state_dict()
            for name, plain, param in pairs(model, engine):
                value, mine, label = plain.detach(), param.detach(), f"{level}: {name}"
                assert torch.equal(whole(mine), value), label
                assert torch.allclose(whole(mine.norm()), value.norm()), label
                assert torch.allclose(whole(mine.sum()), value.sum(), atol=1e-5), label
                assert torch.allclose(whole(mine.mean()), value.mean(), atol=1e-6), label
                assert whole(mine.max()) == value.max()
                assert whole(mine.abs().min()) == value.abs().min()
                assert torch.equal(whole(mine * 2 + mine), value * 2 + value)
                replicated = mine.redistribute(placements=[Replicate()] * mine.device_mesh.ndim)
                assert torch.equal(replicated.to_local(), value)
                assert torch.equal(state[name], value), label
                assert torch.equal(engine.full_tensor(name), value), label
        with engine.unsharded():
            weight: Any = engine.model.get_parameter("blocks.1.up.weight")
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
            with torch.no_grad():
                weight.mul_(2)
        found = whole(engine.model.get_parameter("blocks.1.up.weight"))
        assert torch.equal(found, 2 * model.get_parameter("blocks.1.up.weight").detach())


@on_ranks(4)
def test_values_from_whole_tensors_and_from_generators() -> None:
    for level in LEVELS[1:]:  # where nothing is cut, parameters are DTensors of torch's own
        model, engine = both(level, **UNEVEN)
        for each in (model, engine.model):
            torch.manual_seed(11)
            with torch.no_grad():
                for param in each.parameters():
                    nn.init.normal_(param, std=0.02)
        for name, plain, param in pairs(model, engine):
            assert torch.equal(whole(param), plain.detach()), (level, name)
        torch.manual_seed(9)
        other = Model(**UNEVEN)
        engine.model.load_state_dict(other.state_dict())
        for name, plain, param in pairs(other, engine):
            assert torch.equal(whole(param), plain.detach()), (level, name)
        expected = other(tokens_for(0, 0, 0))
        assert torch.allclose(engine.model(tokens_for(0, 0, 0)), expected, atol=1e-5)


@on_ranks(4)
def test_a_penalty_on_parameters_outside_forward() -> None:
    weights = torch.arange(17.0 * 6).view(17, 6) / 100
    for level in ("optim", "optim_grads_params"):
        model, engine = both(level, **UNEVEN)
        for each in (model, engine.model):
            penalty: Tensor = torch.zeros(())
            for param in each.parameters():
                penalty = penalty + param.square().sum() + param.norm()
            full: Any = each.get_parameter("blocks.2.up.weight")
            full = full.full_tensor() if isinstance(full, DTensor) else full
            penalty = penalty + (full * weights).sum()
            (each(tokens_for(0, 0, 0)) + 0.1 * penalty).backward()
        for name, plain, param in pairs(model, engine):
            found = whole(param.grad)
            assert torch.allclose(found, plain.grad, rtol=1e-3, atol=1e-5), (level, name)


@on_ranks(4)
def test_a_dtensor_of_the_same_placements_is_taken_as_a_value() -> None:
    _, engine = both("optim_grads_params")
    weight: Any = engine.model.get_parameter("head.weight")
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    mesh = weight.flat_placement.spread.mesh
    with torch.no_grad():
        weight.copy_(distribute_tensor(values, mesh, [Shard(0)]))
    assert torch.equal(whole(weight), values)
    with torch.no_grad():
        weight.copy_(distribute_tensor(2 * values, mesh, [Shard(1)]))
    assert torch.equal(whole(weight), 2 * values)
    with torch.no_grad():
        weight.copy_(distribute_tensor(values, weight.device_mesh, weight.placements))
    assert torch.equal(whole(weight), values)
    head: Any = engine.model.get_submodule("head")
    head.weight = nn.Parameter(distribute_tensor(3 * values, mesh, [Shard(0)]))
    assert torch.equal(whole(head.weight), 3 * values)


@on_ranks(4)
def test_hooks_see_the_reduced_gradient() -> None:
    model, engine = both("optim_grads_params")
    seen: dict[str, Tensor] = {}
    for name, param in engine.model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.__setitem__(name, whole(grad)))
    rank = engine.mesh.rank
    engine.model(tokens_for(0, 0, rank)).backward()
    (sum(model(tokens_for(0, 0, each)) for each in range(2)) / 2).backward()
    for name, plain, _ in pairs(model, engine):
        assert torch.allclose(seen[name], plain.grad, rtol=1e-3, atol=1e-5), name


@on_ranks(4)
def test_an_estimate_counts_what_is_here() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for level in LEVELS:
        model = cut(Model(hidden=17), mesh["tp"], sequence=True)
        planned = fe.estimate(model, world_size=2, strategy=level)
        engine = fe.shard(model, mesh["dp"], level)
        engine.model(tokens_for(0, 0, 0)).backward()
        held = engine.memory_bytes()
        assert held["grad"] == planned.grad_bytes
        assert sum(held.get(role, 0) for role in ("main", "model")) == planned.weight_bytes


@on_ranks(4)
def test_optimizer_state_of_whole_tensors_is_taken_and_lies_as_parameters_do() -> None:
    model, engine = both("optim_grads_params", **UNEVEN)
    alone = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(tokens_for(0, 0, 0)).backward()
    alone.step()
    optimizer = fe.shard_optimizer(torch.optim.AdamW(engine.model.parameters(), lr=0.1))
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    for each, stepped in ((model, alone), (engine.model, optimizer)):
        for param in each.parameters():
            param.grad = torch.zeros_like(param)
        stepped.step()
    for name, plain, param in pairs(model, engine):
        for key in ("exp_avg", "exp_avg_sq"):
            found, expected = optimizer.state[param][key], alone.state[plain][key]
            assert torch.equal(whole(found), expected), (name, key)
            assert found.flat_placement == param.flat_placement, (name, key)
