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
used during a write. ``Mapping`` calls the C library, since Python's ``mmap`` duplicates the file's
descriptor for each block.
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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fsdp_engine.memory import allocator

# Bytes of one call, and of a staging buffer: a thread gives its place to others between calls.
PIECE = 16 << 20
# Direct access is in multiples of a block of the disk, 512 or 4096 bytes; mappings begin at pages.
_BLOCK = mmap.ALLOCATIONGRANULARITY

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_C.msync.argtypes = _C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MS_SYNC = 4


class _Staging(threading.local):
    """A buffer of each thread that writes, aligned to pages, not booked."""

    @cached_property
    def memory(self) -> mmap.mmap:
        """The buffer."""
        return mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

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
        try:
            self.number, name = tempfile.mkstemp(prefix="fsdp_engine-state-", dir=folder)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                error.errno,
                f"offload.folder: expected a folder for state, {folder}; found that it does not "
                "exist. Create it",
            ) from error
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


class Mapping:
    """A range of a file in this process's memory, shared with the file, through the page cache.

    Args:
        number: descriptor of the file.
        start: The start of the range, a multiple of a page.
        num_bytes: The number of bytes of the range, which is not empty.

    Attributes:
        bytes: the memory as a tensor, 1-D. It is unmapped with the last tensor over it.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, number: int, start: int, num_bytes: int) -> None:
        self._place = self._map(number, start, num_bytes), num_bytes
        memory = (ctypes.c_ubyte * num_bytes).from_address(self._place[0])
        weakref.finalize(memory, _C.munmap, *self._place).atexit = False
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @staticmethod
    def _map(number: int, start: int, num_bytes: int) -> int:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address: int = _C.mmap(None, num_bytes, access, mmap.MAP_SHARED, number, start)
        if address == _MAP_FAILED:
            raise _last_error("mmap", num_bytes)
        return address

    def flush(self) -> None:
        """Write changes to the disk.

        Raises:
            OSError: they cannot be written.
        """
        if _C.msync(*self._place, _MS_SYNC):
            raise _last_error("msync", self._place[1])

    def forget(self) -> None:
        """Take pages out of this process's memory; the page cache may keep them."""
        if _C.madvise(*self._place, mmap.MADV_DONTNEED):
            raise _last_error("madvise", self._place[1])


def _last_error(call: str, num_bytes: int) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call} of {num_bytes} bytes of state: {os.strerror(code)}")


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
        self._mapping = Mapping(file.number, self._start, num_bytes)
        self.bytes = self._mapping.bytes

    def read(self, target: Tensor, start: int = 0) -> None:
        """Read bytes from ``start`` into ``target``, on the CPU. The page cache keeps none."""
        self.read_part(target, start)
        self.forget()

    def read_part(self, target: Tensor, start: int) -> None:
        """Read bytes from ``start`` into ``target``, on the CPU. The page cache keeps them until
        :meth:`forget`, and reads ahead."""
        view, place = _memory_of(target), 0
        while place < len(view):
            at = self._start + start + place
            count = os.preadv(self._file.number, [view[place : place + PIECE]], at)
            if not count:
                raise OSError(errno.EIO, f"expected {len(view)} bytes of state; found {place}")
            place += count

    def write(self, source: Tensor) -> None:
        """Write all bytes, from ``source``, on the CPU, to the disk."""
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            _STAGING.bytes[: len(piece)].copy_(piece)
            self.write_part(_STAGING.bytes, start, len(piece))
        self.finish_writing()

    def write_part(self, staging: Tensor, start: int, num_bytes: int) -> None:
        """Write ``num_bytes`` to ``start``, a multiple of :data:`PIECE`, followed by
        :meth:`finish_writing`.

        Args:
            staging: has them, of whole blocks of the disk, and begins at a page.
        """
        count = _in_blocks(num_bytes)
        written = os.pwritev(self._file.output, [_memory_of(staging[:count])], self._start + start)
        if written < count:
            raise OSError(errno.EIO, f"expected to write {count} bytes at {start}; found {written}")

    def finish_writing(self) -> None:
        """Write to the disk where writes are not direct, and keep nothing in memory."""
        if not self._file.is_direct:
            os.fdatasync(self._file.number)
            self.forget()

    def flush(self) -> None:
        """Write changes through the mapping to the disk, and keep none of them in memory."""
        if self._num_bytes:
            self._mapping.flush()
            self.forget()

    def forget(self) -> None:
        """Drop the pages that the page cache has of this."""
        if self._num_bytes:
            self._mapping.forget()  # mapped pages would stay in the cache
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


@contextmanager
def errors_of_disk() -> Iterator[None]:
    """Within it an error of the disk is raised as a ValueError: it is not one of communication."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"state on disk: {error}") from error


class Pending:
    """A call in a thread, as lanes wait for it."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Until it is done.

        Raises:
            ValueError: the disk has failed.
        """
        with errors_of_disk():
            self._future.result()


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
