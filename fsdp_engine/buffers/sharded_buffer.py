"""Flat tensors of a layout, with their gathers and reductions from one depth to another.

See [Note: Depth] in ``strategies/pair.py``. A gather replaces this rank's range by a larger one, a
reduction by a smaller one. Both run in place, one axis after the other:

    reduce                                   gather
    depth 0  [........................]      [........................]
                      | inner                          ^ inner
    depth 1           [........]                       [........]
                         | outer                          ^ outer
    depth 2              [..]                             [..]

A gather or reduction adds the collectives of each axis to a chain (``comm/lanes.py``), on the lane
of that axis. Chains are built once. Along an axis of one rank nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.comm.lanes import Chain, Lane, Lanes, Operation
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.layout import Coordinate, Layout
from fsdp_engine.memory.allocator import Memory, begin_together
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True)
class ShardedBuffer:
    """A flat tensor that holds the range ``layout.range(depth, at)`` of a layout.

    Attributes:
        layout: The offsets of the parameters, and the range of each rank at each depth.
        at: The coordinate of this rank on the mesh.
        depth: The depth of the range that ``tensor`` holds.
        tensor: The elements of the range, 1-D.
    """

    layout: Layout
    at: Coordinate
    depth: int
    tensor: Tensor

    def __post_init__(self) -> None:
        start, stop = self.layout.range(self.depth, self.at)
        assert self.tensor.numel() == stop - start

    def narrow(self, depth: int) -> Tensor:
        """Returns the range that this rank holds at ``depth``, as a view. ``depth`` must not be
        less than the depth of this buffer."""
        assert depth >= self.depth
        if depth == self.depth:
            return self.tensor
        base, _ = self.layout.range(self.depth, self.at)
        start, stop = self.layout.range(depth, self.at)
        return self.tensor[start - base : stop - base]

    def local(self, index: int, depth: int) -> Tensor:
        """Returns the slice of parameter ``index`` that this rank holds at ``depth``, as a 1-D
        view. It may be empty."""
        base, _ = self.layout.range(self.depth, self.at)
        low, high = self.layout.tensor_range(index, depth, self.at)
        offset = self.layout.slots[index].offset - base
        if low == high:
            # An empty slice is a view, too, so that it shares the version counter of this buffer.
            return self.tensor[:0]
        return self.tensor[offset + low : offset + high]

    def full(self, index: int) -> Tensor:
        """Returns parameter ``index`` in its own shape, as a view. This buffer must have depth
        0."""
        assert self.depth == 0
        slot = self.layout.slots[index]
        return self.tensor[slot.offset : slot.stop].view(slot.shape)

    def gather(
        self, chain: Chain, context: BufferContext, from_depth: int, to_depth: int, how: Gather
    ) -> None:
        """Add to ``chain`` the in-place all-gathers of this buffer.

        Args:
            chain: The chain, to whose end submissions are added.
            context: The communicators, the lanes and the memory of the engine.
            from_depth: The depth of the range that this rank sends.
            to_depth: The depth of the range that this rank receives.
            how: The source of this rank's range, and the label and tag of the messages.
        """
        lanes, source = context.lanes, how.source
        begin = self.narrow(from_depth)
        reads: Sequence[Tensor] = [source] if isinstance(source, Tensor) else how.reads
        if callable(source) and from_depth == to_depth:
            writes = [begin, *how.writes]
            operation = partial(source, (begin,))
            chain.add(lanes.encode, f"encode {how.label}", operation, reads=reads, writes=writes)
        extra: Sequence[Tensor] = how.writes
        axes = AXIS_BELOW_DEPTH[to_depth:from_depth]
        is_sent = any(context.mesh_communicators.comms[axis].gather is not None for axis in axes)
        if callable(source) and is_sent and lanes.copy_in is not None:
            operation = partial(source, (begin,))
            writes = [begin, *extra]
            chain.add(lanes.copy_in, f"encode {how.label}", operation, reads=reads, writes=writes)
            source, reads, extra = None, (), ()
        for depth in range(from_depth - 1, to_depth - 1, -1):
            axis = AXIS_BELOW_DEPTH[depth]
            comm = context.mesh_communicators.comms[axis].gather
            part, whole = self.narrow(depth + 1), self.narrow(depth)
            chain.add(
                lanes.gather(axis),
                f"all-gather of {how.label}{_over(context, axis)}",
                _gather_operation(comm, part, whole, source, how.tag),
                reads=reads or [part],
                writes=[whole, *extra],
            )
            source, reads, extra = None, (), ()

    def reduce(
        self, chain: Chain, context: BufferContext, from_depth: int, to_depth: int, how: Reduction
    ) -> None:
        """Add to ``chain`` the reductions of this buffer.

        Args:
            chain: The chain, to whose end submissions are added.
            context: The communicators, the lanes and the memory of the engine.
            from_depth: The depth of the range of this rank's summands.
            to_depth: The depth of the range whose sum this rank receives.
            how: The axes, the dtype and the target of the sums.
        """
        depth = from_depth
        for axis in how.over:
            comm = context.mesh_communicators.comms[axis].reduce
            below = AXIS_BELOW_DEPTH.index(axis) + 1
            summand = self.narrow(depth)
            if below > to_depth:
                if comm is not None:
                    sent = how.comm_buffer.narrow(depth) if how.comm_buffer is not None else summand
                    _all_reduce(chain, context, comm, axis, sent, summand, how)
                continue
            is_last = below == to_depth and how.into is not None
            out = how.into.tensor if is_last and how.into is not None else self.narrow(below)
            depth = below
            if comm is None:
                if is_last:
                    operation: Operation = partial(_write_summand, summand, out, how)
                    _add_reduction(
                        chain, context, "reduce-scatter", axis, summand, out, operation, how
                    )
                continue
            sent = summand
            if how.comm_buffer is not None:
                sent = how.comm_buffer.narrow(below - 1)
                copy(chain, context.lanes.inner_reduce, how.label, summand, sent, how.boost)
            operation = _scatter(comm, sent, out, is_last or how.comm_buffer is not None, how)
            _add_reduction(chain, context, "reduce-scatter", axis, sent, out, operation, how)


def flat_source(param: torch.Tensor) -> Tensor:
    """Returns the elements of ``param`` in row-major order, 1-D. Copies the elements only if
    the strides of ``param`` do not allow a view."""
    return param.detach().reshape(-1)


@dataclass(frozen=True)
class AxisComms:
    """The communicators of one axis, for its gather lane and for its reduce lane. None: the axis
    has one rank."""

    gather: Communicator | None
    reduce: Communicator | None


_NUM_MADE: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class MeshCommunicators:
    """The communicators of both axes of one mesh.

    Attributes:
        mesh: The mesh.
        comms: The communicators of each axis.
        number: Number of ``MeshCommunicators`` that were created before for the same ranks. It is
            equal on all of these ranks.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self.mesh = mesh
        self.number = 0
        if mesh.control_group is not None:
            self.number = _NUM_MADE.get(mesh.control_group, 0)
            _NUM_MADE[mesh.control_group] = self.number + 1
        self.comms = {
            axis: AxisComms(
                Communicator(place.gather_group, mesh.device) if place.gather_group else None,
                Communicator(place.reduce_group, mesh.device) if place.reduce_group else None,
            )
            for axis, place in ((Axis.INNER, mesh.inner), (Axis.OUTER, mesh.outer))
        }


@dataclass(frozen=True)
class BufferContext:
    """The communicators, lanes and memory of an engine, which the buffers of one mesh share.

    Attributes:
        mesh_communicators: The communicators of the mesh.
        lanes: The lanes of the engine.
        memory: The memory manager of the engine.
        placement: The :class:`~.placement.Placement` that creates shards.
    """

    mesh_communicators: MeshCommunicators
    lanes: Lanes
    memory: Memory
    placement: Any


@dataclass(frozen=True)
class Gather:
    """The description of an all-gather.

    Attributes:
        label: The name of the buffer, for messages.
        tag: The tag that distinguishes its messages from others in flight.
        source: The source of this rank's shard: a tensor, or an operation that writes the shard
            into the first tensor of its argument. None: the shard is already in its place.
        reads: Tensors that the operation ``source`` reads.
        writes: Tensors that the operation ``source`` writes in addition to the shard.
    """

    label: str
    tag: int
    source: Tensor | Callable[[Sequence[Tensor]], Steps] | None = None
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Reduction:
    """The description of reduce-scatters and all-reduces.

    Attributes:
        label: The name of the buffer, for messages.
        tag: The tag of the messages. The tag ``tag + 1`` is also used.
        over: The axes along which summands are reduced, innermost first. Along an axis over which
            the result is not sharded, all ranks receive the sum (all-reduce).
        into: The buffer that receives the sum of the last reduce-scatter; None: in place.
        comm_buffer: The buffer into which summands are copied, to be sent in its dtype; None: they
            are sent from their place.
        dtype: The dtype of the sums.
        average: Whether the collectives divide by the number of ranks.
        boost: The factor by which summands in the communication dtype are larger than the
            optimizer's gradients ([Note: Gradients in fp16] in ``gradient_scale.py``).
        accumulate: Whether the last sum is added to ``into``.
    """

    label: str
    tag: int
    over: Sequence[Axis]
    into: ShardedBuffer | None = None
    comm_buffer: ShardedBuffer | None = None
    dtype: torch.dtype | None = None
    average: bool = False
    boost: float = 1.0
    accumulate: bool = False


def copy(chain: Chain, lane: Lane, label: str, source: Tensor, out: Tensor, factor: float) -> None:
    """Add the operation ``out = source * factor`` to ``chain``. The dtypes may differ."""

    def steps() -> Steps:
        _scaled_copy(source, out, factor)
        yield from ()

    chain.add(lane, f"cast of {label}", steps, reads=[source], writes=[out])


def _scaled_copy(source: Tensor, out: Tensor, factor: float) -> None:
    """Compute ``out = source * factor``. The factor is a power of two. The product is computed in
    the dtype with the larger range, because it may underflow in fp16 and not in bf16 and fp32."""
    if factor == 1.0:
        out.copy_(source)
    elif torch.finfo(source.dtype).tiny > torch.finfo(out.dtype).tiny:
        out.copy_(source).mul_(factor)
    else:
        torch.mul(source, factor, out=out)


def _gather_operation(
    comm: Communicator | None,
    part: Tensor,
    whole: Tensor,
    source: Tensor | Callable[[Sequence[Tensor]], Steps] | None,
    tag: int,
) -> Operation:
    if callable(source):
        if comm is None:
            return partial(source, (part,))
        return partial(comm.gather_encoded, whole, part, source, tag)
    if comm is not None:
        return partial(comm.all_gather, whole, source, tag)
    return partial(_copy_source, source, part)


def _copy_source(source: Tensor | None, target: Tensor) -> Steps:
    if source is not None:
        target.copy_(source)
    yield from ()


def _scatter(
    comm: Communicator, sent: Tensor, out: Tensor, is_final_sum: bool, how: Reduction
) -> Operation:
    """Returns the operation of a reduce-scatter. ``is_final_sum``: Divide the sums by ``boost``,
    because gradients are larger by this factor in ``sent``, but not in ``out``."""
    return partial(
        comm.reduce_scatter,
        sent,
        out,
        reduce_dtype=how.dtype,
        average=how.average,
        divisor=how.boost if is_final_sum else 1.0,
        accumulate=is_final_sum and how.accumulate,
        tag=how.tag,
    )


def _all_reduce(
    chain: Chain,
    context: BufferContext,
    comm: Communicator,
    axis: Axis,
    sent: Tensor,
    tensor: Tensor,
    how: Reduction,
) -> None:
    # The backend's all-reduce sums in the dtype that it sends. Sums in a wider dtype are computed
    # by `Communicator.reduce_scatter`, and all-gathered. Otherwise the backend's all-reduce is
    # used. On gloo it is as fast as these two collectives, and does not need the host between them.
    if how.dtype in (None, sent.dtype):
        operation = partial(comm.all_reduce, tensor, average=how.average, tag=how.tag)
        _add_reduction(chain, context, "all-reduce", axis, tensor, tensor, operation, how)
        return
    is_copied = sent is not tensor
    if is_copied:
        copy(chain, context.lanes.inner_reduce, how.label, tensor, sent, how.boost)
    if rest := tensor.numel() % comm.size:  # all shards must have one size
        operation = partial(_sum_rest, comm, sent[-rest:], tensor[-rest:], how, is_copied)
        _add_reduction(chain, context, "all-reduce", axis, sent, tensor, operation, how)
        tensor, sent = tensor[:-rest], sent[:-rest]
        if not tensor.numel():
            return
    own = comm.part(tensor)
    scatter = _scatter(comm, sent, own, is_copied, how)
    _add_reduction(chain, context, "all-reduce", axis, sent, own, scatter, how)
    # The all-gather has its own tag, as its messages can be in flight together with those of the
    # reduce-scatter.
    gather = partial(comm.all_gather, tensor, tag=how.tag + 1)
    _add_reduction(chain, context, "all-reduce", axis, own, tensor, gather, how)


def _sum_rest(
    comm: Communicator, sent: Tensor, out: Tensor, how: Reduction, is_copied: bool
) -> Steps:
    """Sum the last elements, which are fewer than the ranks, in ``how.dtype``, into ``out``."""
    sums = sent.to(how.dtype)
    yield from comm.all_reduce(sums, average=how.average, tag=how.tag)
    _scaled_copy(sums, out, 1.0 / how.boost if is_copied else 1.0)


def _over(context: BufferContext, axis: Axis) -> str:
    """Returns the end of a label that names the axis; empty if all ranks are on the inner axis."""
    is_named = axis is Axis.OUTER or context.mesh_communicators.mesh.outer.size > 1
    return f" over the {axis.value} axis" if is_named else ""


def _add_reduction(
    chain: Chain,
    context: BufferContext,
    what: str,
    axis: Axis,
    sent: Tensor,
    out: Tensor,
    operation: Operation,
    how: Reduction,
) -> None:
    label = f"{what} of {how.label}{_over(context, axis)}"
    chain.add(context.lanes.reduce(axis), label, operation, reads=[sent], writes=[sent, out])


def _write_summand(source: Tensor, out: Tensor, how: Reduction) -> Steps:
    """Write the sum along an axis of one rank, which is this rank's summand, into ``out``."""
    if how.accumulate:
        out.add_(source, alpha=1.0 / how.boost)
    elif not begin_together(out, source):
        _scaled_copy(source, out, 1.0 / how.boost)
    yield from ()
