"""What users see of a sharded parameter that is a DTensor: one tensor of the global shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor
from tests.composition.tensor_parallel import Model, cut, mesh_of, tokens_for
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS
from tests.reference import full

UNEVEN = {"width": 6, "hidden": 17}
TOKENS = tokens_for(0, 0, 0)
CUT = ("optim", "optim_grads_params")


def both(level: str = LEVELS[-1], **shape: int) -> tuple[Model, fe.Engine]:
    """The plain model, and the sharded one of the same values."""
    torch.manual_seed(5)
    model = Model(**shape)
    mesh = mesh_of((2, 2), ("dp", "tp"))
    twin = cut(copy.deepcopy(model), mesh["tp"], sequence=True)
    return model, fe.shard(twin, mesh["dp"], level)


def pairs(model: nn.Module, engine: fe.Engine) -> Iterator[tuple[str, Any, Any]]:
    for name, param in engine.model.named_parameters():
        yield name, model.get_parameter(name), param


def assert_same_values(model: nn.Module, engine: fe.Engine) -> None:
    for name, plain, param in pairs(model, engine):
        assert torch.equal(full(param), plain.detach()), name


@on_ranks(4)
def test_shape_placements_and_mesh() -> None:
    _, engine = both()
    weight: Any = engine.model.get_parameter("blocks.0.up.weight")
    assert isinstance(weight, FlatDTensor)
    assert weight.shape == (20, 12)
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert str(weight.placements[1]) == "S(0)"
    assert weight.placements[0].is_shard()
    # This rank holds about half of its tensor-parallel shard, which is half of the weight.
    held = torch.tensor(weight.to_local().numel())
    dist.all_reduce(held)
    assert held == weight.numel() == 240
    norm: Any = engine.model.get_parameter("blocks.0.norm.weight")
    assert norm.placements[1] == Replicate()


@pytest.mark.parametrize(
    "levels", [("no_shard", CUT[1]), pytest.param(CUT[:1], marks=pytest.mark.thorough)]
)
@on_ranks(4)
def test_values_are_those_of_one_tensor(levels: tuple[str, ...]) -> None:
    for level in levels:
        model, engine = both(level, **UNEVEN)
        state = engine.full_state_dict()
        assert_same_values(model, engine)
        for name, plain, param in pairs(model, engine):
            value, mine, label = plain.detach(), param.detach(), f"{level}: {name}"
            assert torch.allclose(full(mine.norm()), value.norm()), label
            assert torch.allclose(full(mine.sum()), value.sum(), atol=1e-5), label
            assert torch.allclose(full(mine.mean()), value.mean(), atol=1e-6), label
            assert full(mine.max()) == value.max(), label
            assert full(mine.abs().min()) == value.abs().min(), label
            assert torch.equal(full(mine * 2 + mine), value * 2 + value), label
            replicated = mine.redistribute(placements=[Replicate()] * mine.device_mesh.ndim)
            assert torch.equal(replicated.to_local(), value), label
            assert torch.equal(state[name], value), label
            assert torch.equal(engine.full_tensor(name), value), label
        with engine.unsharded(), torch.no_grad():
            weight: Any = engine.model.get_parameter("blocks.1.up.weight")
            assert isinstance(weight, DTensor)
            assert weight.placements == (Shard(0),)
            weight.mul_(2)
            model.blocks[1].up.weight.mul_(2)  # type: ignore[union-attr,operator]
        assert_same_values(model, engine)


@on_ranks(4)
def test_values_from_whole_tensors_and_from_generators() -> None:
    for level in CUT:  # at unsharded levels, parameters are torch's own DTensors
        model, engine = both(level, **UNEVEN)
        for each in (model, engine.model):
            torch.manual_seed(11)
            with torch.no_grad():
                for param in each.parameters():
                    nn.init.normal_(param, std=0.02)
        assert_same_values(model, engine)
        torch.manual_seed(9)
        other = Model(**UNEVEN)
        engine.model.load_state_dict(other.state_dict())
        assert_same_values(other, engine)
        assert torch.allclose(engine.model(TOKENS), other(TOKENS), atol=1e-5)


@on_ranks(4)
def test_ranks_with_different_seeds_draw_one_tensor_along_all_dimensions() -> None:
    _, engine = both()
    for name in ("blocks.0.norm.weight", "blocks.0.up.weight"):  # Replicate(), Shard(0) over tp
        param: Any = engine.model.get_parameter(name)
        torch.manual_seed(dist.get_rank())
        with torch.no_grad():
            nn.init.normal_(param)
        torch.manual_seed(0)
        assert torch.equal(full(param), torch.empty(param.shape).normal_()), name


@on_ranks(4)
def test_gradients_of_a_penalty_outside_forward_and_what_hooks_see() -> None:
    weights = torch.arange(17.0 * 6).view(17, 6) / 100
    seen: dict[str, Tensor] = {}
    for level in CUT:
        model, engine = both(level, **UNEVEN)
        for each in (model, engine.model):
            penalty: Tensor = torch.zeros(())
            for param in each.parameters():
                penalty = penalty + param.square().sum() + param.norm()
            up: Any = each.get_parameter("blocks.2.up.weight")
            up = up.full_tensor() if isinstance(up, DTensor) else up
            (each(TOKENS) + 0.1 * (penalty + (up * weights).sum())).backward()
        for name, plain, param in pairs(model, engine):
            assert torch.allclose(full(param.grad), plain.grad, rtol=1e-3, atol=1e-5), name
            param.register_hook(lambda grad, name=name: seen.__setitem__(name, full(grad)))
        engine.model.zero_grad()
        model.zero_grad()
        engine.model(tokens_for(0, 0, engine.mesh.rank)).backward()
        (sum(model(tokens_for(0, 0, each)) for each in range(2)) / 2).backward()
        for name, plain, _ in pairs(model, engine):
            assert torch.allclose(seen[name], plain.grad, rtol=1e-3, atol=1e-5), name


@on_ranks(4)
def test_a_dtensor_of_the_same_placements_is_taken_as_a_value() -> None:
    _, engine = both()
    weight: Any = engine.model.get_parameter("head.weight")
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
    mesh = weight.flat_placement.spread.mesh
    for factor, other, placements in (
        (1, mesh, [Shard(0)]),
        (2, mesh, [Shard(1)]),
        (1, weight.device_mesh, weight.placements),
    ):
        with torch.no_grad():
            weight.copy_(distribute_tensor(factor * values, other, placements))
        assert torch.equal(full(weight), factor * values)
    head: Any = engine.model.get_submodule("head")
    head.weight = nn.Parameter(distribute_tensor(3 * values, mesh, [Shard(0)]))
    assert torch.equal(full(head.weight), 3 * values)


@on_ranks(4)
def test_an_estimate_counts_what_is_here() -> None:
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for level in LEVELS:
        model = cut(Model(hidden=17), mesh["tp"], sequence=True)
        planned = fe.estimate(model, world_size=2, strategy=level)
        engine = fe.shard(model, mesh["dp"], level)
        engine.model(TOKENS).backward()
        held = engine.memory_bytes()
        assert held["grad"] == planned.grad_bytes
        assert sum(held.get(role, 0) for role in ("main", "model")) == planned.weight_bytes


@on_ranks(4)
def test_optimizer_state_of_whole_tensors_is_taken_and_lies_as_parameters_do() -> None:
    model, engine = both(**UNEVEN)
    alone = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(TOKENS).backward()
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
            assert torch.equal(full(found), expected), (name, key)
            assert found.flat_placement == param.flat_placement, (name, key)
