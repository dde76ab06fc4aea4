"""Gradients that are stored at homes.

Reductions write into transient memory, which is then copied to the home. Before a reduction that
accumulates, the accumulated gradients are copied from the home. Published gradients are tensors
over the home, whose memory is persistent, so the next step overwrites gradients that the user
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fsdp_engine.buffers.placement import GradientShard
from fsdp_engine.buffers.sharded_buffer import BufferContext, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.lanes import Chain, Lane
from fsdp_engine.extensions.offload.home import HomePart, Homes
from fsdp_engine.memory.allocator import TransientStorage, alias


def homed_shards(spec: BufferSpec) -> list[tuple[int, torch.dtype]]:
    """Returns depths and dtypes of the gradient shards that are stored at homes: the accumulated
    gradients and, if its dtype differs, the shard that the optimizer reads."""
    dtypes = spec.kind.dtypes
    shards = [(spec.grad_depth, dtypes.main_grad)]
    if dtypes.optim_grad != dtypes.main_grad:
        shards.append((spec.optim_depth, dtypes.optim_grad))
    return shards


class HomedShard(GradientShard):
    """A shard of gradients at a home. See the module docstring.

    Args:
        spec, context, depth, dtype: See :class:`GradientShard`.
        homes: The factory of homes.
        lanes: The lanes for copies to the device and from it.
    """

    is_resident = True
    rest_bytes = 0

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        depth: int,
        dtype: torch.dtype,
        homes: Homes,
        lanes: Sequence[Lane],
    ) -> None:
        super().__init__(spec, context, depth, dtype)
        self._into, self._out = lanes
        at, numel = self._at, self._numel
        self.home = homes.make(numel * dtype.itemsize, self._out.drain)
        self._buffer = ShardedBuffer(spec.layout, at, depth, alias(self.home.bytes.view(dtype)))
        storage: TransientStorage = context.memory.transient(numel, dtype, "staging")
        self.memory = (storage,)
        with storage.while_filled():
            self._work = ShardedBuffer(spec.layout, at, depth, storage.view(0, (numel,)))
            self._bytes = self._work.tensor.view(torch.uint8)

    def part_at(self, depth: int) -> HomePart:
        """Returns the range of the home that holds the part at ``depth``."""
        part = self._buffer.narrow(depth)
        return HomePart(self.home, int(part.storage_offset()) * part.itemsize, part.nbytes)

    def allocate(
        self, storages: list[TransientStorage], *, sent: bool
    ) -> tuple[ShardedBuffer, ShardedBuffer]:
        """See :class:`GradientShard`."""
        return self._buffer, self._work

    def add_load(self, chain: Chain) -> None:
        """See :class:`GradientShard`."""
        load, reads = partial(self.home.load, self._bytes), [self._buffer.tensor]
        label = f"bring {self._spec.label}"
        chain.add(self._into, label, load, reads=reads, writes=[self._bytes])

    def add_store(self, chain: Chain) -> None:
        """See :class:`GradientShard`."""
        store, writes = partial(self.home.store, self._bytes), [self._buffer.tensor]
        label = f"return {self._spec.label}"
        chain.add(self._out, label, store, reads=[self._bytes], writes=writes)
