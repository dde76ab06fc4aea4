"""Homes: where state lies between its uses, and from where it is copied to the device and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fsdp_engine.memory.disk_memory import DiskBlock, DiskFile, DiskThreads
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
        num_bytes: of the range.
    """

    home: Home
    first: int
    num_bytes: int


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


class Homes:
    """Makes homes in the host's memory.

    Args:
        book: called with each.
        pinned: whether the device copies by itself.
    """

    def __init__(self, book: Callable[[Home], None], *, pinned: bool = True) -> None:
        self._book = book
        self._pinned = pinned

    def make(self, num_bytes: int) -> Home:
        """Returns a home of ``num_bytes``.

        Raises:
            OSError: there is too little space on the disk; names both figures.
        """
        home = self._make(num_bytes)
        self._book(home)
        return home

    def _make(self, num_bytes: int) -> Home:
        return HostHome(num_bytes, pinned=self._pinned)


class DiskHomes(Homes):
    """Makes homes in one file.

    Args:
        book: called with each.
        file: which.
        threads: that read and write it.
    """

    def __init__(self, book: Callable[[Home], None], file: DiskFile, threads: DiskThreads) -> None:
        super().__init__(book)
        self._file = file
        self._threads = threads

    def _make(self, num_bytes: int) -> Home:
        return DiskHome(num_bytes, self._file, self._threads)
