"""Watches the messages that engines send on gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_engine.comm.host_lane import HostLane
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy
from tests.models import vector_batch


@contextmanager
def watched(
    on_send: Callable[[Any, Tensor], None], on_all_reduce: Callable[[Any, Tensor, Any], None]
) -> Iterator[None]:
    """Within the block ``on_send(group, tensor)`` is called before each message to one rank, and
    ``on_all_reduce(group, tensor, options)`` before each all-reduce of this process."""
    groups: Any = dist.ProcessGroup
    # Taken from the class dict: the function ``groups.allreduce`` would not bind to groups after it
    # is restored.
    all_reduce, isend = vars(groups)["allreduce"], dist.isend

    def reducing(group: Any, tensors: list[Tensor], options: Any) -> Any:
        (tensor,) = tensors
        on_all_reduce(group, tensor, options)
        return all_reduce.__get__(group)(tensors, options)

    def sending(tensor: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        on_send(group, tensor)
        return isend(tensor, *args, group=group, **kwargs)

    groups.allreduce, dist.isend = reducing, sending
    try:
        yield
    finally:
        groups.allreduce, dist.isend = all_reduce, isend


GATHERS, REDUCTIONS = ("all-gather",), ("reduce-scatter", "all-reduce")


class Messages(TorchDispatchMode):
    """Counts submissions to lanes and sends of process groups.

    Attributes:
        operations: submissions by label.
        sent: bytes that this rank sends, by name of the group. An all-reduce counts as a
            reduce-scatter and an all-gather.
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
        submit = HostLane.submit

        def counted(lane: Any, label: str, *args: Any, **kwargs: Any) -> Any:
            self.operations[label] += 1
            return submit(lane, label, *args, **kwargs)

        HostLane.submit = counted  # type: ignore[method-assign]
        try:
            with self:
                yield
        finally:
            HostLane.submit = submit  # type: ignore[method-assign]


def count_step(model: nn.Module, engine: Any, optimizer: Any, num_micro: int) -> Messages:
    """Run one step; returns the messages of its forwards and backwards."""
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
        is_named = axis is Axis.OUTER or engine.mesh.outer.size > 1
        over = f" over the {axis.value} axis" if is_named else ""
        counts[f"{what} of {buffer.label}{over}"] += times
        dtypes = buffer.kind.dtypes
        gathers = what in GATHERS
        itemsize = (dtypes.compute if gathers else dtypes.comm).itemsize
        held_above = min(depth, optim) if not gathers else depth
        num_bytes = numel_at(buffer, held_above) * itemsize // 2  # with two ranks, each sends half
        num_bytes *= 2 if what == "all-reduce" else 1
        sent[axis, "gather" if gathers else "reduce"] += times * num_bytes

    for unit in engine.units:
        # The last unit in forward stays full until backward.
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
