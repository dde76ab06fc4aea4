"""The memory of one buffer's gradients, tensors over it, and the submissions that reduce them.

[Note: When gradients are held]
The accumulation buffer has memory from the unit's first reduction after gradients were cleared
(where gradients are not sharded: from the first gradient that is written) until all gradients of
the buffer are cleared by ``zero_grad()`` or ``.grad = None``. In between, the allocator can use the
memory for other tensors.

Tensors over that memory, the published gradients and the submissions that reduce them are created
once (:class:`GradientTensors`). Each step uses the same ones, as long as the user holds none of
them: creating them in each step costs more host time than all other work on a unit's gradients
(decision 27 of ``docs/internals/decisions.md``). If the user holds a published gradient, or a slice
or a view of one, when gradients are cleared, the engine leaves these tensors and their memory to
the user, and creates new ones for the next step.

:class:`.GradientShard` allocates the memory that reductions write. Subclasses can store the shard
in other memory.

The memory stays allocated in three cases: if nothing is sharded, because ``main_grad`` is a
persistent buffer in Megatron-Core; if ``main_grad`` was returned to the user; and if
:class:`~.allocator.Memory` has ``is_steady``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradient_scale import (
    GradientScale,
)
from fsdp_engine.buffers.placement import GradientShard
from fsdp_engine.buffers.sharded_buffer import (
    BufferContext,
    Reduction,
    ShardedBuffer,
    copy,
)
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.lanes import Chain, Ticket
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.flat_dtensor import FlatDTensor, versions_of
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.memory.allocator import TransientStorage, alias
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis

# Zeroing this number of bytes takes about as long as one additional call of a function of torch.
_BYTES_PER_CALL = 4096
_zeroed_at = attrgetter("_zeroed_at")
_NOT_ZEROED = {None}


@dataclass(frozen=True)
class WriteBuffer:
    """The buffer that full gradients are written into.

    Attributes:
        buffer: The buffer, at depth 0.
        views: A view for each parameter, in its shape.
        padding: Views of the padding between parameters; empty if ``zeroes_all``.
        zeroes_all: Whether the complete buffer is zeroed, because it has so many pieces of padding
            that zeroing each of them takes longer.
    """

    buffer: ShardedBuffer
    views: Sequence[Tensor]
    padding: list[Tensor]
    zeroes_all: bool

    @classmethod
    def over(cls, buffer: ShardedBuffer, views: Sequence[Tensor]) -> WriteBuffer:
        """Returns the write buffer over ``buffer``, with the views of its parameters."""
        padding = [alias(buffer.tensor[start:stop]) for start, stop in buffer.layout.gaps]
        zeroes_all = buffer.tensor.nbytes < len(padding) * _BYTES_PER_CALL
        return cls(buffer, views, [] if zeroes_all else padding, zeroes_all)

    def zero_padding(self) -> None:
        """Zero the padding, which is reduced together with the gradients and counts in their
        norm."""
        if self.padding:
            torch._foreach_zero_(self.padding)


@dataclass(frozen=True)
class ReductionChains:
    """Submissions that reduce one buffer's gradients.

    Each microbatch reduces the staging buffer into the accumulation buffer, along the axes over
    which gradients are sharded. The last microbatch reduces the accumulation buffer in place along
    the other axes. If gradients are sent in another dtype, it copies them into the communication
    buffer first. Where sums have a wider dtype than sent gradients, only the summands are cast to
    the narrower dtype; the sums are not.

    Attributes:
        overwriting: The reductions of the first microbatch of a step, which overwrite the
            accumulation buffer. Empty where gradients are not sharded.
        adding: The reductions of the following microbatches, which add to the accumulation buffer.
            Empty where gradients are not sharded.
        last: Additional reductions of the last microbatch. Empty where gradients are sharded over
            every axis.
    """

    overwriting: Chain
    adding: Chain
    last: Chain


class SubmittedReduction(NamedTuple):
    """Tickets of the reductions of one buffer.

    Attributes:
        transient_read: The ticket after which the transient memory is no longer read.
        done: The ticket after which all reductions are done.
    """

    transient_read: Ticket
    done: Ticket


class GradientTensors:
    """Tensors over one allocation of the accumulation buffer.

    Args:
        storages: The storages of ``accum`` and ``optim``; empty where these are persistent.
        accum: The accumulation buffer.
        optim: The optimizer's shard, if it has a dtype of its own; None: it is part of ``accum``.
        written: The buffer that full gradients are written into.
        chains: The submissions that reduce the gradients.

    Attributes:
        published: The tensors that become ``.grad`` of the parameters; empty before the first
            :meth:`publish`. Each has its own version counter, which counts only the user's changes.
        local: This rank's slice of each published tensor.
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
        """The buffer that contains the shard at the depth of OPTIM, which the optimizer reads."""
        return self.accum if self.optim is None else self.optim

    def publish(self, params: Sequence[Tensor], depth: int) -> list[Tensor]:
        """Returns ``published``. The first call creates the tensors.

        Args:
            params: The parameters that users see: sharded, or plain where nothing is sharded.
            depth: The depth of the optimizer's shard.
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
        """Returns the indices of published gradients that the user has zeroed and that are still
        ``.grad`` of their parameters. Resets the marks of zeroed gradients.

        Args:
            found: ``.grad`` of each parameter.
        """
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
        """Reset the marks of zeroed gradients, because other values are about to be written."""
        if self._is_plain or _NOT_ZEROED.issuperset(map(_zeroed_at, self.published)):
            return
        for tensor in self.published:
            if isinstance(tensor, FlatDTensor):
                tensor.zeroed = False

    @property
    def are_held(self) -> bool:
        """Whether the user holds a published gradient, a slice or a view of one, or an autograd
        graph that saved one. Valid only while no published gradient is ``.grad`` of a parameter."""
        return self._counts_alone is not None and self._counts() != self._counts_alone

    def _counts(self) -> tuple[list[int], list[int], list[int]]:
        tensors, slices = map(getrefcount, self.published), map(getrefcount, self.local)
        return [each.num_uses for each in self.storages], list(tensors), list(slices)


class GradientMemory:
    """Allocates and frees the memory of one buffer's gradients. See the module docstring.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        last_axes: The axes that are reduced on the last microbatch only, innermost first.
        pending: The pending optimizer step of the buffer, which may read the gradients.
        is_resident: Whether the memory stays allocated while gradients are cleared.

    Attributes:
        is_resident: See the argument.
        tensors: The tensors of the current step, or of the next one; None: not created yet.
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
        # Memory that is allocated before a reduction, and freed when the reduction is done.
        own = [each for each in (self._staging, self._comm) if each is not None]
        self._transient = [*own, *self._working]
        self.tensors: GradientTensors | None = None

    @property
    def has_comm_buffer(self) -> bool:
        """Whether gradients are copied into the communication dtype on the last microbatch."""
        return self._comm is not None

    @property
    def shard(self) -> GradientShard:
        """The gradient shard that contains the gradients for the optimizer."""
        return self._shards[-1]

    @property
    def rest_bytes(self) -> int:
        """Bytes of the accumulation buffer, and of the optimizer's shard if it has a dtype of its
        own."""
        return sum(each.rest_bytes for each in self._shards)

    @property
    def transient_bytes(self) -> int:
        """Bytes that are allocated for reductions: staging and communication buffer, and memory
        that the shards need."""
        return sum(each.num_bytes for each in self._transient)

    def take(self, scale: GradientScale, *, zero: bool = False) -> GradientTensors:
        """Returns the tensors for a step, and allocates their memory unless it is allocated.

        Args:
            scale: The factors of the gradients.
            zero: Zero memory that this call allocates. False: zero only its padding, if gradients
                are not sharded.
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

    def release(self, tensors: GradientTensors, *, check_resident: bool) -> bool:
        """End the step that used ``tensors``. Returns whether the user holds some of them although
        the next step will write them.

        Args:
            check_resident: Also check resident memory. False: if the memory is resident, the method
                does not check whether the user holds tensors, and returns False.
        """
        tensors.forget_zeroed()
        if self.is_resident:
            return check_resident and tensors.are_held
        if tensors.are_held:
            self.abandon()
        elif self._spec.optim_depth > 0:
            self.free()
        return False

    def free(self) -> None:
        """Free the accumulation buffer, once compute has waited for a pending optimizer step that
        reads it. Gradients must be cleared."""
        label = self._spec.label
        for storage in self.tensors.storages if self.tensors is not None else ():
            if storage.filled:
                self._pending.free(f"free gradients of {label}", storage)

    def abandon(self) -> None:
        """Leave the accumulation buffer to the user's references. The next step gets a new one."""
        self._pending.hold(self.tensors)
        for storage in self.tensors.storages if self.tensors is not None else ():
            storage.leave()
        self.tensors = None

    def stage(self) -> WriteBuffer:
        """Allocate the staging buffer, and return it."""
        assert self._staging is not None
        compute, label = self._context.lanes.compute, self._spec.label
        compute.manage(f"allocate staging of {label}", self._staging.fill, self._staging)
        staged = self._over_staging()
        if staged.zeroes_all:
            staged.buffer.tensor.zero_()
        return staged

    def allocate_comm(self) -> bool:
        """Allocate the communication buffer, if there is one. Returns whether there is one."""
        if self._comm is None:
            return False
        compute, label = self._context.lanes.compute, self._spec.label
        compute.manage(f"allocate comm buffer of {label}", self._comm.fill, self._comm)
        return True

    def allocate_working(self) -> bool:
        """Allocate the memory that shards need while reductions run. Returns whether they need
        any."""
        self._allocate(self._working)
        return bool(self._working)

    def free_transient(self) -> None:
        """Free the memory that was allocated for reductions. The compute lane must have waited for
        the operations that use it."""
        compute, label = self._context.lanes.compute, self._spec.label
        for storage in self._transient:
            if storage.filled:
                compute.manage(f"free staging of {label}", storage.free, storage)

    def _allocate(self, storages: Sequence[TransientStorage]) -> None:
        compute, label = self._context.lanes.compute, self._spec.label
        for storage in storages:
            compute.manage(f"allocate gradients of {label}", storage.fill, storage)

    def _over_staging(self) -> WriteBuffer:
        """Returns the staging buffer. The first call creates the views of the buffer, which must
        have memory then."""
        if self._staged is None:
            assert self._staging is not None
            storage, slots = self._staging, self._spec.layout.slots
            flat = self._buffer(0, storage.view(0, (storage.numel,)))
            views = [storage.view(slot.offset, slot.shape) for slot in slots]
            self._staged = WriteBuffer.over(flat, views)
        return self._staged

    def _make(self, scale: GradientScale) -> GradientTensors:
        """Create the tensors, with memory, and the submissions that reduce them."""
        spec, dtypes = self._spec, self._spec.kind.dtypes
        sums_wide = dtypes.reduce != dtypes.comm
        sent = self._staging is not None or self._comm is None or sums_wide
        storages: list[TransientStorage] = []
        accum, reduced = self._accum.allocate(storages, sent=sent)
        optim = reduced_optim = None
        if self.shard is not self._accum:
            optim, reduced_optim = self.shard.allocate(storages, sent=False)
        # Views of a transient storage can only be created while it has memory.
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
            storage.free()
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
                    self._accum.add_load(chain)
                written.reduce(chain, context, 0, spec.grad_depth, each)
                self._accum.add_store(chain)
        if self._last_axes or optim is not None:
            self._accum.add_load(chains.last)
        depths, lane = (spec.grad_depth, spec.optim_depth), context.lanes.inner_reduce
        last = replace(how, over=self._last_axes, into=None)
        if comm is None or dtypes.reduce != dtypes.comm:
            accum.reduce(chains.last, context, *depths, replace(last, comm_buffer=comm))
        else:
            copy(chains.last, lane, spec.label, accum.tensor, comm.tensor, scale.boost)
            comm.reduce(chains.last, context, *depths, last)
            parts = comm.narrow(spec.optim_depth), accum.narrow(spec.optim_depth)
            copy(chains.last, lane, spec.label, *parts, 1.0 / scale.boost)
        if optim is not None:
            reduced = accum.narrow(spec.optim_depth)
            copy(chains.last, lane, spec.label, reduced, optim.tensor, 1.0)
        if chains.last:
            for shard in self._shards:
                shard.add_store(chains.last)
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
    """Returns a tensor over this rank's slice ``local`` that is sharded as ``param`` is."""
    if isinstance(param, FlatDTensor):
        return FlatDTensor.from_flat_local(local, param.flat_placement)
    return TensorParallelSpec.of(param).wrap(local) if isinstance(param, DTensor) else local
