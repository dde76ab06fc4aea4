"""A thousand ranks in one process: the fake process group moves no bytes, but all else is real."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_engine as fe
from fsdp_engine.comm import groups as groups_module
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.layout import ALIGNMENT
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.plan import AxisPlan, AxisPlans, Plan, PlanSettings, make_plan
from tests.models import Transformer, token_batch
from tests.training import mesh_of

WORLD = 1024
CASES = [
    ((1024,), "optim_grads_params", "no_shard"),
    ((1024,), "optim", "no_shard"),
    ((32, 32), "optim_grads_params", "no_shard"),
    ((32, 32), "optim_grads_params", "optim"),
    ((32, 32), "optim_grads_params", "optim_grads_params"),
    ((1, 1024), "optim_grads", "optim"),
    ((1024, 1), "optim_grads_params", "optim_grads_params"),
]


@contextmanager
def world(rank: int, *shape: int) -> Iterator[Any]:
    """This process as one rank of a mesh of ``shape``; gives the mesh."""
    size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield mesh_of(*shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1, 517, 1023])
@pytest.mark.parametrize(("shape", "strategy", "outer"), CASES)
def test_a_rank_of_a_thousand_trains_with_its_part(
    rank: int, shape: tuple[int, ...], strategy: str, outer: str
) -> None:
    levels = Strategy.from_names(strategy, outer)
    sizes = {Axis.OUTER: ([1, *shape])[-2], Axis.INNER: shape[-1]}
    with world(rank, *shape) as mesh:
        model = Transformer(num_blocks=2)
        full_shapes = {name: p.shape for name, p in model.named_parameters()}
        engine = fe.shard(model, mesh, strategy, outer)
        optimizer = torch.optim.AdamW(model.parameters())
        for num_micro in (1, 2):
            for micro in range(num_micro):
                loss = model(*token_batch(2, micro))
                if micro < num_micro - 1:
                    with engine.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            for buffer in engine.buffers:
                held = buffer.layout.numel
                for axis, size in sizes.items():
                    held //= size if levels.shards(Role.OPTIM, axis) else 1
                assert buffer.weights.main.tensor.numel() == held
                assert buffer.grads is not None
                assert buffer.grads.optim_grads is not None
                assert buffer.grads.optim_grads.numel() == held
                assert held % ALIGNMENT == 0
            assert engine.clip_grad_norm_(1.0).shape == ()
            optimizer.step()
            optimizer.zero_grad()
        assert not {"full", "staging"} & set(engine.memory_bytes())
        for name, param in model.named_parameters():
            assert isinstance(param, FlatDTensor)
            assert param.shape == full_shapes[name]
            assert param.local.numel() == param.flat_placement.numel


@pytest.mark.parametrize("shape", [(1024,), (32, 32), (1, 1024)])
def test_groups_do_not_multiply_with_ranks_or_engines(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = groups_module.new_group

    def counted(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        made.append(len(ranks))
        return make(ranks, *args, **kwargs)

    monkeypatch.setattr(groups_module, "new_group", counted)
    with world(5, *shape) as mesh:
        for _ in range(3):
            fe.shard(Transformer(num_blocks=1), mesh, "optim", "optim")
    # Gathers and reductions along each axis, and small messages over both.
    expected = {(1024,): [1024] * 2, (32, 32): [32] * 4 + [1024], (1, 1024): [1024] * 2}
    assert sorted(made) == expected[shape]


def plan_of(model: nn.Module, num_ranks: int, granule: Any = None) -> Plan:
    levels = Strategy.from_names("optim_grads_params", "optim")
    axis_plans = AxisPlans(AxisPlan({Axis.OUTER: num_ranks // 32, Axis.INNER: 32}, levels))
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return make_plan(model, None, PlanSettings(policy, fe.Options(granule=granule), axis_plans))


def meta_model(num_params: int, num_units: int) -> nn.Module:
    """Units of many small linears, on the meta device."""
    with torch.device("meta"):
        return nn.ModuleList(
            nn.Sequential(
                *(nn.Linear(24, 24 + place % 3) for place in range(num_params // num_units // 2))
            )
            for _ in range(num_units)
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "granule",
    [None, pytest.param(lambda name, param: param.shape[-1], marks=pytest.mark.thorough)],
)
def test_ten_thousand_parameters_are_planned_for_four_thousand_ranks(granule: Any) -> None:
    model = meta_model(10_000, 50)
    plan = plan_of(model, 4096, granule)
    slots = [slot for unit in plan.units for b in unit.buffers for slot in b.layout.slots]
    assert len(slots) == len(plan.records) == 10_000
    assert len({slot.name for slot in slots}) == 10_000
    assert plan.on_meta
    assert len(plan.signature()) >= 10_000


def test_a_layout_for_four_thousand_ranks_is_as_small_as_one_for_two() -> None:
    model = meta_model(200, 1)
    sizes = {}
    for num_ranks in (64, 4096):
        plan = plan_of(model, num_ranks)
        layouts = [buffer.layout for unit in plan.units for buffer in unit.buffers]
        assert {layout.num_shards for layout in layouts} == {num_ranks}
        sizes[num_ranks] = len(pickle.dumps(layouts))
    # Layouts have the same entries; only their numbers have more digits.
    assert sizes[4096] <= sizes[64] + 16


def placements_of(num_ranks: int) -> list[FlatPlacement]:
    with world(num_ranks // 2, num_ranks) as mesh:
        model = Transformer(num_blocks=2)
        fe.shard(model, mesh)
        placements = [p.flat_placement for p in model.parameters() if isinstance(p, FlatDTensor)]
        assert len(placements) == len(list(model.parameters()))
        assert all(placement.mesh is mesh for placement in placements)
        return placements


def num_objects(root: object, stop_at: tuple[type, ...]) -> int:
    """The number of objects that ``root`` refers to, without those of the types ``stop_at``."""
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, stop_at):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (tuple, list, set, frozenset)):
            todo += value
        elif hasattr(value, "__dict__"):
            todo += vars(value).values()
    return len(seen)


def test_a_parameter_holds_nothing_that_grows_with_the_number_of_ranks() -> None:
    shared = (dist.device_mesh.DeviceMesh, dist.ProcessGroup, torch.dtype, type)
    counts = {
        num_ranks: [num_objects(placement, shared) for placement in placements_of(num_ranks)]
        for num_ranks in (8, 1024)
    }
    assert all(few > 5 for few in counts[8])
    assert all(many <= few + 2 for few, many in zip(counts[8], counts[1024], strict=True))
