"""This rank's shards of main weights and gradients: their memory, and how it is read and written.

These classes are a seam (see ``docs/design.md``). They store shards in memory of the device. A
subclass of :class:`Placement` creates shards in other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.buffers.sharded_buffer import BufferContext, Gather, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.lanes import Chain, Lane
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.memory.allocator import TransientStorage


class MainShard:
    """This rank's shard of the main weights, and the operations with which gathers read it.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        codec: The codec of the buffer.
        tensor: The memory of the shard, 1-D; None: it is allocated.

    Attributes:
        buffer: The shard, at the depth of OPTIM. Edits in place increase the version counter of its
            tensor. Gathers into the same memory do not.
        memory: Storages that need memory while the operations of :meth:`source` run.
        is_resident: Whether the shard is in memory of the device, so that gathers can send it
            without a copy.
        before_change: A function that is called before users change the shard; None: not needed.
    """

    memory: Sequence[TransientStorage] = ()
    is_resident = True
    before_change: Callable[[], object] | None = None

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        tensor: Tensor | None = None,
    ) -> None:
        self._spec = spec
        self._codec = codec
        self._memory = context.memory
        self._own: Tensor | None = None
        at = context.mesh_communicators.mesh.coordinate
        if tensor is None:
            start, stop = spec.layout.range(spec.optim_depth, at)
            dtype, sent = spec.kind.dtypes.main, codec.is_identity
            tensor = context.memory.persistent(stop - start, dtype, self._role, sent=sent)
            self._own = tensor
        self.buffer = ShardedBuffer(spec.layout, at, spec.optim_depth, tensor)

    @property
    def _role(self) -> str:
        """The role in the ledger. "model": the main weights are also the compute weights."""
        return "model" if self._codec.is_identity else "main"

    @property
    def persistent(self) -> list[Tensor]:
        """The tensors in memory of the device that this object holds."""
        return [] if self._own is None else [self._own]

    def prepare(self) -> Chain:
        """Returns the operations that must run after a change of the main weights and before a
        gather."""
        return Chain()

    def source(self) -> Gather:
        """Returns the description of a gather that sends the main weights, encoded by the codec."""
        spec, codec, main = self._spec, self._codec, self.buffer.tensor
        if codec.is_identity:
            return Gather(spec.label, spec.tag, main)
        encode = partial(codec.encode, main)
        return Gather(spec.label, spec.tag, encode, reads=[main], writes=[*codec.state])

    def changed_on_host(self) -> None:
        """Called after the engine has written the shard outside of an optimizer step."""

    def unregister(self) -> None:
        """Subtract the memory from the ledger. The memory is freed with this object."""
        if self._own is not None:
            self._memory.unregister(self._own, self._role)


class GradientShard:
    """This rank's shard of accumulated gradients, and the memory that reductions write.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        depth, dtype: The depth and dtype of the shard.

    Attributes:
        is_resident: Whether the shard keeps its memory while gradients are cleared.
        memory: Storages that need memory while reductions run.
    """

    is_resident = False
    memory: Sequence[TransientStorage] = ()

    def __init__(
        self, spec: BufferSpec, context: BufferContext, depth: int, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._context = context
        self._depth = depth
        self._dtype = dtype
        self._at = context.mesh_communicators.mesh.coordinate
        start, stop = spec.layout.range(depth, self._at)
        self._numel = stop - start

    @property
    def rest_bytes(self) -> int:
        """Bytes of the device's memory that the shard takes."""
        return self._numel * self._dtype.itemsize

    def allocate(
        self, storages: list[TransientStorage], *, sent: bool
    ) -> tuple[ShardedBuffer, ShardedBuffer]:
        """Allocate the shard. Returns the buffer for users and the buffer that reductions write.

        Args:
            storages: A list. The method appends the storages that can be freed while gradients are
                cleared.
            sent: Collectives send or receive from the memory.
        """
        memory, numel = self._context.memory, self._numel
        if memory.is_fixed:
            flat = memory.persistent(numel, self._dtype, "grad", sent=sent)
        else:
            storage = memory.lasting(numel, self._dtype, "grad")
            storages.append(storage)
            label = f"allocate gradients of {self._spec.label}"
            self._context.lanes.compute.manage(label, storage.fill, storage)
            flat = storage.view(0, (numel,))
        buffer = ShardedBuffer(self._spec.layout, self._at, self._depth, flat)
        return buffer, buffer

    def add_load(self, chain: Chain) -> None:
        """Add operations to ``chain`` that must precede reductions that add to the shard."""

    def add_store(self, chain: Chain) -> None:
        """Add operations to ``chain`` that must follow reductions into the shard."""


class Placement:
    """Creates the shards of main weights and gradients of an engine's buffers."""

    def make_main(self, spec: BufferSpec, context: BufferContext, codec: ParamCodec) -> MainShard:
        """Returns the shard of main weights that are not a view of the compute weights."""
        return MainShard(spec, context, codec)

    def device_of_main(self, device: torch.device) -> torch.device:
        """Returns the device of main weights for a model that computes on ``device``."""
        return device

    def make_gradients(
        self, spec: BufferSpec, context: BufferContext, depth: int, dtype: torch.dtype
    ) -> GradientShard:
        """Returns a shard for a buffer's accumulated gradients, or for the gradients that the
        optimizer reads."""
        return GradientShard(spec, context, depth, dtype)

    def make_pending_step(self, compute: Lane) -> PendingStep:
        """Returns the object for the pending optimizer steps of a buffer. ``compute`` is the
        compute lane of the engine."""
        return PendingStep(compute)

    def start(self, engine: Any) -> None:
        """Called once for each :class:`~.engine.Engine` with such shards, when it is built."""

    def rebuilt(self, engine: Any, unit: Any) -> None:
        """Called when the shards of a :class:`~.runtime.unit.Unit` of ``engine`` were replaced."""
