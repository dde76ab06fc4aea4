"""This rank's shards of a buffer: where they are between uses, and how they are read and written.

A seam: here they are in memory of the device. :class:`Placement` makes the others.
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
    """The main weights, and how gathers read them.

    Args:
        spec, context: The spec and context of the buffer.
        codec: the codec of the buffer.
        tensor: memory of the shard, 1-D; None: it is allocated.

    Attributes:
        buffer: the shard, at the depth of OPTIM. Its tensor has a version counter of its own, so
            that edits in place are distinguished from gathers into the same memory.
        memory: storages that need memory while the operations of :meth:`source` run.
        is_resident: the shard is in memory of the device, so that gathers send it at once.
        before_change: called before users change the shard; None: nothing has to be done.
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
        """The role in the ledger: main weights in the compute dtype are compute weights, too."""
        return "model" if self._codec.is_identity else "main"

    @property
    def persistent(self) -> list[Tensor]:
        """Memory of the device that this object holds."""
        return [] if self._own is None else [self._own]

    def prepare(self) -> Chain:
        """Returns the operations that follow each change of the main weights, before gathers."""
        return Chain()

    def source(self) -> Gather:
        """Returns a gather of the main weights, encoded by the codec."""
        spec, codec, main = self._spec, self._codec, self.buffer.tensor
        if codec.is_identity:
            return Gather(spec.label, spec.tag, main)
        encode = partial(codec.encode, main)
        return Gather(spec.label, spec.tag, encode, reads=[main], writes=[*codec.state])

    def changed_on_host(self) -> None:
        """The host has written the shard."""

    def give_back(self) -> None:
        """Remove the memory from the ledger; it is freed with this object."""
        if self._own is not None:
            self._memory.give_back(self._own, self._role)


class GradientShard:
    """Accumulated gradients, and where reductions write them.

    Args:
        spec, context: The spec and context of the buffer.
        depth, dtype: The depth and dtype of the shard.

    Attributes:
        is_resident: the shard has memory also while gradients are cleared.
        memory: storages that need memory while reductions run.
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
        """Returns the shard for users, with memory, and the buffer that reductions write.

        Args:
            storages: storages that can be freed while gradients are cleared are added to them.
            sent: collectives use the memory.
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

    def add_bring(self, chain: Chain) -> None:
        """Add to ``chain`` the operations before reductions that add to the shard."""

    def add_take(self, chain: Chain) -> None:
        """Add to ``chain`` the operations that follow reductions into the shard."""


class Placement:
    """Makes the shards of buffers."""

    def make_main(self, spec: BufferSpec, context: BufferContext, codec: ParamCodec) -> MainShard:
        """Returns the main weights of a buffer, which are no part of compute weights."""
        return MainShard(spec, context, codec)

    def device_of_main(self, device: torch.device) -> torch.device:
        """Returns the device of main weights of a model that computes on ``device``."""
        return device

    def make_gradients(
        self, spec: BufferSpec, context: BufferContext, depth: int, dtype: torch.dtype
    ) -> GradientShard:
        """Returns the accumulated gradients of a buffer, or those that its optimizer reads."""
        return GradientShard(spec, context, depth, dtype)

    def make_pending_step(self, compute: Lane) -> PendingStep:
        """Returns the pending step of a buffer. ``compute``: the engine's lane."""
        return PendingStep(compute)

    def start(self, engine: Any) -> None:
        """Take part in an :class:`~.engine.Engine`, which has buffers with such shards and has just
        been built."""

    def rebuilt(self, engine: Any, unit: Any) -> None:
        """The shards of a :class:`~.runtime.unit.Unit` of ``engine`` were made anew."""
