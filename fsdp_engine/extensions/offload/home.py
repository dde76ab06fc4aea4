"""Homes: memory outside of the device that stores state between its uses."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fsdp_engine.extensions.offload.disk_memory import (
    PIECE,
    DiskBlock,
    DiskFile,
    DiskThreads,
    errors_of_disk,
)
from fsdp_engine.extensions.offload.disk_staging import Staging, StagingPiece
from fsdp_engine.memory.host_memory import HostBlock

Steps = Iterator[Sequence[Any]]


class Home(Protocol):
    """Zeroed bytes outside of the device's memory.

    Attributes:
        bytes: All bytes as a 1-D CPU tensor. It must not be used while a copy is in flight.
    """

    bytes: Tensor

    def load(self, work: Tensor, start: int = 0) -> Steps:
        """Returns the operation of a lane that copies bytes at ``start`` into the 1-D ``work``."""
        ...

    def store(self, work: Tensor) -> Steps:
        """Returns the operation of a lane that copies all bytes of the home from ``work``."""
        ...

    def flush(self) -> None:
        """Write changes of :attr:`bytes` to the home, and free memory that caches them."""
        ...


class HomePart(NamedTuple):
    """A range of a home.

    Attributes:
        home: The home.
        first: Offset of the first byte of the range.
        num_bytes: Number of bytes of the range.
    """

    home: Home
    first: int
    num_bytes: int


class HostHome(HostBlock):
    """A home in host memory, which the device copies from and to."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        super().__init__(num_bytes, pinned=pinned)
        self.bytes.zero_()

    def load(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        work.copy_(self.bytes[start : start + work.numel()], non_blocking=True)
        yield from ()

    def store(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        self.bytes[: work.numel()].copy_(work, non_blocking=True)
        yield from ()

    def flush(self) -> None:
        """See :class:`Home`."""


class DiskHome(DiskBlock):
    """A home in a file, which threads read and write."""

    def __init__(self, num_bytes: int, file: DiskFile, threads: DiskThreads) -> None:
        super().__init__(num_bytes, file)
        self._threads = threads

    def load(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.read(partial(self.read, work, start))]

    def store(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.write(partial(self.write, work))]


class StagedHome(DiskBlock):
    """A home in a file, whose bytes pass through pinned host memory to an accelerator and back.

    The host reads and writes files within the operations, so their lane runs them in a thread.
    """

    def __init__(self, num_bytes: int, file: DiskFile, into: Staging, out: Staging) -> None:
        super().__init__(num_bytes, file)
        self._into = into
        self._out = out

    def load(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`.

        Raises:
            ValueError: The disk has failed.
        """
        with errors_of_disk():
            for first in range(0, len(work), PIECE):
                part = work[first : first + PIECE]
                with self._into.piece() as piece:
                    staged = piece[: len(part)]
                    self.read_part(staged, start + first)
                    part.copy_(staged, non_blocking=True)
            self.forget()
        yield from ()

    def store(self, work: Tensor) -> Steps:
        """See :class:`Home`.

        Raises:
            ValueError: The disk has failed.
        """
        copied: deque[StagingPiece] = deque()
        try:
            with errors_of_disk():
                for first in range(0, len(work), PIECE):
                    part = work[first : first + PIECE]
                    copied.append(self._out.take())
                    copied[-1].bytes[: len(part)].copy_(part, non_blocking=True)
                    self._out.copied(copied[-1])
                    if first:  # Write the previous piece while the device copies this one.
                        self._write(copied, first - PIECE, PIECE)
                if copied:
                    self._write(copied, first, len(part))
                self.finish_writing()
        finally:
            for piece in copied:
                self._out.put(piece)
        yield from ()

    def _write(self, copied: deque[StagingPiece], start: int, num_bytes: int) -> None:
        """Write the oldest of the copied pieces to the file."""
        copied[0].wait()
        self.write_part(copied[0].bytes, start, num_bytes)
        self._out.put(copied.popleft())


class Homes:
    """Factory of homes.

    Args:
        book: Function that enters a home in the memory ledger.
        make: Function that returns a home of the given number of bytes.
    """

    def __init__(self, book: Callable[[Home], None], make: Callable[[int], Home]) -> None:
        self._book = book
        self._make = make

    def make(self, num_bytes: int, drain: Callable[[], object]) -> Home:
        """Returns a home of ``num_bytes``.

        Args:
            drain: Waits for all copies from and to the home. It is called when a home in host
                memory is deleted, since the device may still be copying its bytes. Operations on a
                file keep their home alive.

        Raises:
            OSError: There is too little space on the disk; names the required and the free bytes.
        """
        home = self._make(num_bytes)
        if isinstance(home, HostHome):
            weakref.finalize(home, drain).atexit = False
        self._book(home)
        return home
