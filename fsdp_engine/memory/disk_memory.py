"""Memory on a local disk: bytes of a file, read and written by threads beside the host.

[Note: Direct writes]
Reads use the page cache, which reads ahead. Writes use ``O_DIRECT`` where the file system has it:
the page cache holds no dirty pages, which ``fdatasync`` would have to write before they can be
dropped, and a failed write raises in its own call. Direct access needs memory and sizes in
multiples of the disk's blocks, which tensors are not; pieces pass through an aligned staging buffer
of the thread that writes. ``benchmarks/offload.py`` has the rates of the alternatives.

Files have no name, so no other process can read them after a crash of this one or of the system:
``fdatasync`` would not make anything safer.

``DiskBlock.bytes`` maps the same file through the page cache. A direct write first writes back and
then drops the pages that it replaces, so the mapping shows the same bytes, as long as it is not
used during a write.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fsdp_engine.memory import allocator

# Bytes of one call, and of a staging buffer: a thread gives its place to others between calls.
_PIECE = 16 << 20
# Direct access is in multiples of a block of the disk, 512 or 4096 bytes; mappings begin at pages.
_BLOCK = mmap.ALLOCATIONGRANULARITY


class _Staging(threading.local):
    """A buffer of each thread that writes, aligned to pages, not booked."""

    @cached_property
    def memory(self) -> mmap.mmap:
        """The buffer."""
        return mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @cached_property
    def bytes(self) -> Tensor:
        """The same as a tensor."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


_STAGING = _Staging()


class DiskFile:
    """A file in ``folder``, for blocks of bytes. It is gone with the last of them.

    The file has no name: its space is free again as soon as this process ends, also by a kill, and
    nothing of it can be mistaken for state by a later one.

    Attributes:
        number: its descriptor.
        output: the descriptor for writes.
        is_direct: whether they go past the page cache. See [Note: Direct writes].

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._size = 0
        self.number, name = tempfile.mkstemp(prefix="fsdp_engine-state-", dir=folder)
        weakref.finalize(self, os.close, self.number)
        try:
            direct = _open_direct(name)
        finally:
            os.unlink(name)
        self.is_direct = direct is not None
        self.output = self.number if direct is None else direct
        if direct is not None:
            weakref.finalize(self, os.close, direct)

    def extend(self, num_bytes: int) -> int:
        """Take space on the disk, at once. Returns where it begins.

        Raises:
            OSError: there is too little; names both figures.
        """
        start = self._size
        self._take(num_bytes)
        self._size += _in_blocks(num_bytes)
        return start

    def reserve(self, sizes: Iterable[int]) -> None:
        """Take space on the disk for these calls of :meth:`extend`.

        Raises:
            OSError: there is too little; names both figures.
        """
        if total := sum(map(_in_blocks, sizes)):
            self._take(total)

    def _take(self, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self.number, self._size, _in_blocks(num_bytes))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"{self._folder}: expected {num_bytes} bytes for state; found "
                f"{shutil.disk_usage(self._folder).free}",
            ) from error


class DiskBlock:
    """``num_bytes`` of ``file``, zeroed, not booked.

    Attributes:
        bytes: these as a tensor, 1-D, through the page cache.

    Raises:
        OSError: see :meth:`DiskFile.extend`.
    """

    def __init__(self, num_bytes: int, file: DiskFile) -> None:
        self._file = file
        self._num_bytes = num_bytes
        if not num_bytes:
            self.bytes = allocator.empty(0, torch.uint8, "cpu")
            return
        self._start = file.extend(num_bytes)
        self._mapping = mmap.mmap(file.number, num_bytes, offset=self._start)
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def read(self, target: Tensor, start: int = 0) -> None:
        """Read bytes from ``start`` into ``target``, on the CPU. The page cache keeps none."""
        view, place = _memory_of(target), 0
        while place < len(view):
            at = self._start + start + place
            count = os.preadv(self._file.number, [view[place : place + _PIECE]], at)
            if not count:
                raise OSError(errno.EIO, f"expected {len(view)} bytes of state; found {place}")
            place += count
        self._forget()

    def write(self, source: Tensor) -> None:
        """Write all bytes, from ``source``, on the CPU, to the disk."""
        for start in range(0, len(source), _PIECE):
            piece = source[start : start + _PIECE]
            _STAGING.bytes[: len(piece)].copy_(piece)
            num_bytes = _in_blocks(len(piece))
            written = os.pwritev(
                self._file.output,
                [memoryview(_STAGING.memory)[:num_bytes]],
                self._start + start,
            )
            if written < num_bytes:
                raise OSError(
                    errno.EIO, f"expected to write {num_bytes} bytes at {start}; found {written}"
                )
        if not self._file.is_direct:
            os.fdatasync(self._file.number)
            self._forget()

    def flush(self) -> None:
        """Write changes through the mapping to the disk, and keep none of them in memory."""
        if self._num_bytes:
            self._mapping.flush()
            self._forget()

    def _forget(self) -> None:
        if self._num_bytes:
            self._mapping.madvise(mmap.MADV_DONTNEED)  # mapped pages would stay in the cache
            place = self._start, self._num_bytes
            os.posix_fadvise(self._file.number, *place, os.POSIX_FADV_DONTNEED)


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of bytes. (``Tensor.numpy`` would forbid its storage to be resized.)"""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


def _in_blocks(num_bytes: int) -> int:
    """``num_bytes``, rounded up to blocks."""
    return -(-num_bytes // _BLOCK) * _BLOCK


def _open_direct(name: str) -> int | None:
    """A descriptor for direct writes; None where the file system has none."""
    try:
        return os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


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
