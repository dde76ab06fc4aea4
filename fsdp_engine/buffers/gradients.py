"""The gradients of one buffer, from autograd to the optimizer's shard.

    full --reduce--> accumulation[GRAD] --reduce, on the last microbatch--> accumulation[OPTIM]

Each gradient is written once, scaled and cast in the same pass, into its place in a flat buffer:

- GRAD not sharded (depth 0): into the accumulation buffer, to which later microbatches add and
  which the last one reduces in place;
- GRAD sharded: into a transient *staging* buffer in the communication dtype. Every microbatch
  reduces it along the axes that shard gradients into the accumulation buffer; the other axes are
  reduced on the last microbatch.

State has two lifetimes, with an object for each. A :class:`GradientWriter` is made when the first
gradient of a backward is written, and dropped when their reduction is submitted.
:class:`StepGradients` are made with the first gradient after gradients were cleared, and dropped
when all of them are cleared. [Note: When gradients are held] describes their memory.

    staging       full gradients as autograd produces them, where gradients are sharded
    accumulation  sums over microbatches, at the depth of GRAD
    comm          a copy of the accumulation buffer in the communication dtype, if that differs
    optim         the optimizer's shard in its own dtype, if that differs

[Note: When gradients are held]
The accumulation buffer has memory from the unit's first reduction after gradients were cleared
(from the first gradient written, where gradients are not sharded) until all of them are cleared by
``zero_grad()`` or ``.grad = None``. In between the allocator can use it for something else.

Tensors over that memory, the published gradients and the submissions that reduce them are made once
(:class:`GradientTensors`), and serve each step in turn as long as the user holds none of them:
making them in each step costs more host time than all the rest of a unit's gradients
(``docs/design.md``, section 9). If the user holds a published gradient, a slice or a view of one
when gradients are cleared, that step keeps its tensors, Python's references keep the memory, and
the next step gets new ones.

Reductions write the accumulation buffer where :class:`.GradientShard` says.

The memory stays allocated where nothing is sharded, since ``main_grad`` is a persistent buffer in
Megatron-Core; where ``main_grad`` was given out; and in a :class:`~.allocator.Memory` that is
steady.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, or_
from sys import getrefcount
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradient_scale import (
    GradientScale,
    gradient_scale,
    keep_owned,
    kept_factor,
)
from fsdp_engine.buffers.placement import GradientShard
from fsdp_engine.buffers.redistribute import (
    BufferContext,
    Reduction,
    ShardedBuffer,
    copy,
    redistribute,
)
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.lanes import Chain, Ticket
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.flat_dtensor import FlatDTensor, versions_of
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import TransientStorage, alias
from fsdp_engine.options import Options
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis

# Zeroing this many bytes takes about as long as one more call.
_BYTES_PER_CALL = 4096
_zeroed_at = attrgetter("_zeroed_at")
_NOT_ZEROED = {None}


@dataclass(frozen=True)
class WriteBuffer:
    """The buffer that full gradients are written into.

    Attributes:
        buffer: holds the whole layout.
        views: the place of each parameter, in its shape.
        padding: elements between parameters. Empty: ``zeroes_all``.
        zeroes_all: there is so much padding that the buffer is zeroed as a whole instead.
    """

    buffer: ShardedBuffer
    views: Sequence[Tensor]
    padding: list[Tensor]
    zeroes_all: bool

    @classmethod
    def over(cls, buffer: ShardedBuffer, views: Sequence[Tensor]) -> WriteBuffer:
        """Returns the one over ``buffer``."""
        padding = [alias(buffer.tensor[start:stop]) for start, stop in buffer.layout.gaps]
        zeroes_all = buffer.tensor.nbytes < len(padding) * _BYTES_PER_CALL
        return cls(buffer, views, [] if zeroes_all else padding, zeroes_all)

    def zero_padding(self) -> None:
        """Zero the padding: it is reduced with the gradients and must not add to them."""
        if self.padding:
            torch._foreach_zero_(self.padding)


@dataclass(frozen=True)
class ReductionChains:
    """Submissions that reduce one buffer's gradients.

    Axes that shard gradients are reduced in every microbatch, from the staging buffer into the
    accumulation buffer; the others on the last microbatch, in place. The latter goes through the
    communication buffer if that has another dtype. Where ranks sum in a wider dtype than they send,
    only summands are sent narrow: sums are not rounded again.

    Attributes:
        overwriting: of a microbatch whose sums are the first; empty where gradients are full.
        adding: of every other microbatch.
        last: of the last microbatch; empty where every axis shards gradients.
    """

    overwriting: Chain
    adding: Chain
    last: Chain


class SubmittedReduction(NamedTuple):
    """Tickets of the reductions of one buffer.

    Attributes:
        transient_read: its transient memory is no longer read.
        done: everything is reduced.
    """

    transient_read: Ticket
    done: Ticket


class GradientTensors:
    """Tensors over one allocation of the accumulation buffer.

    Args:
        storages: behind ``accum`` and ``optim``; none where these are persistent.
        accum: the accumulation buffer.
        optim: the optimizer's shard in its own dtype; None: it is part of ``accum``.
        written: what full gradients are written into.
        chains: that reduce them.

    Attributes:
        published: the tensors that ``.grad`` of the parameters become; none before :meth:`publish`.
            Each has a version counter of its own, which counts the user's changes only.
        local: this rank's slice of each.
    """

    def __init__(
        self,
        storages: Sequence[TransientStorage],
        accum: ShardedBuffer,
        optim: ShardedBuffer | None,
        written: WriteBuffer,
        chains: ReductionChains,
    ) -> None:
        self.storages = storages
        self.accum = accum
        self.optim = optim
        self.written = written
        self.chains = chains
        self.published: list[Tensor] = []
        self.local: list[Tensor] = []
        self._is_plain = True
        self._counts_alone: tuple[list[int], list[int], list[int]] | None = None

    @property
    def has_memory(self) -> bool:
        """Whether the memory is allocated."""
        return all(storage.filled for storage in self.storages)

    @property
    def for_optimizer(self) -> ShardedBuffer:
        """The buffer whose shard at the depth of OPTIM the optimizer reads."""
        return self.accum if self.optim is None else self.optim

    def publish(self, params: Sequence[Tensor], depth: int) -> list[Tensor]:
        """Returns ``published``; makes them first if there are none.

        Args:
            params: what users hold: sharded parameters, or plain ones where nothing is sharded.
            depth: of the optimizer.
        """
        if not self.published:
            main = self.for_optimizer
            is_flat = [isinstance(param, FlatDTensor) for param in params]
            self.local = [
                alias(main.local(index, depth) if flat else main.full(index))
                for index, flat in enumerate(is_flat)
            ]
            self.published = [
                like(param, local) for local, param in zip(self.local, params, strict=True)
            ]
            # A plain tensor does not record that it was zeroed.
            self._is_plain = not is_flat[0]
            self._counts_alone = self._counts()
        return self.published

    def versions(self) -> list[int]:
        """Returns the version counter of each published gradient."""
        return versions_of(self.local)

    def take_zeroed(self, found: Sequence[Tensor | None]) -> list[int]:
        """Returns which of the published gradients the user has zeroed and left as ``.grad``, which
        is ``found``; forgets that they were zeroed."""
        if self._is_plain or _NOT_ZEROED.issuperset(map(_zeroed_at, self.published)):
            return []
        places = [
            index
            for index, (tensor, grad) in enumerate(zip(self.published, found, strict=True))
            if grad is tensor and isinstance(tensor, FlatDTensor) and tensor.zeroed
        ]
        self.forget_zeroed()
        return places

    def forget_zeroed(self) -> None:
        """Forget that published gradients were zeroed: others are about to be written there."""
        if self._is_plain or _NOT_ZEROED.issuperset(map(_zeroed_at, self.published)):
            return
        for tensor in self.published:
            if isinstance(tensor, FlatDTensor):
                tensor.zeroed = False

    @property
    def are_held(self) -> bool:
        """Whether the user holds a published gradient, a slice or a view of one, or a graph that
        saved one. None of them is ``.grad`` of a parameter at this moment."""
        return self._counts_alone is not None and self._counts() != self._counts_alone

    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        tensors, slices = map(getrefcount, self.published), map(getrefcount, self.local)
        return [each.num_uses for each in self.storages], list(tensors), list(slices)


class GradientMemory:
    """Allocates what the gradients of one buffer need. See the module docstring.

    Args:
        spec, context: of the buffer.
        last_axes: reduced on the last microbatch only, innermost first.
        pending: a step that may read the gradients.
        is_resident: the memory stays allocated while gradients are cleared.

    Attributes:
        is_resident: see the argument.
        tensors: those that the current step uses, or that the next one will.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        last_axes: Sequence[Axis],
        pending: PendingStep,
        *,
        is_resident: bool,
    ) -> None:
        self._spec = spec
        self._context = context
        self._pending = pending
        self._last_axes = last_axes
        self.is_resident = is_resident
        dtypes, memory = spec.kind.dtypes, context.memory
        self._staging: TransientStorage | None = None
        if spec.grad_depth > 0:
            self._staging = memory.transient(spec.layout.numel, dtypes.comm, "staging")
        self._staged: WriteBuffer | None = None
        make_shard = partial(context.placement.make_gradients, spec, context)
        self._accum: GradientShard = make_shard(spec.grad_depth, dtypes.main_grad)
        self._shards: list[GradientShard] = [self._accum]
        if dtypes.optim_grad != dtypes.main_grad:
            self._shards.append(make_shard(spec.optim_depth, dtypes.optim_grad))
        self.is_resident |= any(each.is_resident for each in self._shards)
        self._comm: TransientStorage | None = None
        if dtypes.comm != dtypes.main_grad and last_axes:
            self._comm = memory.transient(self._numel(spec.grad_depth), dtypes.comm, "staging")
        self._working = [storage for each in self._shards for storage in each.memory]
        # Allocated from gradients' staging until their reduction is done.
        own = [each for each in (self._staging, self._comm) if each is not None]
        self._transient = [*own, *self._working]
        self.tensors: GradientTensors | None = None

    @property
    def has_comm_buffer(self) -> bool:
        """Whether gradients are copied into the communication dtype on the last microbatch."""
        return self._comm is not None

    @property
    def shard(self) -> GradientShard:
        """The shard of which the optimizer reads its part."""
        return self._shards[-1]

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulation buffer, and of the optimizer's shard in another dtype."""
        return sum(each.rest_bytes for each in self._shards)

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staging and the communication buffer while they are allocated."""
        return sum(each.num_bytes for each in self._transient)

    def take(self, scale: GradientScale, *, zero: bool = False) -> GradientTensors:
        """Returns tensors for a step; allocates their memory unless it is allocated.

        Args:
            scale: of the gradients.
            zero: memory that is allocated is zeroed; else only its padding.
        """
        tensors = self.tensors
        if tensors is None:
            tensors = self.tensors = self._make(scale)
        elif tensors.has_memory:
            return tensors
        else:
            self._allocate(tensors.storages)
        written = tensors.written
        if zero or (written.zeroes_all and self._staging is None):
            tensors.accum.tensor.zero_()
        elif self._staging is None:
            written.zero_padding()
        return tensors

    def release(self, tensors: GradientTensors, *, looks: bool) -> bool:
        """The step of ``tensors`` is over. Returns whether the user holds some of them and they
        will serve the next step all the same.

        Args:
            looks: find out whether the user holds any, also where that frees nothing.
        """
        tensors.forget_zeroed()
        if self.is_resident:
            return looks and tensors.are_held
        if tensors.are_held:
            self.abandon()
        elif self._spec.optim_depth > 0:
            self.free()
        return False

    def free(self) -> None:
        """Free the accumulation buffer; compute is done with it, or will be when it has waited for
        a pending step, and gradients are cleared."""
        label = self._spec.label
        for storage in self.tensors.storages if self.tensors is not None else ():
            if storage.filled:
                self._pending.free(f"free gradients of {label}", storage)

    def abandon(self) -> None:
        """Leave the accumulation buffer to references of the user; the next step gets another."""
        self._pending.hold(self.tensors)
        for storage in self.tensors.storages if self.tensors is not None else ():
            storage.leave()
        self.tensors = None

    def stage(self) -> WriteBuffer:
        """Allocate the staging buffer; returns it."""
        assert self._staging is not None
        compute, label = self._context.lanes.compute, self._spec.label
        compute.manage(f"allocate staging of {label}", self._staging.fill, self._staging)
        staged = self._over_staging()
        if staged.zeroes_all:
            staged.buffer.tensor.zero_()
        return staged

    def allocate_comm(self) -> bool:
        """Allocate the communication buffer; returns whether there is one."""
        if self._comm is None:
            return False
        compute, label = self._context.lanes.compute, self._spec.label
        compute.manage(f"allocate comm buffer of {label}", self._comm.fill, self._comm)
        return True

    def allocate_working(self) -> bool:
        """Allocate the memory that shards need while reductions run; returns whether there is
        any."""
        self._allocate(self._working)
        return bool(self._working)

    def free_transient(self) -> None:
        """Free the staging and the communication buffer; compute is done with them."""
        compute, label = self._context.lanes.compute, self._spec.label
        for storage in self._transient:
            if storage.filled:
                compute.manage(f"free staging of {label}", storage.drain, storage)

    def _allocate(self, storages: Sequence[TransientStorage]) -> None:
        compute, label = self._context.lanes.compute, self._spec.label
        for storage in storages:
            compute.manage(f"allocate gradients of {label}", storage.fill, storage)

    def _over_staging(self) -> WriteBuffer:
        """The staging buffer, which must have memory when this is first called."""
        if self._staged is None:
            assert self._staging is not None
            storage, slots = self._staging, self._spec.layout.slots
            flat = self._buffer(0, storage.view(0, (storage.numel,)))
            views = [storage.view(slot.offset, slot.shape) for slot in slots]
            self._staged = WriteBuffer.over(flat, views)
        return self._staged

    def _make(self, scale: GradientScale) -> GradientTensors:
        """New tensors, with memory, and the submissions that reduce them."""
        spec, dtypes = self._spec, self._spec.kind.dtypes
        sums_wide = dtypes.reduce != dtypes.comm
        sent = self._staging is not None or self._comm is None or sums_wide
        storages: list[TransientStorage] = []
        accum, reduced = self._accum.allocate(storages, sent=sent)
        optim = reduced_optim = None
        if self.shard is not self._accum:
            optim, reduced_optim = self.shard.allocate(storages, sent=False)
        # Views over transient memory are made while it is allocated.
        added = [each for each in self._transient if not each.filled]
        for storage in added:
            storage.fill()
        if self._staging is not None:
            written = self._over_staging()
        else:
            views = [accum.full(index) for index in range(len(spec.layout.slots))]
            written = WriteBuffer.over(accum, views)
        comm = None
        if self._comm is not None:
            comm = self._buffer(spec.grad_depth, self._comm.view(0, (self._comm.numel,)))
        chains = self._make_chains(scale, written.buffer, reduced, reduced_optim, comm)
        for storage in added:
            storage.drain()
        return GradientTensors(storages, accum, optim, written, chains)

    def _make_chains(
        self,
        scale: GradientScale,
        written: ShardedBuffer,
        accum: ShardedBuffer,
        optim: ShardedBuffer | None,
        comm: ShardedBuffer | None,
    ) -> ReductionChains:
        spec, dtypes, context = self._spec, self._spec.kind.dtypes, self._context
        chains = ReductionChains(Chain(), Chain(), Chain())
        how = Reduction(
            spec.label,
            spec.tag,
            AXIS_BELOW_DEPTH[: spec.grad_depth],
            into=accum,
            dtype=dtypes.reduce,
            average=scale.average,
            boost=scale.boost,
        )
        if self._staging is not None:
            for chain, accumulate in ((chains.overwriting, False), (chains.adding, True)):
                each = replace(how, accumulate=accumulate)
                if accumulate:
                    self._accum.add_bring(chain)
                redistribute(chain, context, written, 0, spec.grad_depth, each)
                self._accum.add_take(chain)
        if self._last_axes or optim is not None:
            self._accum.add_bring(chains.last)
        depths, lane = (spec.grad_depth, spec.optim_depth), context.lanes.inner_reduce
        last = replace(how, over=self._last_axes, into=None)
        if comm is None or dtypes.reduce != dtypes.comm:
            redistribute(chains.last, context, accum, *depths, replace(last, comm_buffer=comm))
        else:
            copy(chains.last, lane, spec.label, accum.tensor, comm.tensor, scale.boost)
            redistribute(chains.last, context, comm, *depths, last)
            parts = comm.narrow(spec.optim_depth), accum.narrow(spec.optim_depth)
            copy(chains.last, lane, spec.label, *parts, 1.0 / scale.boost)
        if optim is not None:
            reduced = accum.narrow(spec.optim_depth)
            copy(chains.last, lane, spec.label, reduced, optim.tensor, 1.0)
        if chains.last:
            for shard in self._shards:
                shard.add_take(chains.last)
        return chains

    def _buffer(self, depth: int, flat: Tensor) -> ShardedBuffer:
        return ShardedBuffer(
            self._spec.layout, self._context.mesh_communicators.mesh.coordinate, depth, flat
        )

    def _numel(self, depth: int) -> int:
        start, stop = self._spec.layout.range(
            depth, self._context.mesh_communicators.mesh.coordinate
        )
        return stop - start


def like(param: Tensor, local: Tensor) -> Tensor:
    """Returns the tensor over ``local`` that is sharded as ``param`` is."""
    if isinstance(param, FlatDTensor):
        return FlatDTensor.from_flat_local(local, param.flat_placement)
    return TensorParallelSpec.of(param).wrap(local) if isinstance(param, DTensor) else local


_STRIDED = torch.strided


class GradientWriter:
    """Writes the gradients of one backward.

    Args:
        target: the buffer that is written into.
        scale: of the gradients.
        adds: per parameter, 1: the next gradient is added, not written over. Not shared.

    Attributes:
        target: see the argument.
        arrived: per parameter, 1: its gradient was written.
        num_missing: parameters whose gradient was not written yet.
    """

    __slots__ = ("_adds", "_alpha", "_factor", "_views", "arrived", "num_missing", "target")

    def __init__(self, target: WriteBuffer, scale: GradientScale, adds: bytearray) -> None:
        self.target = target
        self._views = target.views
        self._alpha = scale.alpha
        self._factor = scale.factor
        self._adds = adds
        self.arrived = bytearray(len(adds))
        self.num_missing = len(adds)

    def write(self, index: int, grad: Tensor) -> bool:
        """Write the gradient of parameter ``index``, scaled and cast in one pass.

        Returns:
            Whether the gradients of all parameters were written.
        """
        if grad.layout is not _STRIDED:
            grad = grad.to_dense()
        view = self._views[index]
        if self._adds[index]:
            view.add_(grad, alpha=self._alpha)
        elif grad.ndim:
            torch.mul(grad, self._factor, out=view)
        else:
            # A factor with one dimension makes a product with one.
            torch.mul(grad.reshape(1), self._factor, out=view.view(1))
        if not self.arrived[index]:
            self.arrived[index] = self._adds[index] = 1
            self.num_missing -= 1
        return not self.num_missing


@dataclass(slots=True)
class StepGradients:
    """One buffer's gradients from the first one until all of them are cleared.

    Attributes:
        sums: per parameter, 1: its place in the accumulation buffer holds a sum that counts. 0: the
            next gradient overwrites it.
        used: per parameter, 1: this rank had a gradient of it.
        tensors: over the accumulation buffer; None before it is needed.
        is_published: ``.grad`` of the parameters are the accumulated sums. False: sums are partial
            and hidden.
        num_published: published gradients that the user has not made None.
        earlier: reduced gradients that are added when the next reduction is done, by parameter:
            [Note: Gradients between backwards] in ``published_gradients.py``.
        penalties: the same for gradients of this rank's slices.
        versions: of the published gradients when partial sums were published; none: sums are
            reduced.
        full_values: gradients of all ranks, where every rank gathered them; None: not gathered.
    """

    sums: bytearray
    used: bytearray
    tensors: GradientTensors | None = None
    is_published: bool = True
    num_published: int = 0
    earlier: dict[int, Tensor] = field(default_factory=dict)
    penalties: dict[int, Tensor] = field(default_factory=dict)
    versions: list[int] = field(default_factory=list)
    full_values: Sequence[Tensor] | None = None

    @property
    def holds_any(self) -> bool:
        """Whether there are earlier gradients or penalties."""
        return bool(self.earlier or self.penalties)


class Gradients:
    """See the module docstring.

    Args:
        spec, context: of the buffer.
        options: says how gradients are divided.
        pending: a step that may read the gradients.

    Attributes:
        step: of the current step; None: gradients are cleared.
        writer: of the current backward; None: it has no gradients, or they are reduced.
        optim_depth: the depth of the optimizer's shard.
        writes_to_staging: whether gradients are sharded, so that full ones are transient.
        rounds_again: reduced gradients cannot be reduced again without loss.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        options: Options,
        pending: PendingStep,
    ) -> None:
        self._pending = pending
        self._spec = spec
        self._context = context
        mesh_communicators, dtypes = context.mesh_communicators, spec.kind.dtypes
        self._options = options
        self._scale = gradient_scale(
            spec, options, mesh_communicators.mesh.size, context.memory.device
        )
        self._num_params = len(spec.layout.slots)
        self.optim_depth = spec.optim_depth
        self.writes_to_staging = spec.grad_depth > 0
        # Axes that are reduced on the last microbatch only, innermost first.
        axes = AXIS_BELOW_DEPTH[spec.grad_depth :]
        self._last_axes = [
            axis for axis in axes if mesh_communicators.comms[axis].reduce is not None
        ]
        self._memory = GradientMemory(
            spec, context, self._last_axes, pending, is_resident=context.memory.is_steady
        )
        # [Note: Reducing again]
        has_comm = self._memory.has_comm_buffer
        self.rounds_again = has_comm or dtypes.optim_grad != dtypes.main_grad
        self.step: StepGradients | None = None
        self.writer: GradientWriter | None = None
        if context.memory.is_fixed:
            self._memory.take(self._scale)

    @property
    def shard(self) -> GradientShard:
        """The shard of which the optimizer reads its part."""
        return self._memory.shard

    @property
    def awaits_last_microbatch(self) -> bool:
        """Whether axes of several ranks are reduced on the last microbatch only."""
        return bool(self._last_axes)

    @property
    def num_staged_elements(self) -> int:
        """Elements of transient memory that writing gradients takes."""
        return self._spec.layout.numel if self.writes_to_staging else 0

    @property
    def num_missing(self) -> int:
        """Parameters whose gradient this backward has not brought, or has brought and reduced."""
        return self._num_params if self.writer is None else self.writer.num_missing

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulation buffer while it is allocated."""
        return self._memory.rest_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes of the staging and the communication buffer while they are allocated."""
        return self._memory.transient_bytes

    @property
    def optim_grads(self) -> Tensor | None:
        """This rank's shard of the gradients, 1-D, padding included; None: there is none."""
        self._pending.finish()
        tensors = self.step.tensors if self.step is not None else None
        return None if tensors is None else tensors.for_optimizer.narrow(self.optim_depth)

    @property
    def divisor(self) -> float:
        """Sums over the ranks are divided by this."""
        return self._scale.num_ranks

    def divide_by(self, divisor: float) -> None:
        """Divide sums over the ranks by ``divisor`` from the next gradient on.

        Raises:
            RuntimeError: gradients are sent in fp16, and some were: [Note: Gradients in fp16].
        """
        spec = self._spec
        scale = gradient_scale(spec, self._options, divisor, self._context.memory.device)
        if self._memory.tensors is not None and scale.boost != self._scale.boost:
            raise RuntimeError(
                f"gradient divisor of {spec.label}: expected it to be set before the first "
                "backward, since gradients travel in fp16; found a backward behind"
            )
        self._scale = scale

    def make_step(self) -> StepGradients:
        """Returns the step's gradients; makes them if gradients are cleared."""
        if self.step is None:
            self.step = StepGradients(bytearray(self._num_params), bytearray(self._num_params))
        return self.step

    def accumulation(self, *, zero: bool = True) -> GradientTensors:
        """Returns the step's tensors, with memory.

        Args:
            zero: memory that is allocated now is zeroed.
        """
        return self._tensors(zero=zero)

    def main_grads(self) -> ShardedBuffer:
        """Returns the accumulation buffer, with memory: zeros, if it is allocated now."""
        return self.accumulation().accum

    def for_optimizer(self) -> ShardedBuffer:
        """Returns the buffer whose shard at the depth of OPTIM the optimizer reads."""
        return self.accumulation().for_optimizer

    def give_out(self) -> GradientTensors:
        """Returns tensors that stay valid for good, with memory: zeros, if it is allocated now."""
        self._pending.finish()
        self._memory.is_resident = True
        return self._memory.take(self._scale, zero=True)

    def free(self) -> None:
        """Gradients are cleared: free the memory, also where it is resident."""
        self._memory.free()

    def restore(self) -> None:
        """Allocate resident memory again, zeroed."""
        if self._memory.is_resident:
            self._pending.finish()
            self._memory.take(self._scale, zero=True)

    def accumulated(self, index: int) -> Tensor | None:
        """Returns this rank's part of parameter ``index`` in the accumulation buffer, 1-D; None:
        nothing is accumulated."""
        self._pending.finish()
        tensors = self.step.tensors if self.step is not None else None
        return None if tensors is None else tensors.accum.local(index, self.optim_depth)

    def no_gradient(self, local: Tensor) -> Tensor:
        """Returns zeros of the shape of a slice, in the dtype that the optimizer reads."""
        return allocator.zeros(local.numel(), self._spec.kind.dtypes.optim_grad, local.device)

    def begin(self) -> None:
        """The first gradient of a backward is about to be written."""
        step = self.make_step()
        step.is_published = False
        if self.writes_to_staging:
            target, adds = self._memory.stage(), bytearray(self._num_params)
        else:
            target, adds = self._tensors().written, bytearray(step.sums)
        self._context.lanes.compute.access(writes=(target.buffer.tensor,))
        self.writer = GradientWriter(target, self._scale, adds)

    def resume(self) -> None:
        """Reduced gradients are to be added to: see [Note: Reducing again]."""
        accum = self.main_grads()
        self._context.lanes.compute.access(writes=(accum.tensor,))
        mesh_communicators, spec = self._context.mesh_communicators, self._spec
        factor = kept_factor(mesh_communicators, self._last_axes, spec, self._scale)
        keep_owned(accum, spec.optim_depth, factor)

    def end_writing(self) -> None:
        """No more gradients are written in this backward; those that are missing are zeros."""
        step, writer = self.step, self.writer
        assert step is not None
        assert writer is not None
        arrived = writer.arrived
        if not writer.num_missing:
            step.used[:] = arrived
        elif writer.num_missing < self._num_params:
            step.used[:] = bytes(map(or_, step.used, arrived))
        keeps = not self.writes_to_staging
        if writer.num_missing:
            missing = [each for each in zeros_in(arrived) if not (keeps and step.sums[each])]
            if missing:
                torch._foreach_zero_([writer.target.views[index] for index in missing])
        if keeps:
            _set_all(step.sums)
        else:
            writer.target.zero_padding()

    def written(self) -> WriteBuffer:
        """Returns the gradients of this backward before any reduction; without a backward, the
        accumulation buffer."""
        return self._tensors().written if self.writer is None else self.writer.target

    def zero_missing(self) -> None:
        """Zero gradients that no backward has written since they were cleared."""
        accum, step = self.main_grads(), self.make_step()
        step.is_published = False
        if 1 not in step.sums:
            accum.tensor.zero_()
        self._zero_cleared(step, accum)

    def scale(self, factor: float | Tensor, is_reduced: bool) -> None:
        """Multiply the accumulation buffer, or (``is_reduced``) the optimizer's shard."""
        if self.step is None or self.step.tensors is None:
            return
        self._pending.finish()
        part = self.optim_grads if is_reduced else self.step.tensors.accum.tensor
        assert part is not None
        scale_(part, factor)

    def reduce(self, *, last: bool) -> SubmittedReduction | None:
        """Submit the reductions that are due; drops the backward's writer.

        Args:
            last: this is the last microbatch of the step.

        Returns:
            Their tickets; None if none is due.
        """
        step, writer, compute = self.step, self.writer, self._context.lanes.compute
        assert step is not None, "gradients are written, or zeroed, before they are reduced"
        self.writer = None
        ticket: Ticket | None = None
        if self.writes_to_staging and writer is not None:
            if self._scale.later != 1.0:
                writer.target.buffer.tensor.mul_(self._scale.later)
            tensors = self._tensors()
            is_first = 1 not in step.sums
            self._zero_cleared(step, tensors.accum)
            chain = tensors.chains.overwriting if is_first else tensors.chains.adding
            self._memory.allocate_working()
            ticket = chain.run((compute.record(),))
        else:
            tensors = self._tensors()
            if last and self._scale.later != 1.0 and not self.writes_to_staging:
                tensors.accum.tensor.mul_(self._scale.later)
        if not (last and tensors.chains.last):
            return None if ticket is None else SubmittedReduction(ticket, ticket)
        uses_comm = self._memory.allocate_comm()
        uses_comm = self._memory.allocate_working() or uses_comm
        after = [] if ticket is None else [ticket]
        if uses_comm or ticket is None:
            after.append(compute.record())
        done = tensors.chains.last.run(after)
        # The axes that are reduced last can be slow ones: staging does not wait for them.
        return SubmittedReduction(done if uses_comm or ticket is None else ticket, done)

    def release(self) -> None:
        """No reduction reads transient memory (compute has waited for that): free it."""
        self._memory.free_transient()

    def drop_step(self, *, looks: bool = False) -> bool:
        """All gradients are cleared. Returns whether the user holds some that the next step will
        write; compute must be done with them.

        Args:
            looks: find that out also where it decides nothing else.
        """
        step, self.step = self.step, None
        if step is None or step.tensors is None:
            return False
        return self._memory.release(step.tensors, looks=looks)

    def begin_zeroed(self) -> bool:
        """Drop the step; the next one begins with the same memory, zeroed, padding included.

        Returns:
            Whether there is memory. False: the step is as it was.
        """
        self._pending.finish()
        tensors = self._memory.tensors
        if tensors is None or not tensors.has_memory:
            return False
        self._context.lanes.compute.access(writes=(tensors.accum.tensor,))
        tensors.accum.tensor.zero_()
        tensors.forget_zeroed()
        self.step = None
        self.make_step().tensors = tensors
        return True

    def abandon(self) -> None:
        """This object is no longer used: leave the memory to references of the user."""
        self.step = self.writer = None
        self._memory.abandon()

    def _tensors(self, *, zero: bool = False) -> GradientTensors:
        """The step's tensors, with memory."""
        self._pending.finish()
        step = self.step
        if step is None:
            step = self.make_step()
        tensors = step.tensors
        if tensors is None:
            tensors = step.tensors = self._memory.take(self._scale, zero=zero)
        return tensors

    def _zero_cleared(self, step: StepGradients, accum: ShardedBuffer) -> None:
        """Zero places that hold no sum beside others that do: all are added to."""
        if 1 in step.sums and 0 in step.sums:
            depth = self._spec.grad_depth
            torch._foreach_zero_([accum.local(index, depth) for index in zeros_in(step.sums)])
        _set_all(step.sums)


def _set_all(flags: bytearray) -> None:
    flags[:] = b"\1" * len(flags)


def scale_(grad: Tensor, factor: float | Tensor) -> None:
    """Multiply ``grad`` in place. A tensor ``factor`` of one element is not rounded to 16 bits."""
    if isinstance(factor, Tensor):
        # Of one dimension it takes part in type promotion.
        wide = torch.promote_types(grad.dtype, torch.float32)
        torch.mul(grad, factor.reshape(1).to(grad.device, wide), out=grad)
    else:
        grad.mul_(factor)


def zeros_in(flags: bytearray | bytes) -> Iterator[int]:
    """Yields the places of zero bytes; costs time for each of them only."""
    place = flags.find(0)
    while place >= 0:
        yield place
        place = flags.find(0, place + 1)
