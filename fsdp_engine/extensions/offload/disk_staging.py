"""Pinned host memory between files and an accelerator.

A device copies to and from host memory, a thread reads and writes files there: one piece passes
while the next is copied. Pieces begin at pages, so that direct writes need no further copy
([Note: Direct writes] in ``disk_memory.py``).
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fsdp_engine import backend
from fsdp_engine.extensions.offload.disk_memory import PIECE
from fsdp_engine.memory.host_memory import HostBlock

_NUM_PIECES = 2
# Of both directions, with room to begin at a page.
NUM_BYTES = 2 * (_NUM_PIECES * PIECE + mmap.PAGESIZE)
# Returns a function that waits until the device has done what the current stream was given.
Mark = Callable[[], Callable[[], None]]


class StagingPiece:
    """Memory of ``PIECE`` bytes that is in use.

    Attributes:
        bytes: the memory, 1-D.
        wait: until the device has copied it, after :meth:`.Staging.copied`.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.wait: Callable[[], None] = lambda: None


class Staging:
    """Two pieces, of copies in one direction. Threads that share it hold one each; a thread that
    holds both has to be the only one.

    Args:
        mark: see :data:`Mark`.
        pinned: whether the device copies by itself.

    Attributes:
        bytes: all of the memory, 1-D.
    """

    def __init__(self, mark: Mark, *, pinned: bool) -> None:
        self._mark = mark
        self._block = HostBlock(NUM_BYTES // 2, pinned=pinned)
        self.bytes = self._block.bytes
        self._free: queue.SimpleQueue[StagingPiece] = queue.SimpleQueue()
        if not backend.current().has_values:
            return
        first = -self.bytes.data_ptr() % mmap.PAGESIZE
        for start in range(first, first + _NUM_PIECES * PIECE, PIECE):
            self._free.put(StagingPiece(self.bytes[start : start + PIECE]))

    def take(self) -> StagingPiece:
        """A piece that nothing uses; the thread waits for one."""
        piece = self._free.get()
        try:
            piece.wait()
        except BaseException:
            self.put(piece)
            raise
        return piece

    def copied(self, piece: StagingPiece) -> None:
        """The current stream was given the last copy of a piece."""
        piece.wait = self._mark()

    def put(self, piece: StagingPiece) -> None:
        """The piece may be taken when its last copy is done."""
        self._free.put(piece)

    @contextmanager
    def piece(self) -> Iterator[Tensor]:
        """A piece that nothing uses, for copies of the current stream within."""
        piece = self.take()
        try:
            yield piece.bytes
        finally:
            try:
                self.copied(piece)
            finally:
                self.put(piece)
