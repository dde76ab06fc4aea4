"""Fields of the config that say when: each changes the order in which a step's events come, and
no number of collectives or bytes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy
from tests.comm.timeline import PHASES, Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Layers, config_of
from tests.messages import Messages, expected_collectives
from tests.models import Stack, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

DIM, NUM_LAYERS = 8, 3
SIZE = 128  # of each layer: its weight, and its bias at a multiple of 64
CALLS = [f"call layers.{number}" for number in range(NUM_LAYERS)]


class Run:
    """Steps of a wrapped model, the first of which has shown the order. A layer is a bucket."""

    def __init__(self, level: str, **fields: Any) -> None:
        torch.manual_seed(0)
        model = Layers(DIM, NUM_LAYERS)
        self.timeline = Timeline(model)
        fields = {"overlap": True, "bucket_size": 65, **fields}
        self.ddp = fe.DistributedDataParallel(model, config_of(level, **fields))
        self.engine = self.ddp.engine
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.step(0)

    def step(self, number: int, **options: Any) -> None:
        batch = vector_batch(2, 10 * number + dist.get_rank(), DIM)[:1]
        timed_step(self.ddp, self.optimizer, self.timeline, batch, **options)


def gathers(level: str) -> list[str]:
    """Of units where parameters are cut, else of buckets, in forward order."""
    cut = level == "optim_grads_params"
    labels = [f"layers.{n}" if cut else f"(bucket {2 - n})" for n in range(NUM_LAYERS)]
    return [f"all-gather of {label}" for label in labels]


def one_by_one(everything: list[str]) -> list[str]:
    return [each for pair in zip(everything, CALLS, strict=True) for each in pair]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_align_param_gather_leaves_gathers_to_start_param_sync(level: str) -> None:
    everything = gathers(level)
    for align in (False, True):
        run = Run(level, align_param_gather=align, suggested_communication_unit_size=10_000)
        run.step(1)
        # One by one, each when the first module needs it; cut parameters as always.
        aligned = align and level != "optim_grads_params"
        expected = one_by_one(everything) if aligned else [*everything, *CALLS]
        assert run.timeline.in_phase("forward") == expected
        run.step(2, param_sync=True)
        assert run.timeline.in_phase("sync") == everything
        assert run.timeline.in_phase("forward") == CALLS


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_suggested_communication_unit_size_says_how_much_is_gathered_ahead(level: str) -> None:
    everything = gathers(level)
    ahead = [*everything, *CALLS]
    one_ahead = [*everything[:2], CALLS[0], everything[2], *CALLS[1:]]
    # Weights that stay whole are brought up to date in memory that is held anyway: all at once.
    cut = level == "optim_grads_params"
    expected = {0: one_by_one(everything), 1: one_ahead if cut else ahead, 100 * SIZE: ahead}
    for budget, events in expected.items():
        run = Run(level, suggested_communication_unit_size=budget)
        run.step(1)
        assert run.engine.budget == budget
        assert run.timeline.in_phase("forward") == events, budget
    engine = Run(level).engine
    # The mean unit, and twice it for gradients; the root, which has no parameters, is none.
    assert (engine.budget, engine.staging_budget) == (SIZE, (2 * SIZE, 1))


@on_ranks(world_size=2)
def test_suggested_communication_unit_size_bounds_gradient_buffers_in_use() -> None:
    for budget, most in ((0, 1), (2 * SIZE, 2), (10_000, 3)):
        run = Run("optim_grads", overlap=False, suggested_communication_unit_size=budget)
        run.engine.peak_memory_bytes(reset=True)
        run.step(1)
        assert run.engine.peak_memory_bytes()["staging"] == most * SIZE * 4


CUT_MODEL = {"bucket_size": 300}  # three buckets where parameters are whole


def on_axes(counts: Counter[Any], num_axes: int) -> Counter[Any]:
    """Counts without those along an outer axis of one rank, which are zero."""
    if num_axes == 2:
        return counts
    return Counter({k: v for k, v in counts.items() if "outer" not in str(k).lower()})


def expected_phases(
    levels: Strategy, reduces: bool, is_ahead: bool, num_axes: int
) -> set[tuple[str, str]]:
    """(phase, collective) of a step of several microbatches after others."""
    optim, grad, param = (levels.depth(role) for role in (Role.OPTIM, Role.GRAD, Role.PARAM))
    found: set[tuple[str, str]] = set()
    for depth, axis in enumerate(AXIS_BELOW_DEPTH[:num_axes]):
        suffix = "+outer" if axis is Axis.OUTER else ""
        gather, reduction = f"all-gather{suffix}", f"reduce-scatter{suffix}"
        if depth >= optim:
            reduction = f"all-reduce{suffix}"
        found.add(("backward" if reduces or depth < grad else "finish", reduction))
        if depth < param:
            found |= {("forward", gather), ("backward", gather)}
        elif depth < optim:
            # Weights that stay whole along all axes are gathered right after the step.
            found.add(("forward" if is_ahead or param else "optimizer", gather))
    return found


def count_wrapped(inner: str, outer: str, shape: tuple[int, ...]) -> None:
    levels, num_axes = Strategy.from_names(inner, outer), len(shape)
    weights = []
    for reduces, is_ahead, dtype in (
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (True, True, torch.float32),
    ):
        torch.manual_seed(0)
        fields = {"overlap_grad_reduce": reduces, "overlap_param_gather": is_ahead, **CUT_MODEL}
        config = config_of(inner, outer, **fields)
        ddp = fe.DistributedDataParallel(Stack().to(dtype), config, mesh_of(*shape))
        engine, timeline, mesh = ddp.engine, Timeline(), ddp.engine.mesh
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, timeline, batch_of(dtype, 0))
        control = mesh.control_group
        assert control is not None
        usage = 2 * (len(list(ddp.parameters())) + 16) * (control.size() - 1) // control.size()
        for num_micro in (3, 1):
            messages = Messages()
            with messages.counting():
                batches = [batch_of(dtype, 1 + each) for each in range(num_micro)]
                timed_step(ddp, optimizer, timeline, *batches)
                before = messages.operations.copy(), messages.calls.copy()
                ddp.finish_grad_sync()  # final already
            assert (messages.operations, messages.calls) == before
            counts, sent = expected_collectives(engine, levels, num_micro)
            counts, sent = on_axes(counts, num_axes), on_axes(sent, num_axes)
            kinds = ("all-gather", "reduce-scatter", "all-reduce")
            found = {k: v for k, v in messages.operations.items() if k.startswith(kinds)}
            assert found == counts, (reduces, num_micro)
            expected_sent = Counter({control.group_name: usage})
            for (axis, kind), num_bytes in sent.items():
                ends = mesh.axis(axis)
                group = ends.gather_group if kind == "gather" else ends.reduce_group
                assert group is not None
                expected_sent[group.group_name] += num_bytes
            assert messages.sent == expected_sent, (reduces, num_micro)
            # One message about usage. On one axis an all-reduce of gradients goes the same way.
            native = sum("all-reduce" in label for label in counts) if num_axes == 1 else 0
            assert messages.calls[control.group_name, "allreduce_"] == native + 1
            phases = {
                (phase, what.partition(" ")[0] + ("+outer" if what.endswith("+outer") else ""))
                for phase, what in timeline.events
            }
            assert {phase for phase, _ in phases} <= set(PHASES)
            if num_micro == 3:
                assert phases == expected_phases(levels, reduces, is_ahead, num_axes), reduces
        if dtype == torch.float32:
            state = engine.full_state_dict()
            weights.append(torch.cat([state[name].flatten() for name in sorted(state)]))
    assert torch.equal(*weights)


def batch_of(dtype: torch.dtype, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = vector_batch(2, 10 * number + dist.get_rank())
    return x.to(dtype), y


TWO_PAIRS = [("optim", "optim"), ("optim_grads_params", "optim_grads")]
TWO_AXES = [
    pytest.param(pair, (2, 2), id=name, marks=() if pair in TWO_PAIRS else pytest.mark.thorough)
    for pair, name in zip(FEW_PAIRS, FEW_PAIR_NAMES, strict=True)
]
ONE_AXIS = [pytest.param((level, "no_shard"), (2,), id=level) for level in LEVEL_NAMES]


@pytest.mark.parametrize(("levels", "shape"), TWO_AXES + ONE_AXIS)
def test_overlap_grad_reduce_and_overlap_param_gather_change_the_phases_of_collectives(
    ranks: Ranks, levels: tuple[str, str], shape: tuple[int, ...]
) -> None:
    ranks.run(count_wrapped, *levels, shape, world_size=math.prod(shape))


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_calls_that_have_nothing_to_do_send_nothing(level: str) -> None:
    for overlap in (False, True):
        ddp = fe.DistributedDataParallel(Stack(), config_of(level, overlap=overlap, **CUT_MODEL))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        timed_step(ddp, optimizer, Timeline(), batch_of(torch.float32, 0))
        messages = Messages()
        with messages.counting():
            ddp.start_grad_sync()
            ddp.finish_grad_sync()
            ddp.scale_gradients(0.5)
            ddp.zero_grad_buffer()
            ddp.zero_grad_buffer()
        assert not messages.calls
        assert not messages.operations
        # Gathered weights are not gathered again until they change.
        ddp.start_param_sync(force_sync=True)
        with messages.counting():
            ddp.start_param_sync()
            ddp.start_param_sync(force_sync=True)
        assert not messages.operations


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_step_without_a_backward_on_any_rank_reduces_zeros(level: str) -> None:
    ddp = fe.DistributedDataParallel(Stack(), config_of(level, **CUT_MODEL))
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp.finish_grad_sync()
        ddp.finish_grad_sync()  # nothing is left to do
        assert ddp.engine.clip_grad_norm_(float("inf")).item() == 0.0
        assert all(param.grad is None for param in ddp.parameters())
