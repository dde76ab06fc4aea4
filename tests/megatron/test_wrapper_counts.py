"""Exact collectives and bytes per step of the wrapper, by phase of the step. The expected values
follow from the levels, as in ``runtime/test_counts.py``; the wrapper only changes the phase."""

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
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.messages import Messages, expected_collectives
from tests.models import Stack, vector_batch
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS, SPARED_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

CUT_MODEL = {"bucket_size": 300}  # three buckets where parameters are whole


def on_axes(counts: Counter[Any], num_axes: int) -> Counter[Any]:
    """Counts without those along an outer axis of one rank, which are zero."""
    if num_axes == 2:
        return counts
    return Counter({k: v for k, v in counts.items() if "outer" not in str(k).lower()})


def expected_phases(levels: Strategy, overlap: bool, num_axes: int) -> set[tuple[str, str]]:
    """(phase, collective) of a step of several microbatches after others."""
    optim, grad, param = (levels.depth(role) for role in (Role.OPTIM, Role.GRAD, Role.PARAM))
    found: set[tuple[str, str]] = set()
    for depth, axis in enumerate(AXIS_BELOW_DEPTH[:num_axes]):
        suffix = "+outer" if axis is Axis.OUTER else ""
        gather, reduction = f"all-gather{suffix}", f"reduce-scatter{suffix}"
        if depth >= optim:
            reduction = f"all-reduce{suffix}"
        found.add(("backward" if overlap or depth < grad else "finish", reduction))
        if depth < param:
            found |= {("forward", gather), ("backward", gather)}
        elif depth < optim:
            # Weights that stay whole along all axes are gathered right after the step.
            found.add(("forward" if overlap or param else "optimizer", gather))
    return found


def count_wrapped(inner: str, outer: str, shape: tuple[int, ...]) -> None:
    levels, num_axes = Strategy.from_names(inner, outer), len(shape)
    for overlap, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        torch.manual_seed(0)
        config = config_of(inner, outer, overlap=overlap, **CUT_MODEL)
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
            assert found == counts, (overlap, num_micro)
            expected_sent = Counter({control.group_name: usage})
            for (axis, kind), num_bytes in sent.items():
                ends = mesh.axis(axis)
                group = ends.gather_group if kind == "gather" else ends.reduce_group
                assert group is not None
                expected_sent[group.group_name] += num_bytes
            assert messages.sent == expected_sent, (overlap, num_micro)
            # One message about usage. On one axis an all-reduce of gradients goes the same way.
            native = sum("all-reduce" in label for label in counts) if num_axes == 1 else 0
            assert messages.calls[control.group_name, "allreduce_"] == native + 1
            phases = {
                (phase, what.partition(" ")[0] + ("+outer" if what.endswith("+outer") else ""))
                for phase, what in timeline.events
            }
            assert {phase for phase, _ in phases} <= set(PHASES)
            if num_micro == 3:
                assert phases == expected_phases(levels, overlap, num_axes), overlap


def batch_of(dtype: torch.dtype, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = vector_batch(2, 10 * number + dist.get_rank())
    return x.to(dtype), y


TWO_AXES = [
    pytest.param(pair, (2, 2), id=name, marks=pytest.mark.thorough if pair in SPARED_PAIRS else ())
    for pair, name in zip(FEW_PAIRS, FEW_PAIR_NAMES, strict=True)
]
ONE_AXIS = [pytest.param((level, "no_shard"), (2,), id=level) for level in LEVEL_NAMES]


@pytest.mark.parametrize(("levels", "shape"), TWO_AXES + ONE_AXIS)
def test_collectives_of_a_wrapped_step_follow_from_the_levels(
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
