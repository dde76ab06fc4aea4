"""Homes: where state lies between its uses, and from where it is copied to the device and back."""

from __future__ import annotations

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
    """Bytes outside of the device's memory, zeroed, not booked.

    Attributes:
        bytes: all of them as a tensor on the CPU, 1-D. It must not be used while they are copied.
    """

    bytes: Tensor

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """The operation of a lane that copies bytes from ``start`` into ``work``, which is 1-D."""
        ...

    def take(self, work: Tensor) -> Steps:
        """The operation of a lane that copies ``work``, as long as the home, to it."""
        ...

    def flush(self) -> None:
        """Keep no changes of :attr:`bytes` in memory that is not the home's own."""
        ...


class HomePart(NamedTuple):
    """A range of a home.

    Attributes:
        home: the whole.
        first: first byte of the range.
        num_bytes: The number of bytes of the range.
    """

    home: Home
    first: int
    num_bytes: int


# Makes a home of so many bytes; the second argument ends the copies from and to it.
MakeHome = Callable[[int, Callable[[], object]], Home]


class HostHome(HostBlock):
    """Host memory, which the device copies."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        super().__init__(num_bytes, pinned=pinned)
        self.bytes.zero_()

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        work.copy_(self.bytes[start : start + work.numel()], non_blocking=True)
        yield from ()

    def take(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        self.bytes[: work.numel()].copy_(work, non_blocking=True)
        yield from ()

    def flush(self) -> None:
        """See :class:`Home`."""


class DiskHome(DiskBlock):
    """Bytes of a file, which threads read and write."""

    def __init__(self, num_bytes: int, file: DiskFile, threads: DiskThreads) -> None:
        super().__init__(num_bytes, file)
        self._threads = threads

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.read(partial(self.read, work, start))]

    def take(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.write(partial(self.write, work))]


class StagedHome(DiskBlock):
    """Bytes of a file, which pass through pinned host memory to an accelerator and back.

    The host reads and writes within the operations: their lane runs them in a thread.
    """

    def __init__(self, num_bytes: int, file: DiskFile, into: Staging, out: Staging) -> None:
        super().__init__(num_bytes, file)
        self._into = into
        self._out = out

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`.

        Raises:
            ValueError: the disk has failed.
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

    def take(self, work: Tensor) -> Steps:
        """See :class:`Home`.

        Raises:
            ValueError: the disk has failed.
        """
        copied: deque[StagingPiece] = deque()
        try:
            with errors_of_disk():
                for first in range(0, len(work), PIECE):
                    part = work[first : first + PIECE]
                    copied.append(self._out.take())
                    copied[-1].bytes[: len(part)].copy_(part, non_blocking=True)
                    self._out.copied(copied[-1])
                    if first:  # the piece before, while the device copies
                        self._write(copied, first - PIECE, PIECE)
                if copied:
                    self._write(copied, first, len(part))
                self.finish_writing()
        finally:
            for piece in copied:
                self._out.put(piece)
        yield from ()

    def _write(self, copied: deque[StagingPiece], start: int, num_bytes: int) -> None:
        """Write the oldest of the pieces that are copied."""
        copied[0].wait()
        self.write_part(copied[0].bytes, start, num_bytes)
        self._out.put(copied.popleft())
