"""Host memory that is used again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fsdp_engine.accelerator import current_accelerator
from fsdp_engine.memory.host_memory import HostBlock

# Sizes in a pool are multiples of an eighth of the power of two below them.
_SIZE_BITS = 3


class HostPool:
    """A pool of :class:`HostBlock` objects, pinned where there is an accelerator. Blocks in use and
    idle ones take together no more than the most that were in use at a time.

    Args:
        drain: ends all copies from and to blocks. It must not hold the pool.
        book: called with each new block.

    Attributes:
        bytes_in_use: The bytes of blocks that were taken.
    """

    def __init__(self, drain: Callable[[], None], book: Callable[[HostBlock], None]) -> None:
        self._drain = drain
        self._book = book
        self._pinned = current_accelerator() is not None
        self._idle: dict[int, list[tuple[HostBlock, Any]]] = {}
        self.bytes_in_use = self._most_in_use = 0
        # A device may still copy when the last block is garbage.
        weakref.finalize(self, drain).atexit = False

    def take(self, num_bytes: int) -> tuple[HostBlock, Any]:
        """A block of at least ``num_bytes``, and the last copy that :meth:`put` was given."""
        step = 1 << max(num_bytes.bit_length() - 1 - _SIZE_BITS, 0)
        size = -(-num_bytes // step) * step
        self.bytes_in_use += size
        self._most_in_use = max(self._most_in_use, self.bytes_in_use)
        if self._idle.get(size):
            return self._idle[size].pop()
        while (idle := self.idle_bytes) and self.bytes_in_use + idle > self._most_in_use:
            self._drain()
            largest = max(each for each, blocks in self._idle.items() if blocks)
            self._idle[largest].pop()
        block = HostBlock(size, pinned=self._pinned)
        self._book(block)
        return block, None

    @property
    def idle_bytes(self) -> int:
        """Bytes of blocks that may be taken."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def put(self, block: HostBlock, last_copy: Any) -> None:
        """The block may be written again after ``last_copy``."""
        size = block.bytes.nbytes
        self.bytes_in_use -= size
        self._idle.setdefault(size, []).append((block, last_copy))
