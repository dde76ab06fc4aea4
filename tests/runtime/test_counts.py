"""Collectives per step and the bytes that each rank sends, exact, for every pair of levels.

The tests count the operations that lanes get, by label, and every message that reaches a process
group, by group. Expected counts follow from the levels alone ([Note: Depth] in
``strategies/pair.py``) and from the traffic formulas of ``strategies/``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from fsdp_engine.strategies import Axis, Role, Strategy
from tests.messages import GATHERS, REDUCTIONS, Messages, count_step, expected_collectives
from tests.models import Chain, LoraLinear, Stack, vector_batch
from tests.pairs import EVERY_PAIR
from tests.pool import on_ranks
from tests.training import mesh_of


def traffic(engine: Any, strategy: Strategy, num_micro: int) -> Counter[tuple[Axis, str]]:
    """Bytes sent by the formulas of ``strategies/``, by (axis, kind)."""
    sent: Counter[tuple[Axis, str]] = Counter()
    for axis in Axis:
        formula = strategy.level(axis).traffic(2)
        for unit in engine.units:
            for buffer in unit.buffers:
                # Along the outer axis, a rank sends only its shard of the inner axis.
                part = 1.0
                if axis is Axis.OUTER:
                    part = strategy.inner.fraction(Role.OPTIM, 2)
                dtypes, numel = buffer.kind.dtypes, buffer.layout.numel * part
                params = formula.params_per_step + num_micro * formula.params_per_microbatch
                if unit is engine.units[-1]:
                    # Gathered once in a microbatch, not twice.
                    params -= num_micro * formula.params_per_microbatch / 2
                grads = formula.grads_per_step + num_micro * formula.grads_per_microbatch
                sent[axis, "gather"] += round(params * numel * dtypes.compute.itemsize)
                sent[axis, "reduce"] += round(grads * numel * dtypes.comm.itemsize)
    return +sent


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
@on_ranks(4)
def test_collectives_and_bytes_of_a_step_follow_from_the_levels(strategy: str, outer: str) -> None:
    levels = Strategy.from_names(strategy, outer)
    for dtype in (None, torch.bfloat16):
        model = Stack()
        policy = fe.MixedPrecisionPolicy(param_dtype=dtype)
        engine = fe.shard(model, mesh_of(2, 2), strategy, outer, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        control = engine.mesh.control_group.group_name
        for num_micro in (1, 1, 3):
            messages = count_step(model, engine, optimizer, num_micro)
            counts, sent = expected_collectives(engine, levels, num_micro)
            assert sent == traffic(engine, levels, num_micro)
            found = {
                label: count
                for label, count in messages.operations.items()
                if label.startswith(GATHERS + REDUCTIONS)
            }
            assert found == dict(counts), (dtype, num_micro)
            expected = {control: 2 * 3 * (sum(1 for _ in model.parameters()) + 16) // 4}
            for (axis, kind), num_bytes in sent.items():
                groups = engine.mesh.axis(axis)
                group = groups.gather_group if kind == "gather" else groups.reduce_group
                expected[group.group_name] = num_bytes
            assert dict(messages.sent) == expected, (dtype, num_micro)
            assert messages.calls[control, "allreduce_"] == 1  # the message about used parameters


@on_ranks(world_size=2)
def test_on_an_axis_of_one_rank_nothing_travels() -> None:
    model = Stack()
    engine = fe.shard(model, mesh_of(2, 1), "optim_grads_params", "optim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count_step(model, engine, optimizer, 1)
    messages = count_step(model, engine, optimizer, 1)
    outer = engine.mesh.outer
    assert outer.gather_group is not None
    assert outer.reduce_group is not None
    assert set(messages.sent) == {outer.gather_group.group_name, outer.reduce_group.group_name}


@on_ranks(world_size=2)
def test_evaluation_gathers_each_unit_once_and_reduces_nothing() -> None:
    for strategy in ("optim", "optim_grads_params"):
        model = Stack()
        engine = fe.shard(model, strategy=strategy)
        messages = Messages()
        with messages.counting(), torch.no_grad():
            model(*vector_batch(2, 0))
        units = [unit for unit in engine.units if unit.buffers]
        labels = [f"all-gather of {unit.label}" for unit in units]
        assert messages.operations == Counter(labels)
        assert [name for _, name in messages.calls] == ["recv_", "send"]
        # Unchanged weights are gathered again only if they were freed.
        with messages.counting(), torch.no_grad():
            model(*vector_batch(2, 0))
        again = 2 if strategy == "optim_grads_params" else 1
        assert messages.operations == Counter(labels * again)


@on_ranks(world_size=2)
def test_frozen_weights_that_are_never_cut_travel_once() -> None:
    model = Chain(LoraLinear(), LoraLinear())
    engine = fe.shard(model, strategy="optim")
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    first = count_step(model, engine, optimizer, 1)
    second = count_step(model, engine, optimizer, 1)
    frozen = [f"all-gather of {buffer.label}" for buffer in engine.buffers if buffer.grads is None]
    assert len(frozen) == 2
    assert [first.operations[label] for label in frozen] == [1, 1]
    assert [second.operations[label] for label in frozen] == [0, 0]


@on_ranks(world_size=2)
def test_clipping_takes_one_small_message() -> None:
    model = Stack()
    engine = fe.shard(model)
    model(*vector_batch(2, dist.get_rank())).backward()
    messages = Messages()
    with messages.counting():
        engine.clip_grad_norm_(1.0)
    assert messages.operations == Counter()
    assert list(messages.calls.values()) == [1]
    assert list(messages.sent.values()) == [8]  # all-reduce of one fp64 element
