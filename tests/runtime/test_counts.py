"""Collectives per step and the bytes that each rank sends, exact, for every pair of levels.

Counted are the operations that lanes get, by label, and every message that reaches a process
group, by group. Expected is what follows from the levels alone ([Note: Depth] in
``strategies/pair.py``) and from the traffic formulas of ``strategies/``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.devices import lanes as lanes_module
from fsdp_engine.runtime.description import count_gathers
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy
from tests.models import DIM, LoraLinear, Mlp, Regression, vector_batch
from tests.pairs import EVERY_PAIR
from tests.pool import Ranks, on_ranks
from tests.runtime.test_equivalence import mesh_of

GATHERS, REDUCTIONS = ("all-gather",), ("reduce-scatter", "all-reduce")


class Stack(Regression):
    """Four units of different sizes, and a layer before and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Mlp(hidden=5 + 13 * index) for index in range(4)])
        self.last = nn.Linear(DIM, DIM, bias=False)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Messages(TorchDispatchMode):
    """Within it, counts what is submitted to lanes and what process groups are asked to send.

    Attributes:
        operations: submissions by label.
        sent: bytes that this rank sends, by name of the group. An all-reduce counts as a
            reduce-scatter and an all-gather, which is what it has to move.
        calls: calls by (group, name of the call).
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            group = dist.ProcessGroup.unbox(args[1])
            size, num_bytes = group.size(), sum(t.nbytes for t in args[0])
            self.calls[group.group_name, name] += 1
            if name == "send":
                self.sent[group.group_name] += num_bytes
            elif name == "allreduce_":
                self.sent[group.group_name] += 2 * num_bytes * (size - 1) // size
            else:
                assert name == "recv_", f"{name} in a step"
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        submit = lanes_module.HostLane.submit

        def counted(lane: Any, label: str, *args: Any, **kwargs: Any) -> Any:
            self.operations[label] += 1
            return submit(lane, label, *args, **kwargs)

        lanes_module.HostLane.submit = counted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            lanes_module.HostLane.submit = submit  # type: ignore[method-assign]


def count_step(model: nn.Module, engine: Any, optimizer: Any, num_micro: int) -> Messages:
    """One step; messages of forward and backward."""
    messages = Messages()
    with messages.counting():
        for micro in range(num_micro):
            loss = model(*vector_batch(2, 10 * micro + dist.get_rank()))
            if micro == num_micro - 1:
                loss.backward()
            else:
                with engine.no_sync():
                    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return messages


def numel_at(buffer: Any, depth: int) -> int:
    """Elements of a flat buffer that a rank holds at ``depth``."""
    layout = buffer.layout
    return int(layout.numel) // (1, layout.inner_size, layout.num_shards)[depth]


def expected_collectives(
    engine: Any, strategy: Strategy, num_micro: int
) -> tuple[Counter[str], Counter[tuple[Axis, str]]]:
    """Submissions by label, and bytes sent by (axis, "gather" or "reduce")."""
    counts: Counter[str] = Counter()
    sent: Counter[tuple[Axis, str]] = Counter()
    optim, grad, param = (strategy.depth(role) for role in (Role.OPTIM, Role.GRAD, Role.PARAM))

    def add(what: str, buffer: Any, depth: int, times: int) -> None:
        """A collective between ``depth`` and the next, ``times`` per step."""
        axis = AXIS_BELOW_DEPTH[depth]
        counts[f"{what} of {buffer.label} over the {axis.value} axis"] += times
        dtypes = buffer.kind.dtypes
        gathers = what in GATHERS
        itemsize = (dtypes.compute if gathers else dtypes.comm).itemsize
        held_above = min(depth, optim) if not gathers else depth
        num_bytes = numel_at(buffer, held_above) * itemsize // 2  # two ranks: half is the other's
        num_bytes *= 2 if what == "all-reduce" else 1
        sent[axis, "gather" if gathers else "reduce"] += times * num_bytes

    for unit in engine.units:
        # The last unit that forward leaves stays full until backward needs it.
        stays_full = unit is engine.units[-1]
        uses = num_micro * (1 if stays_full else 2)
        for buffer in unit.buffers:
            for depth in range(param, optim):
                add("all-gather", buffer, depth, 1)
            for depth in range(param):
                add("all-gather", buffer, depth, uses)
            for depth in range(2):
                whole = depth >= optim
                add(
                    "all-reduce" if whole else "reduce-scatter",
                    buffer,
                    depth,
                    num_micro if depth < grad else 1,
                )
    return +counts, +sent


def count_pair(strategy: str, outer: str) -> list[tuple[str, Any, Any]]:
    """(what, found, expected) for each thing to compare."""
    levels = Strategy.from_names(strategy, outer)
    pairs: list[tuple[str, Any, Any]] = []
    for dtype in (None, torch.bfloat16):
        model = Stack()
        engine = fe.shard(
            model,
            mesh_of(2, 2),
            strategy,
            outer,
            mp_policy=fe.MixedPrecisionPolicy(param_dtype=dtype),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gathered = {axis: engine.mesh.axis(axis).gather_group.group_name for axis in Axis}
        reduced = {axis: engine.mesh.axis(axis).reduce_group.group_name for axis in Axis}
        control = engine.mesh.control_group.group_name
        for step, num_micro in enumerate((1, 1, 3)):
            messages = count_step(model, engine, optimizer, num_micro)
            counts, sent = expected_collectives(engine, levels, num_micro)
            found = {
                label: count
                for label, count in messages.operations.items()
                if label.startswith(GATHERS + REDUCTIONS)
            }
            case = f"{dtype}, step {step}, {num_micro} microbatches"
            pairs.append((f"{case}: collectives", found, dict(counts)))
            usage = 2 * 3 * (sum(1 for _ in model.parameters()) + 16) // 4
            expected_sent = {control: usage}
            for (axis, kind), num_bytes in sent.items():
                expected_sent[(gathered if kind == "gather" else reduced)[axis]] = num_bytes
            pairs.append((f"{case}: bytes", dict(messages.sent), expected_sent))
            calls = messages.calls[control, "allreduce_"]
            pairs.append((f"{case}: messages about usage", calls, 1))
            pairs.append((f"{case}: traffic", sent, traffic(engine, levels, num_micro)))
        pairs += describes(engine, levels)
    return pairs


def traffic(engine: Any, strategy: Strategy, num_micro: int) -> Counter[tuple[Axis, str]]:
    """Bytes sent as the formulas of ``strategies/`` have them, by (axis, kind)."""
    sent: Counter[tuple[Axis, str]] = Counter()
    for axis in Axis:
        formula = strategy.level(axis).traffic(2)
        for unit in engine.units:
            for buffer in unit.buffers:
                # What travels along the outer axis is cut along the inner one already.
                part = 1.0
                if axis is Axis.OUTER:
                    part = strategy.inner.fraction(Role.OPTIM, 2)
                dtypes, numel = buffer.kind.dtypes, buffer.layout.numel * part
                params = formula.params_per_step + num_micro * formula.params_per_microbatch
                if unit is engine.units[-1]:
                    params -= num_micro * formula.params_per_microbatch / 2  # once, not twice
                grads = formula.grads_per_step + num_micro * formula.grads_per_microbatch
                sent[axis, "gather"] += round(params * numel * dtypes.compute.itemsize)
                sent[axis, "reduce"] += round(grads * numel * dtypes.comm.itemsize)
    return +sent


def describes(engine: Any, strategy: Strategy) -> list[tuple[str, Any, Any]]:
    """What ``describe()`` says of one microbatch, beside what is expected."""
    counts, _ = expected_collectives(engine, strategy, 1)
    pairs = []
    for unit, row in zip(engine.units, engine.describe().rows, strict=True):
        for kind, said in ((GATHERS, row.num_gathers), (REDUCTIONS, row.num_reductions)):
            expected = sum(
                count
                for label, count in counts.items()
                if label.startswith(kind) and f" of {unit.label} over " in label
            )
            pairs.append((f"describe: {kind[0]} of {unit.label}", said, expected))
    return pairs


@pytest.mark.parametrize(("strategy", "outer"), EVERY_PAIR)
def test_collectives_and_bytes_of_a_step_follow_from_the_levels(
    ranks: Ranks, strategy: str, outer: str
) -> None:
    for pairs in ranks.run(count_pair, strategy, outer):
        for what, found, expected in pairs:
            assert found == expected, what


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
    levels = Strategy.from_names("optim", "optim")
    assert [count_gathers(levels, engine.mesh, num_uses) for num_uses in (1, 2)] == [1, 1]


@on_ranks(world_size=2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_evaluation_gathers_each_unit_once_and_reduces_nothing(strategy: str) -> None:
    model = Stack()
    engine = fe.shard(model, strategy=strategy)
    messages = Messages()
    with messages.counting(), torch.no_grad():
        model(*vector_batch(2, 0))
    units = [unit for unit in engine.units if unit.buffers]
    labels = [f"all-gather of {unit.label} over the inner axis" for unit in units]
    assert messages.operations == Counter(labels)
    assert [name for _, name in messages.calls] == ["recv_", "send"]
    # Weights that nobody has changed travel again only where they were dropped.
    with messages.counting(), torch.no_grad():
        model(*vector_batch(2, 0))
    again = 2 if strategy == "optim_grads_params" else 1
    assert messages.operations == Counter(labels * again)


@on_ranks(world_size=2)
def test_frozen_weights_that_are_never_cut_travel_once() -> None:
    class Adapted(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([LoraLinear(), LoraLinear()])

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Adapted()
    engine = fe.shard(model, strategy="optim")
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    first = count_step(model, engine, optimizer, 1)
    second = count_step(model, engine, optimizer, 1)
    frozen = [
        f"all-gather of {buffer.label} over the inner axis"
        for buffer in engine.buffers
        if buffer.grads is None
    ]
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
    assert list(messages.sent.values()) == [4]  # one fp32 element, there and back
