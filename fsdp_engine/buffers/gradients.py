"""The gradients of one buffer, from where autograd leaves them down to the optimizer's range.

    full --reduce--> main_grad[GRAD] --reduce, on the last microbatch--> main_grad[OPTIM]

Each gradient is written once, scaled and cast on the way, into its place in a flat buffer:

- GRAD full (depth 0): straight into the persistent buffer, which later microbatches add to and
  the last one reduces in place;
- GRAD cut: into a transient *staging* buffer in the wire's dtype, which every microbatch reduces
  along the axes that cut gradients, into the persistent shard; the other axes wait for the last.

What the last microbatch reduces goes through a transient copy if the wire has another dtype. Where
ranks sum in a wider dtype than they send, only what is summed is sent narrow: the sums are not
rounded again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.buffers.gradient_scale import boost, scaled_copy
from fsdp_engine.buffers.reducing_again import keep_owned, kept_factor
from fsdp_engine.buffers.sharded_buffer import Ladder, ShardedBuffer
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lanes import Chain, Lanes, Operation, Ticket
from fsdp_engine.devices.memory import Memory, TransientStorage, alias, begin_together
from fsdp_engine.layout import Layout
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


class GradTower:
    """See the module docstring.

    Attributes:
        fresh: per parameter: nothing is accumulated, the next gradient overwrites.
        touched: per parameter: a gradient came in this backward.
        num_touched: how many of them.
        writes_to_staging: whether gradients are cut, so that full ones are transient.
        rounds_again: what is reduced cannot be reduced again without loss.
    """

    def __init__(
        self,
        label: str,
        layout: Layout,
        ladder: Ladder,
        lanes: Lanes,
        memory: Memory,
        dtypes: ParamDtypes,
        optim_depth: int,
        grad_depth: int,
        config: DistributedDataParallelConfig,
        extra_divisor: float,
        tag: int,
    ) -> None:
        self._label = label
        self._layout = layout
        self._ladder = ladder
        self._lanes = lanes
        self._memory = memory
        self._dtypes = dtypes
        self._optim_depth = optim_depth
        self._grad_depth = grad_depth
        self._average = config.average_in_collective
        self._tag = tag
        self._at = ladder.mesh.coordinate
        self.writes_to_staging = grad_depth > 0
        divisor = extra_divisor * (1 if self._average else ladder.mesh.size)
        self._boost = boost(divisor, dtypes.comm)
        scale = (self._boost if self.writes_to_staging else 1.0) / divisor
        fused = config.gradient_reduce_div_fusion
        self._scale = scale if fused else 1.0
        # What a pass of its own multiplies with before gradients travel; 1.0: there is none.
        self._later_scale = 1.0 if fused else scale
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
        # Axes that are reduced on the last microbatch only, innermost first.
        self._last_axes = [a for a in AXIS_BELOW_DEPTH[grad_depth:] if ladder.reduces(a)]
        self._accum: ShardedBuffer | None = None
        self._views: list[Tensor] = []
        self._gaps: list[Tensor] = []
        self._staging: TransientStorage | None = None
        self._aside: TransientStorage | None = None  # what was staged, while a rival has the slot
        self._wire: TransientStorage | None = None
        # What the optimizer gets, where gradients are kept in another dtype.
        self._handed: ShardedBuffer | None = None
        self._hands_over = dtypes.optim_grad != dtypes.main_grad
        self._staged_flat: Tensor | None = None
        if self.writes_to_staging:
            self._staging = memory.transient(layout.numel, dtypes.comm, "staging")
        if dtypes.comm != dtypes.main_grad and self._last_axes:
            self._wire = memory.transient(self._numel(grad_depth), dtypes.comm, "staging")
        self.rounds_again = self._wire is not None or self._hands_over  # [Note: Reducing again]
        later = 1.0 if self.writes_to_staging else self._later_scale
        self._kept_factor = kept_factor(ladder, self._last_axes, optim_depth, self._average, later)
        self._sums_wide = dtypes.reduce != dtypes.comm
        self._accumulates = False
        self._stale: list[Tensor] = []
        self._every_chain = Chain()
        self._last_chain = Chain()
        if memory.has_pool:
            self.main_grads()  # registering memory later would need all ranks at the same moment

    @property
    def num_staged_elements(self) -> int:
        """Elements of transient memory that writing gradients takes."""
        return self._layout.numel if self.writes_to_staging else 0

    @property
    def rest_bytes(self) -> int:
        """Bytes of the persistent gradients, from the first backward on."""
        kept = self._numel(self._grad_depth) * self._dtypes.main_grad.itemsize
        if self._hands_over:
            kept += self._numel(self._optim_depth) * self._dtypes.optim_grad.itemsize
        return kept

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staging buffer, or of the copy in the wire's dtype, while it is there."""
        transient = self._staging or self._wire
        return transient.num_bytes if transient is not None else 0

    @property
    def optim_grads(self) -> Tensor | None:
        """This rank's part of the reduced gradients, 1-D, padding included; None before any."""
        if self._handed is not None:
            return self._handed.tensor
        return None if self._accum is None else self._accum.narrow(self._optim_depth)

    def for_optimizer(self) -> ShardedBuffer:
        """The buffer whose part at the depth of OPTIM the optimizer gets."""
        main = self.main_grads()
        return self._handed if self._handed is not None else main

    def main_grads(self) -> ShardedBuffer:
        """The persistent buffer, allocated when gradients first appear."""
        if self._accum is None:
            numel = self._numel(self._grad_depth)
            sent = self.writes_to_staging or self._wire is None or self._sums_wide
            flat = self._memory.persistent(numel, self._dtypes.main_grad, "grad", sent=sent)
            self._accum = ShardedBuffer(self._layout, self._at, self._grad_depth, flat)
            self._make_views(self._accum)
            if self._hands_over:
                numel = self._numel(self._optim_depth)
                handed = self._memory.persistent(numel, self._dtypes.optim_grad, "grad")
                self._handed = ShardedBuffer(self._layout, self._at, self._optim_depth, handed)
                self._add_copy(self._accum.narrow(self._optim_depth), handed)
        return self._accum

    def lend(self, dtype: torch.dtype) -> Tensor | None:
        """The memory of whole gradients as a line of ``dtype``; None if it is too small. Whoever
        borrows it leaves zeros."""
        if self.writes_to_staging or self._dtypes.main_grad.itemsize < dtype.itemsize:
            return None
        return alias(self.main_grads().tensor.view(dtype)[: self._layout.numel])

    def begin(self) -> None:
        """The first gradient of a backward is about to be written."""
        accum = self.main_grads()
        compute = self._lanes.compute
        if self._staging is not None:
            compute.manage(f"allocate staging of {self._label}", self._staging.fill, self._staging)
            compute.access(writes=self._views)
            if self._aside is not None:
                self._bring_back(self._staging, self._aside)
        else:
            compute.access(writes=(accum.tensor,))

    def resume(self) -> None:
        """What is reduced is to be added to: see [Note: Reducing again]."""
        accum = self.main_grads()
        self._lanes.compute.access(writes=(accum.tensor,))
        keep_owned(accum, self._optim_depth, self._kept_factor)

    def set_aside(self) -> None:
        """Another unit needs the slot before this one is reduced: keep what was staged elsewhere.

        :meth:`begin` brings it back.
        """
        staging, compute = self._staging, self._lanes.compute
        if staging is None or not staging.filled:
            return
        aside = self._aside = self._memory.transient(staging.numel, staging.dtype, "staging")
        compute.manage(f"allocate copy of staging of {self._label}", aside.fill, aside)
        aside.view(0, (aside.numel,)).copy_(staging.view(0, (aside.numel,)))
        compute.manage(f"free staging of {self._label}", staging.drain, staging)

    def _bring_back(self, staging: TransientStorage, aside: TransientStorage) -> None:
        staging.view(0, (aside.numel,)).copy_(aside.view(0, (aside.numel,)))
        self._lanes.compute.manage(f"free copy of staging of {self._label}", aside.drain, aside)
        self._aside = None

    def write(self, index: int, grad: Tensor) -> None:
        """Put the gradient of parameter ``index`` into its place: scaled and cast in one pass."""
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        view = self._views[index]
        touched = self.touched[index]
        if touched or not (self.writes_to_staging or self.fresh[index]):
            if isinstance(self._factor, float):
                view.add_(grad, alpha=self._factor)
            else:
                view.add_(grad.to(view.dtype), alpha=self._scale)
        elif isinstance(self._factor, float):
            torch.mul(grad, self._factor, out=view)
        else:
            torch.mul(grad.reshape(-1), self._factor, out=view.view(-1))
        if not touched:
            self.touched[index] = True
            self.num_touched += 1

    def finish_writing(self) -> None:
        """No more gradients come in this backward; those that did not come are zeros."""
        count = len(self.touched)
        if self.num_touched < count:
            for index, came in enumerate(self.touched):
                if not came and (self.writes_to_staging or self.fresh[index]):
                    self._views[index].zero_()
        if self._gaps:
            # Padding is reduced with the rest and must not bring in what lay in the memory.
            torch._foreach_zero_(self._gaps)
        if not self.writes_to_staging:
            self.fresh = [False] * count

    def written(self) -> Sequence[Tensor]:
        """Where gradients lie that have not travelled yet, one tensor for each parameter."""
        return self._views

    @property
    def written_flat(self) -> Tensor:
        """The same memory as one tensor; zeros between parameters."""
        return self.main_grads().tensor if self._staged_flat is None else self._staged_flat

    def zero_fresh(self) -> None:
        """What no backward has written since gradients were cleared becomes zero."""
        accum = self.main_grads()
        for index, fresh in enumerate(self.fresh):
            if fresh:
                accum.local(index, self._grad_depth).zero_()
        self.fresh = [False] * len(self.fresh)

    def zero(self) -> None:
        """All gradients become zero, padding included."""
        if self._accum is not None:
            self._lanes.compute.access(writes=(self._accum.tensor,))
            self._accum.tensor.zero_()

    def scale(self, factor: float | Tensor, is_reduced: bool) -> None:
        """Multiply what is accumulated, or (``is_reduced``) the part that the optimizer gets."""
        if self._accum is None:
            return
        part = self.optim_grads if is_reduced else self._accum.tensor
        assert part is not None
        part.mul_(factor.to(part.dtype) if isinstance(factor, Tensor) else factor)

    def reduce(self, *, microbatch: bool, last: bool) -> Ticket | None:
        """Submit what is to be reduced now; returns a ticket, None if there is nothing.

        Args:
            microbatch: a backward has just written its gradients.
            last: it was the last one of the step.
        """
        ticket: Ticket | None = None
        if self._later_scale != 1.0 and (microbatch if self.writes_to_staging else last):
            flat = self._staged_flat if self._staged_flat is not None else self.main_grads().tensor
            flat.mul_(self._later_scale)
        after: tuple[Ticket, ...] = (self._lanes.compute.record(),)
        if self.writes_to_staging and microbatch:
            self._accumulates = not all(self.fresh)
            self._stale = []
            if self._accumulates and any(self.fresh):
                accum = self.main_grads()
                places = (i for i, fresh in enumerate(self.fresh) if fresh)
                self._stale = [accum.local(i, self._grad_depth) for i in places]
            ticket = self._every_chain.run(after)
            after = (ticket,)
            self.fresh = [False] * len(self.fresh)
        if last and self._last_chain:
            if self._wire is not None:
                self._lanes.compute.manage(
                    f"allocate wire of {self._label}", self._wire.fill, self._wire
                )
                after = (*after, self._lanes.compute.record())
            ticket = self._last_chain.run(after)
        self._forget_backward()
        return ticket

    def release(self) -> None:
        """The reduction is done (compute has waited for it): hand transient memory back."""
        for storage in (self._staging, self._wire, self._aside):
            if storage is not None and storage.filled:
                self._lanes.compute.manage(f"free staging of {self._label}", storage.drain, storage)
        self._aside = None

    def discard(self) -> None:
        """Forget whatever was accumulated."""
        self._forget_backward()
        self.fresh = [True] * len(self.fresh)

    def _forget_backward(self) -> None:
        self.touched = [False] * len(self.touched)
        self.num_touched = 0

    def _numel(self, depth: int) -> int:
        start, stop = self._layout.range(depth, self._at)
        return stop - start

    def _make_views(self, accum: ShardedBuffer) -> None:
        """Places of gradients, and the chains of reductions, over memory that stays or returns."""
        layout = self._layout
        if self._staging is not None:
            with self._staging.while_filled() as staging:
                self._staged_flat = staging.view(0, (layout.numel,))
                flat = ShardedBuffer(layout, self._at, 0, self._staged_flat)
                self._views = [staging.view(slot.offset, slot.shape) for slot in layout.slots]
                self._gaps = [staging.view(a, (b - a,)) for a, b in layout.gaps]
                self._descend_from_staging(flat, accum)
        else:
            self._views = [accum.full(i) for i in range(len(layout.slots))]
        if self._wire is None:
            self._descend_to_optim(accum, accum)
            return
        with self._wire.while_filled() as wire:
            whole = wire.view(0, (wire.numel,))
            flat = ShardedBuffer(layout, self._at, self._grad_depth, whole)
            if self._sums_wide:
                self._descend_to_optim(flat, accum)
            else:
                self._add_copy(accum.tensor, flat.tensor, self._boost)
                self._descend_to_optim(flat, flat)
                reduced = flat.narrow(self._optim_depth)
                self._add_copy(reduced, accum.narrow(self._optim_depth), 1.0 / self._boost)

    def _descend_from_staging(self, staging: ShardedBuffer, accum: ShardedBuffer) -> None:
        """Every microbatch: along the axes that cut gradients, into the persistent shard."""
        for depth in range(self._grad_depth):
            axis = AXIS_BELOW_DEPTH[depth]
            source = staging.narrow(depth)
            into_accum = depth == self._grad_depth - 1
            divisor = self._boost if into_accum else 1.0
            out = accum.tensor if into_accum else staging.narrow(depth + 1)
            self._every_chain.add(
                self._lanes.reduce(axis),
                f"reduce-scatter of {self._label} over the {axis.value} axis",
                self._scatter_steps(axis, source, out, divisor, into_accum=into_accum),
                reads=[source],
                writes=[source, out],
            )

    def _scatter_steps(
        self, axis: Axis, source: Tensor, out: Tensor, divisor: float, *, into_accum: bool = False
    ) -> Operation:
        def steps() -> Steps:
            accumulate = into_accum and self._accumulates
            if into_accum and self._stale:
                # Cleared by the user one by one while others were kept.
                torch._foreach_zero_(self._stale)
            if self._ladder.reduces(axis):
                yield from self._ladder.reduce_comm(axis).reduce_scatter(
                    source,
                    out,
                    reduce_dtype=self._dtypes.reduce,
                    average=self._average,
                    divisor=divisor,
                    accumulate=accumulate,
                    tag=self._tag,
                )
            elif accumulate:
                out.add_(source, alpha=1.0 / divisor)
            elif not begin_together(out, source):
                scaled_copy(source, out, 1.0 / divisor)

        return steps

    def _descend_to_optim(self, wire: ShardedBuffer, target: ShardedBuffer) -> None:
        """The last microbatch: along the axes on which gradients were accumulated whole.

        What is summed travels in ``wire``, sums go into ``target``; they may be one.
        """
        depth = self._grad_depth
        divisor = 1.0 if wire is target else self._boost
        for axis in self._last_axes:
            below = AXIS_BELOW_DEPTH.index(axis) + 1
            sent = wire.narrow(depth)
            if wire is not target:
                self._add_copy(target.narrow(depth), sent, self._boost)
            if self._optim_depth >= below:
                out = target.narrow(below)
                self._last_chain.add(
                    self._lanes.reduce(axis),
                    f"reduce-scatter of {self._label} over the {axis.value} axis",
                    self._scatter_steps(axis, sent, out, divisor),
                    reads=[sent],
                    writes=[sent, out],
                )
                depth = below
            else:
                self._add_all_reduce(axis, sent, target.narrow(depth))

    def _add_all_reduce(self, axis: Axis, sent: Tensor, tensor: Tensor) -> None:
        comm, lane = self._ladder.reduce_comm(axis), self._lanes.reduce(axis)
        label = f"all-reduce of {self._label} over the {axis.value} axis"
        # The backend's own all-reduce sums in the dtype that it sends: for sums in a wider one,
        # parts are exchanged and summed, and the sums gathered. (On gloo, too, its all-reduce is
        # as good as the two halves pairwise, and needs no host in between.)
        if self._sums_wide and tensor.numel() % comm.size == 0:
            own = comm.part(tensor)
            scatter = self._scatter_steps(axis, sent, own, self._boost)
            self._last_chain.add(lane, label, scatter, reads=[sent], writes=[sent, own])
            # A tag of its own: parts of both halves may be under way between two ranks.
            self._last_chain.add(
                lane,
                label,
                lambda: comm.all_gather(tensor, tag=self._tag + 1),
                reads=[own],
                writes=[tensor],
            )
            return
        self._last_chain.add(
            lane,
            label,
            lambda: comm.all_reduce(tensor, average=self._average),
            reads=[tensor],
            writes=[tensor],
        )

    def _add_copy(self, source: Tensor, out: Tensor, factor: float = 1.0) -> None:
        def steps() -> Steps:
            scaled_copy(source, out, factor)
            yield from ()

        self._last_chain.add(
            self._lanes.inner_reduce, f"cast of {self._label}", steps, reads=[source], writes=[out]
        )
