"""The memory of one buffer's gradients, tensors over it, and the submissions that reduce them.

[Note: When gradients are held]
The accumulation buffer has memory from the unit's first reduction after gradients were cleared
(from the first gradient written, where gradients are not sharded) until all of them are cleared by
``zero_grad()`` or ``.grad = None``. In between the allocator can use it for something else.

Tensors over that memory, the published gradients and the submissions that reduce them are made once
(:class:`GradientTensors`), and serve each step in turn as long as the user holds none of them:
making them in each step costs more host time than all the rest of a unit's gradients (decision 27
of ``docs/internals/decisions.md``). If the user holds a published gradient, a slice or a view of
one when gradients are cleared, that step keeps its tensors, Python's references keep the memory,
and the next step gets new ones.

Reductions write the accumulation buffer where :class:`.GradientShard` says.

The memory stays allocated where nothing is sharded, since ``main_grad`` is a persistent buffer in
Megatron-Core; where ``main_grad`` was given out; and in a :class:`~.allocator.Memory` that is
steady.
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
        overwriting: Reductions of a microbatch whose sums are the first; empty where gradients are
            full.
        adding: Reductions of every other microbatch.
        last: Reductions of the last microbatch; empty where every axis shards gradients.
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
        storages: The storages of ``accum`` and ``optim``; none where these are persistent.
        accum: the accumulation buffer.
        optim: the optimizer's shard in its own dtype; None: it is part of ``accum``.
        written: The buffer that full gradients are written into.
        chains: The submissions that reduce them.

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
            params: The users' parameters: sharded, or plain where nothing is sharded.
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
        spec: The layout, the dtypes and the depths of the buffer.
        context: Its communicators, lanes and memory.
        last_axes: reduced on the last microbatch only, innermost first.
        pending: a step that may read the gradients.
        is_resident: the memory stays allocated while gradients are cleared.

    Attributes:
        is_resident: see the argument.
        tensors: The tensors that the current step uses, or that the next one will use.
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
            scale: The factors of the gradients.
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
                written.reduce(chain, context, 0, spec.grad_depth, each)
                self._accum.add_take(chain)
        if self._last_axes or optim is not None:
            self._accum.add_bring(chains.last)
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
