"""Flat tensors of a layout, with their gathers and reductions from one depth to another.

See [Note: Depth] in ``strategies/pair.py``. A gather goes from this rank's range to a larger one, a
reduction to a smaller one, one axis at a time, in place:

    reduce                                   gather
    depth 0  [........................]      [........................]
                      | inner                          ^ inner
    depth 1           [........]                       [........]
                         | outer                          ^ outer
    depth 2              [..]                             [..]

Either is one link per axis of a chain (``comm/lanes.py``), on the lane of that axis. Chains are
constructed once. Along an axis of one rank nothing is sent.
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
    """One flat tensor holding ``layout.range(depth, at)``.

    Attributes:
        layout: where tensors sit.
        at: this rank's place.
        depth: the range that ``tensor`` holds.
        tensor: 1-D, as long as that range.
    """

    layout: Layout
    at: Coordinate
    depth: int
    tensor: Tensor

    def __post_init__(self) -> None:
        start, stop = self.layout.range(self.depth, self.at)
        assert self.tensor.numel() == stop - start

    def narrow(self, depth: int) -> Tensor:
        """The part that this rank holds at ``depth``, which must be this buffer's or deeper."""
        assert depth >= self.depth
        if depth == self.depth:
            return self.tensor
        base, _ = self.layout.range(self.depth, self.at)
        start, stop = self.layout.range(depth, self.at)
        return self.tensor[start - base : stop - base]

    def local(self, index: int, depth: int) -> Tensor:
        """The 1-D part of tensor ``index`` that this rank holds at ``depth``; may be empty."""
        base, _ = self.layout.range(self.depth, self.at)
        low, high = self.layout.tensor_range(index, depth, self.at)
        offset = self.layout.slots[index].offset - base
        if low == high:
            # An empty range still has a place, so that its tensor shares this buffer's version.
            return self.tensor[:0]
        return self.tensor[offset + low : offset + high]

    def full(self, index: int) -> Tensor:
        """Tensor ``index`` in its own shape; the buffer must hold the whole line."""
        assert self.depth == 0
        slot = self.layout.slots[index]
        return self.tensor[slot.offset : slot.stop].view(slot.shape)

    def gather(
        self, chain: Chain, context: BufferContext, from_depth: int, to_depth: int, how: Gather
    ) -> None:
        """Add to ``chain`` the all-gathers, in place, of which this rank gives its range.

        Args:
            chain: submissions; these come behind its links.
            context: The communicators, lanes and memory of the buffer.
            from_depth: The depth of the range that this rank gives.
            to_depth: The depth of the range that it gets.
            how: the source of this rank's range, and the names of the messages.
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
                f"all-gather of {how.label} over the {axis.value} axis",
                _gather_operation(comm, part, whole, source, how.tag),
                reads=reads or [part],
                writes=[whole, *extra],
            )
            source, reads, extra = None, (), ()

    def reduce(
        self, chain: Chain, context: BufferContext, from_depth: int, to_depth: int, how: Reduction
    ) -> None:
        """Add to ``chain`` the reductions of this tensor.

        Args:
            chain: submissions; these come behind its links.
            context: The communicators, lanes and memory of the buffer.
            from_depth: The depth of the range that this rank gives.
            to_depth: The depth of the range of which it gets the sum.
            how: the axes, the dtype of the sums, and where they go.
        """
        depth = from_depth
        for axis in how.over:
            comm = context.mesh_communicators.comms[axis].reduce
            lane = context.lanes.reduce(axis)
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
                    operation: Operation = partial(_keep, summand, out, how)
                    _add_reduction(
                        chain, lane, "reduce-scatter", axis, summand, out, operation, how
                    )
                continue
            sent = summand
            if how.comm_buffer is not None:
                sent = how.comm_buffer.narrow(below - 1)
                copy(chain, context.lanes.inner_reduce, how.label, summand, sent, how.boost)
            operation = _scatter(comm, sent, out, is_last or how.comm_buffer is not None, how)
            _add_reduction(chain, lane, "reduce-scatter", axis, sent, out, operation, how)


def flat_source(param: torch.Tensor) -> Tensor:
    """The row-major elements of ``param``, whatever its strides; a copy only where needed."""
    return param.detach().reshape(-1)


@dataclass(frozen=True)
class AxisComms:
    """Communicators of one axis, one for each kind of lane. None where the axis has one rank."""

    gather: Communicator | None
    reduce: Communicator | None


_NUM_MADE: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class MeshCommunicators:
    """The communicators between the depths of one mesh.

    Attributes:
        mesh: whose ranks.
        comms: by axis.
        number: The number of communicators made before it over the same ranks, the same on all of
            them.
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
    """The ranks of one mesh, the lanes and the memory of an engine, shared by its buffers.

    Attributes:
        mesh_communicators, lanes, memory: these.
        placement: a :class:`~.placement.Placement`, which makes the shards.
    """

    mesh_communicators: MeshCommunicators
    lanes: Lanes
    memory: Memory
    placement: Any


@dataclass(frozen=True)
class Gather:
    """An all-gather.

    Attributes:
        label: of the buffer, for people.
        tag: distinguishes its messages from others in flight.
        source: this rank's shard: a tensor; a function, which writes it into the first of the
            tensors that it is given; None: it is in place.
        reads: tensors that the function reads.
        writes: tensors that it writes beside the shard.
    """

    label: str
    tag: int
    source: Tensor | Callable[[Sequence[Tensor]], Steps] | None = None
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Reduction:
    """Reduce-scatters and all-reduces.

    Attributes:
        label, tag: as of a gather; the tag after it is used, too.
        over: axes along which ranks have summands, innermost first. Along axes that do not shard
            the smaller range, all ranks get the sum.
        into: receives the last sum; None: in place.
        comm_buffer: summands are copied here and sent in its dtype; None: they are sent in place.
        dtype: The dtype of the sums.
        average: the collectives divide by the number of ranks.
        boost: factor of summands in the communication dtype ([Note: Gradients in fp16]).
        accumulate: the last sum is added to ``into``.
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
    """Add to ``chain``: ``out = source * factor``, whatever their dtypes."""

    def steps() -> Steps:
        _scaled_copy(source, out, factor)
        yield from ()

    chain.add(lane, f"cast of {label}", steps, reads=[source], writes=[out])


def _scaled_copy(source: Tensor, out: Tensor, factor: float) -> None:
    """``out = source * factor``, a power of two, computed in the dtype with the larger range: in
    fp16 products may underflow that bf16 and fp32 hold."""
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
    return partial(_bring, source, part)


def _bring(source: Tensor | None, target: Tensor) -> Steps:
    if source is not None:
        target.copy_(source)
    yield from ()


def _scatter(
    comm: Communicator, sent: Tensor, out: Tensor, is_final_sum: bool, how: Reduction
) -> Operation:
    """A reduce-scatter; ``is_final_sum``: its sums leave the communication dtype, unscaled."""
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
    lane = context.lanes.reduce(axis)
    # The backend's own all-reduce sums in the dtype that it sends: for sums in a wider one, parts
    # are exchanged and summed, and the sums gathered. (On gloo, too, its all-reduce is as good as
    # the two halves pairwise, and needs no host in between.)
    if how.dtype in (None, sent.dtype) or tensor.numel() % comm.size:
        operation = partial(comm.all_reduce, tensor, average=how.average)
        _add_reduction(chain, lane, "all-reduce", axis, tensor, tensor, operation, how)
        return
    if sent is not tensor:
        copy(chain, context.lanes.inner_reduce, how.label, tensor, sent, how.boost)
    own = comm.part(tensor)
    scatter = _scatter(comm, sent, own, sent is not tensor, how)
    _add_reduction(chain, lane, "all-reduce", axis, sent, own, scatter, how)
    # A tag of its own: parts of both halves may be in flight between two ranks.
    gather = partial(comm.all_gather, tensor, tag=how.tag + 1)
    _add_reduction(chain, lane, "all-reduce", axis, own, tensor, gather, how)


def _add_reduction(
    chain: Chain,
    lane: Lane,
    what: str,
    axis: Axis,
    sent: Tensor,
    out: Tensor,
    operation: Operation,
    how: Reduction,
) -> None:
    label = f"{what} of {how.label} over the {axis.value} axis"
    chain.add(lane, label, operation, reads=[sent], writes=[sent, out])


def _keep(source: Tensor, out: Tensor, how: Reduction) -> Steps:
    """This rank's own is the sum."""
    if how.accumulate:
        out.add_(source, alpha=1.0 / how.boost)
    elif not begin_together(out, source):
        _scaled_copy(source, out, 1.0 / how.boost)
    yield from ()
