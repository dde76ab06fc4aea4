"""A pool of reusable host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fsdp_engine.accelerator import current_accelerator
from fsdp_engine.memory.host_memory import HostBlock

# Block sizes are multiples of 1/8 of the largest power of two below them.
_SIZE_BITS = 3


class HostPool:
    """A pool of :class:`HostBlock` objects, pinned if there is an accelerator. Blocks in use and
    idle blocks together have at most as many bytes as were in use at the peak.

    Args:
        drain: Waits for all copies from and to blocks. It must not refer to the pool, which would
            then never be garbage-collected.
        book: Called with each new block.

    Attributes:
        bytes_in_use: Bytes of the blocks that are in use.
    """

    def __init__(self, drain: Callable[[], None], book: Callable[[HostBlock], None]) -> None:
        self._drain = drain
        self._book = book
        self._pinned = current_accelerator() is not None
        self._idle: dict[int, list[tuple[HostBlock, Any]]] = {}
        self.bytes_in_use = self._most_in_use = 0
        # Wait for copies that are pending when the pool, and with it its memory, is
        # garbage-collected.
        weakref.finalize(self, drain).atexit = False

    def take(self, num_bytes: int) -> tuple[HostBlock, Any]:
        """Returns a block of at least ``num_bytes``, and the last copy that was passed to
        :meth:`put` with it."""
        step = 1 << max(num_bytes.bit_length() - 1 - _SIZE_BITS, 0)
        size = -(-num_bytes // step) * step
        in_use = self.bytes_in_use + size
        most_in_use = max(self._most_in_use, in_use)
        last_copy = None
        if self._idle.get(size):
            block, last_copy = self._idle[size].pop()
        else:
            while (idle := self.idle_bytes) and in_use + idle > most_in_use:
                self._drain()
                largest = max(each for each, blocks in self._idle.items() if blocks)
                self._idle[largest].pop()
            block = HostBlock(size, pinned=self._pinned)
            self._book(block)
        # Update the numbers last, since the allocation of a block may fail.
        self.bytes_in_use, self._most_in_use = in_use, most_in_use
        return block, last_copy

    @property
    def idle_bytes(self) -> int:
        """Bytes of idle blocks."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def put(self, block: HostBlock, last_copy: Any) -> None:
        """Return a block to the pool. It may be written again after ``last_copy``."""
        size = block.bytes.nbytes
        self.bytes_in_use -= size
        self._idle.setdefault(size, []).append((block, last_copy))
