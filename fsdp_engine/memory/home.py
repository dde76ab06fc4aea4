"""Homes: where state lies between its uses, and from where it is copied to the device and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fsdp_engine.memory.disk_memory import DiskBlock, DiskThreads
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
        """The operation of a lane that copies ``work`` to the first bytes."""
        ...


class HostHome(HostBlock):
    """Pinned host memory, which the device copies."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes, pinned=True)
        self.bytes.zero_()

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        work.copy_(self.bytes[start : start + work.numel()], non_blocking=True)
        yield from ()

    def take(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        self.bytes[: work.numel()].copy_(work, non_blocking=True)
        yield from ()


class DiskHome(DiskBlock):
    """A file, which threads read and write."""

    def __init__(self, num_bytes: int, folder: Path, threads: DiskThreads) -> None:
        super().__init__(num_bytes, folder)
        self._threads = threads

    def bring(self, work: Tensor, start: int = 0) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.read(partial(self.read, work, start))]

    def take(self, work: Tensor) -> Steps:
        """See :class:`Home`."""
        yield [self._threads.write(partial(self.write, work))]


class Homes:
    """Makes homes in one place.

    Args:
        folder: of a local disk; None: the host's memory.
        threads: that read and write the disk.
    """

    def __init__(self, folder: Path | None = None, threads: DiskThreads | None = None) -> None:
        self._folder = folder
        self._threads = threads

    def make(self, num_bytes: int) -> Home:
        """A home of ``num_bytes``.

        Raises:
            OSError: there is too little space on the disk; names both figures.
        """
        if self._folder is None or self._threads is None:
            return HostHome(num_bytes)
        return DiskHome(num_bytes, self._folder, self._threads)
