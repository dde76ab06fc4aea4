"""Pinned host memory for copies between files and an accelerator.

The device copies from and to the host memory, and a thread reads and writes files there: while the
device copies one piece, the thread works on the next. Pieces start at pages, so direct writes need
no further copy ([Note: Direct writes] in ``disk_memory.py``).
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
# Bytes for both directions, with space to align the pieces of each to pages.
NUM_BYTES = 2 * (_NUM_PIECES * PIECE + mmap.PAGESIZE)
# Returns a function that waits until the device has finished the current stream's work so far.
Mark = Callable[[], Callable[[], None]]


class StagingPiece:
    """Memory of ``PIECE`` bytes.

    Attributes:
        bytes: The memory, 1-D.
        wait: Waits until the device has finished the copy marked by :meth:`.Staging.copied`.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.wait: Callable[[], None] = lambda: None


class Staging:
    """Two pieces for copies in one direction. Several threads may share them if each holds at most
    one piece; a thread that holds both pieces must be the only one.

    Args:
        mark: See :data:`Mark`.
        pinned: Whether the memory is pinned, so that the device copies asynchronously.

    Attributes:
        bytes: All of the memory, 1-D.
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
        """Wait for a free piece and return it."""
        piece = self._free.get()
        try:
            piece.wait()
        except BaseException:
            self.put(piece)
            raise
        return piece

    def copied(self, piece: StagingPiece) -> None:
        """Mark the last copy of ``piece``, which the current stream contains, for its ``wait``."""
        piece.wait = self._mark()

    def put(self, piece: StagingPiece) -> None:
        """Return a piece. :meth:`take` waits for its marked copy before it returns it again."""
        self._free.put(piece)

    @contextmanager
    def piece(self) -> Iterator[Tensor]:
        """Context with a free piece, for copies on the current stream."""
        piece = self.take()
        try:
            yield piece.bytes
        finally:
            try:
                self.copied(piece)
            finally:
                self.put(piece)
