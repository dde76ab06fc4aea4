"""Memory on a local disk: bytes of a file, read and written by threads beside the host."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fsdp_engine.memory import allocator

# Of one call: a thread gives its place to others between calls.
_PIECE = 16 << 20


class DiskBlock:
    """``num_bytes`` of a file in ``folder``, zeroed, not booked.

    The file has no name: its space is free again as soon as this process ends, also by a kill, and
    nothing of it can be mistaken for state by a later one. All of its space is taken at once.

    Attributes:
        bytes: the file as a tensor of bytes, 1-D, through the page cache.

    Raises:
        OSError: the folder cannot be written, or has too little space; names both figures.
    """

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self._file, name = tempfile.mkstemp(prefix="fsdp_engine-state-", dir=folder)
        os.unlink(name)
        weakref.finalize(self, os.close, self._file)
        if not num_bytes:
            self.bytes = allocator.empty(0, torch.uint8, "cpu")
            return
        try:
            os.posix_fallocate(self._file, 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{folder}: expected {num_bytes} bytes for state; found "
                f"{shutil.disk_usage(folder).free}",
            ) from error
        self.bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)

    def read(self, target: Tensor) -> None:
        """Read all bytes into ``target``, on the CPU. The page cache keeps none of them."""
        view, place = _memory_of(target), 0
        while place < len(view):
            count = os.preadv(self._file, [view[place : place + _PIECE]], place)
            if not count:
                raise OSError(errno.EIO, f"expected {len(view)} bytes of state; found {place}")
            place += count
        self._forget()

    def write(self, source: Tensor) -> None:
        """Write all bytes from ``source``, on the CPU, to the disk."""
        view, place = _memory_of(source), 0
        while place < len(view):
            place += os.pwritev(self._file, [view[place : place + _PIECE]], place)
        os.fdatasync(self._file)
        self._forget()

    def _forget(self) -> None:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of bytes. (``Tensor.numpy`` would forbid its storage to be resized.)"""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


class Pending:
    """A call in a thread, as lanes wait for it."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Until it is done.

        Raises:
            ValueError: it has failed; an error of the disk is not one of communication.
        """
        try:
            self._future.result()
        except OSError as error:
            raise ValueError(f"state on disk: {error}") from error


class DiskThreads:
    """A thread that reads and one that writes."""

    def __init__(self) -> None:
        self._reads, self._writes = (
            ThreadPoolExecutor(1, thread_name_prefix=f"state {what}") for what in ("read", "write")
        )

    def read(self, action: Callable[[], None]) -> Pending:
        """Call ``action`` after earlier reads."""
        return Pending(self._reads.submit(action))

    def write(self, action: Callable[[], None]) -> Pending:
        """Call ``action`` after earlier writes."""
        return Pending(self._writes.submit(action))
