"""The gradients of one buffer, from where autograd leaves them down to the optimizer's range.

    full --reduce--> main_grad[GRAD] --reduce, on the last microbatch--> main_grad[OPTIM]

Each gradient is written once, scaled and cast on the way, into its place in a flat buffer:

- GRAD full (depth 0): straight into the persistent buffer, which later microbatches add to and
  the last one reduces in place (through a transient copy if the wire has another dtype);
- GRAD cut: into a transient *staging* buffer in the wire's dtype, which every microbatch reduces
  along the axes that cut gradients, into the persistent shard; the other axes wait for the last.

[Note: Averaging]
Every rank contributes its mean loss; the result is the gradient of the mean over all ranks. The
factor ``1 / (ranks * extra divisor)`` is applied here and nowhere else: while gradients are
written, or (``average_in_collective``) the ranks' part of it by the collectives, axis by axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine import memory as mem
from fsdp_engine.buffer import Ladder, ShardedBuffer
from fsdp_engine.collectives import Steps
from fsdp_engine.lanes import Lanes, Ticket
from fsdp_engine.layout import Layout
from fsdp_engine.memory import Memory
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis

_DEPTH_ABOVE = {axis: depth for depth, axis in enumerate(AXIS_BELOW_DEPTH)}


class GradTower:
    """See the module docstring.

    Attributes:
        fresh: per parameter: nothing is accumulated, the next gradient overwrites.
        touched: per parameter: a gradient came in this backward.
    """

    def __init__(
        self,
        label: str,
        layout: Layout,
        ladder: Ladder,
        memory: Memory,
        dtypes: ParamDtypes,
        optim_depth: int,
        grad_depth: int,
        average_in_collective: bool,
        extra_divisor: float,
        tag: int,
    ) -> None:
        self._label = label
        self._layout = layout
        self._ladder = ladder
        self._memory = memory
        self._dtypes = dtypes
        self._optim_depth = optim_depth
        self._grad_depth = grad_depth
        self._average = average_in_collective
        self._tag = tag
        divisor = extra_divisor * (1 if average_in_collective else ladder.mesh.size)
        self._scale = 1.0 / divisor
        # A power of two is exact in any dtype. Another factor must not be rounded with the
        # gradient's own dtype; as a tensor of one element it takes part in type promotion.
        exact = math.frexp(self._scale)[0] == 0.5
        self._factor: float | Tensor = self._scale
        if not exact and dtypes.compute != dtypes.main_grad:
            self._factor = torch.tensor([self._scale], dtype=torch.float32, device=memory.device)
        count = len(layout.slots)
        self.fresh = [True] * count
        self.touched = [False] * count
        self.num_touched = 0
        self._accum: ShardedBuffer | None = None
        self._views: list[Tensor] = []
        self._gaps_of_staging: list[Tensor] = []
        self._staging = None
        self._staging_buffer: ShardedBuffer | None = None
        if grad_depth > 0 or dtypes.comm != dtypes.main_grad:
            self._staging = memory.transient(layout.numel, dtypes.comm, "staging")
        self.writes_to_staging = grad_depth > 0

    @property
    def num_staged_elements(self) -> int:
        """Elements of transient memory that writing gradients takes."""
        return self._layout.numel if self.writes_to_staging else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of the persistent gradients, from the first backward on."""
        start, stop = self._layout.range(self._grad_depth, self._ladder.mesh.coordinate)
        return (stop - start) * self._dtypes.main_grad.itemsize

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staging buffer while it is there."""
        return self._staging.num_bytes if self._staging is not None else 0

    def main_grads(self) -> ShardedBuffer:
        """The persistent buffer, allocated when gradients first appear."""
        if self._accum is None:
            at = self._ladder.mesh.coordinate
            start, stop = self._layout.range(self._grad_depth, at)
            flat = self._memory.persistent(stop - start, self._dtypes.main_grad, "grad")
            self._accum = ShardedBuffer(self._layout, at, self._grad_depth, flat)
            if not self.writes_to_staging:
                self._views = [self._accum.full(i) for i in range(len(self._layout.slots))]
        return self._accum

    @property
    def optim_grads(self) -> Tensor | None:
        """This rank's part of the reduced gradients, 1-D, padding included; None before any."""
        return None if self._accum is None else self._accum.narrow(self._optim_depth)

    def begin(self, lanes: Lanes) -> None:
        """The first gradient of a backward is about to be written."""
        accum = self.main_grads()
        if self.writes_to_staging:
            assert self._staging is not None
            lanes.compute.manage(f"allocate staging of {self._label}", self._staging.fill, None)
            if self._staging_buffer is None:
                self._make_staging_views()
            assert self._staging_buffer is not None
            lanes.compute.access(writes=[self._staging_buffer.tensor])
        else:
            lanes.compute.access(writes=[accum.tensor])

    def write(self, index: int, grad: Tensor) -> None:
        """Put the gradient of parameter ``index`` into its place: scaled and cast in one pass."""
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        view = self._views[index]
        again = self.touched[index] or not (self.fresh[index] or self.writes_to_staging)
        if again:
            if isinstance(self._factor, float):
                view.add_(grad, alpha=self._factor)
            else:
                view.add_(grad.to(view.dtype), alpha=self._scale)
        elif isinstance(self._factor, float):
            torch.mul(grad, self._factor, out=view)
        else:
            torch.mul(grad.reshape(-1), self._factor, out=view.view(-1))
        if not self.touched[index]:
            self.touched[index] = True
            self.num_touched += 1

    def finish_writing(self) -> None:
        """No more gradients come in this backward; those that did not come are zeros."""
        if self.num_touched < len(self.touched):
            for index, came in enumerate(self.touched):
                if not came and (self.writes_to_staging or self.fresh[index]):
                    self._views[index].zero_()
        if self._gaps_of_staging:
            torch._foreach_zero_(self._gaps_of_staging)
        if not self.writes_to_staging:
            self.fresh = [False] * len(self.fresh)

    def reduce(self, lanes: Lanes, last: bool) -> Ticket | None:
        """Submit what this microbatch has to reduce; returns a ticket, None if there is nothing.

        Args:
            lanes: where.
            last: this is the last microbatch of the step.
        """
        after: list[Ticket] = [lanes.compute.record()]
        ticket: Ticket | None = None
        if self.writes_to_staging:
            ticket = self._reduce_staging(lanes, after)
        if last:
            ticket = self._reduce_last(lanes, [ticket] if ticket else after) or ticket
        self._forget_backward()
        return ticket

    def release(self, lanes: Lanes) -> None:
        """The reduction is done (compute has waited for it): hand the staging memory back."""
        if self._staging is not None and self._staging.filled:
            tensor = self._staging_buffer.tensor if self._staging_buffer else None
            lanes.compute.manage(f"free staging of {self._label}", self._staging.drain, tensor)

    def discard(self) -> None:
        """Forget whatever was accumulated."""
        self._forget_backward()
        self.fresh = [True] * len(self.fresh)

    def _forget_backward(self) -> None:
        self.touched = [False] * len(self.touched)
        self.num_touched = 0

    def _make_staging_views(self) -> None:
        assert self._staging is not None
        staging, at = self._staging, self._ladder.mesh.coordinate
        self._staging_buffer = ShardedBuffer(
            self._layout, at, 0, staging.view(0, (self._layout.numel,))
        )
        if self.writes_to_staging:
            self._views = [staging.view(slot.offset, slot.shape) for slot in self._layout.slots]
            # Padding is reduced with the rest and must not bring in what lay in the memory.
            self._gaps_of_staging = [
                staging.view(start, (stop - start,)) for start, stop in self._layout.gaps
            ]

    def _reduce_staging(self, lanes: Lanes, after: Sequence[Ticket]) -> Ticket:
        """From full staging down to the persistent shard, along every axis that cuts gradients."""
        accum, staging = self.main_grads(), self._staging_buffer
        assert staging is not None
        accumulate = not all(self.fresh)
        stale = []
        if accumulate:
            stale = [
                accum.local(index, self._grad_depth)
                for index, fresh in enumerate(self.fresh)
                if fresh
            ]
        ticket: Ticket | None = None
        for depth in range(self._grad_depth):
            axis = AXIS_BELOW_DEPTH[depth]
            final = depth == self._grad_depth - 1
            out = accum.tensor if final else staging.narrow(depth + 1)

            def steps(
                depth: int = depth, axis: Axis = axis, out: Tensor = out, final: bool = final
            ) -> Steps:
                if final and stale:
                    torch._foreach_zero_(stale)
                source = staging.narrow(depth)
                add = final and accumulate
                if self._ladder.reduces(axis):
                    yield from self._ladder.reduce_comm(axis).reduce_scatter(
                        source,
                        out,
                        reduce_dtype=self._dtypes.reduce,
                        average=self._average,
                        accumulate=add,
                        tag=self._tag,
                    )
                elif add:
                    out.add_(source)
                elif out.data_ptr() != source.data_ptr():
                    out.copy_(source)

            ticket = lanes.reduce(axis).submit(
                f"reduce-scatter of {self._label} over the {axis.value} axis",
                steps,
                after=after if ticket is None else [ticket],
                reads=[staging.narrow(depth)],
                writes=[staging.narrow(depth), out],
            )
        assert ticket is not None
        self.fresh = [False] * len(self.fresh)
        return ticket

    def _reduce_last(self, lanes: Lanes, after: Sequence[Ticket]) -> Ticket | None:
        """Along the axes on which gradients were accumulated whole."""
        accum = self.main_grads()
        axes = [
            axis
            for axis in (Axis.INNER, Axis.OUTER)
            if _DEPTH_ABOVE[axis] >= self._grad_depth and self._ladder.reduces(axis)
        ]
        if not axes:
            return None
        depth = self._grad_depth
        target, ticket = accum, None
        if self._dtypes.comm != self._dtypes.main_grad:
            target, ticket = self._copy_to_wire(lanes, after)
        for axis in axes:
            below = _DEPTH_ABOVE[axis] + 1
            after = after if ticket is None else [ticket]
            if self._optim_depth >= below:
                ticket = self._scatter(lanes, after, target, axis, depth, below)
                depth = below
            else:
                ticket = self._all_reduce(lanes, after, target, axis, depth)
        if target is not accum:
            assert ticket is not None
            ticket = self._copy_from_wire(lanes, [ticket], target)
        return ticket

    def _scatter(
        self,
        lanes: Lanes,
        after: Sequence[Ticket],
        target: ShardedBuffer,
        axis: Axis,
        depth: int,
        below: int,
    ) -> Ticket:
        source, out = target.narrow(depth), target.narrow(below)

        def steps() -> Steps:
            yield from self._ladder.reduce_comm(axis).reduce_scatter(
                source, out, reduce_dtype=self._dtypes.reduce, average=self._average, tag=self._tag
            )

        return lanes.reduce(axis).submit(
            f"reduce-scatter of {self._label} over the {axis.value} axis",
            steps,
            after=after,
            reads=[source],
            writes=[source],
        )

    def _all_reduce(
        self, lanes: Lanes, after: Sequence[Ticket], target: ShardedBuffer, axis: Axis, depth: int
    ) -> Ticket:
        tensor = target.narrow(depth)
        comm, lane = self._ladder.reduce_comm(axis), lanes.reduce(axis)
        label = f"all-reduce of {self._label} over the {axis.value} axis"
        if comm.splits_all_reduce:
            out = comm.part(tensor)

            def scatter() -> Steps:
                yield from comm.reduce_scatter(
                    tensor,
                    out,
                    reduce_dtype=self._dtypes.reduce,
                    average=self._average,
                    tag=self._tag,
                )

            first = lane.submit(label, scatter, after=after, reads=[tensor], writes=[tensor])
            # A tag of its own: parts of both halves may be under way between two ranks.
            return lane.submit(
                label,
                lambda: comm.all_gather(tensor, tag=self._tag + 1),
                after=[first],
                reads=[out],
                writes=[tensor],
            )
        return lane.submit(
            label,
            lambda: comm.all_reduce(
                tensor, reduce_dtype=self._dtypes.reduce, average=self._average
            ),
            after=after,
            reads=[tensor],
            writes=[tensor],
        )

    def _copy_to_wire(
        self, lanes: Lanes, after: Sequence[Ticket]
    ) -> tuple[ShardedBuffer, Ticket]:
        """A copy of the persistent gradients in the dtype that travels."""
        accum = self.main_grads()
        if self.writes_to_staging or self._staging is None:
            flat = mem.empty(accum.tensor.numel(), self._dtypes.comm, self._memory.device)
            wire = ShardedBuffer(self._layout, accum.at, self._grad_depth, flat)
        else:
            lanes.compute.manage(f"allocate staging of {self._label}", self._staging.fill, None)
            if self._staging_buffer is None:
                self._make_staging_views()
            assert self._staging_buffer is not None
            wire = self._staging_buffer

        def steps() -> Steps:
            wire.tensor.copy_(accum.tensor)
            yield from ()

        ticket = lanes.inner_reduce.submit(
            f"cast of {self._label}",
            steps,
            after=after,
            reads=[accum.tensor],
            writes=[wire.tensor],
        )
        return wire, ticket

    def _copy_from_wire(
        self, lanes: Lanes, after: Sequence[Ticket], wire: ShardedBuffer
    ) -> Ticket:
        out, source = self.main_grads().narrow(self._optim_depth), wire.narrow(self._optim_depth)

        def steps() -> Steps:
            out.copy_(source)
            yield from ()

        return lanes.inner_reduce.submit(
            f"cast of {self._label}", steps, after=after, reads=[source], writes=[out]
        )
