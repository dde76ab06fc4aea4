"""This rank's shard of accumulated gradients, and where reductions write it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_engine.buffers.redistribute import BufferContext, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.memory.allocator import TransientStorage


class GradientShard:
    """A seam. Here the shard is in memory of the device, and reductions write it there.

    Args:
        spec, context: those of the buffer.
        depth, dtype: those of the shard.

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
