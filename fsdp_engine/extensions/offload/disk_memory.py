"""Memory on a local disk: bytes of a file, which threads read and write concurrently with the host.

[Note: Direct writes]
Reads use the page cache, which reads ahead. Writes use ``O_DIRECT`` if the file system supports it.
Then the page cache holds no dirty pages, which ``fdatasync`` would have to write before they can be
dropped, and a failed write raises in its own call. Direct access needs memory addresses and sizes
in multiples of the disk's blocks, which tensors do not have. So pieces pass through an aligned
staging buffer of the writing thread. ``benchmarks/offload.py`` measures the rates of alternatives.

Files have no name, so no other process can read them after a crash of this process or of the
system. Therefore ``fdatasync`` would add no safety.

``DiskBlock.bytes`` maps the same file through the page cache. A direct write first writes back and
then drops the pages that it replaces, so the mapping shows the same bytes if it is not used during
a write. ``Mapping`` calls the C library, since Python's ``mmap`` duplicates the file descriptor for
each block.
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

# Maximum number of bytes of one read or write, and size of a staging buffer. Other threads can run
# between two calls.
PIECE = 16 << 20
# Direct access needs multiples of a disk block, 512 or 4096 bytes. Mappings start at pages.
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
    """A buffer for each writing thread, aligned to pages and not in the memory ledger."""

    @cached_property
    def memory(self) -> mmap.mmap:
        """The buffer."""
        return mmap.mmap(-1, PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @cached_property
    def bytes(self) -> Tensor:
        """The buffer as a tensor."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


_STAGING = _Staging()


class DiskFile:
    """A file in ``folder`` for blocks of bytes. Its space is freed with the last block.

    The file has no name: the operating system frees its space when the process ends, even if it is
    killed, and a later process cannot mistake its contents for state.

    Attributes:
        number: The file descriptor for reads and mappings.
        output: The file descriptor for writes.
        is_direct: Whether writes bypass the page cache. See [Note: Direct writes].

    Raises:
        OSError: The folder cannot be written.
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
        """Allocate space on the disk; returns its offset in the file.

        Raises:
            OSError: There is too little space; names the required and the free bytes.
        """
        start = self._size
        self._take(num_bytes)
        self._size += _in_blocks(num_bytes)
        return start

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate space on the disk for later calls of :meth:`extend` with these sizes.

        Raises:
            OSError: There is too little space; names the required and the free bytes.
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
                f"{shutil.disk_usage(self._folder).free} free",
            ) from error


class Mapping:
    """A range of a file that is mapped into memory, shared with the file through the page cache.

    Args:
        number: The file descriptor.
        start: Offset of the range, a multiple of the page size.
        num_bytes: Number of bytes of the range, which must not be empty.

    Attributes:
        bytes: The memory as a 1-D tensor. It is unmapped when no tensor refers to it.

    Raises:
        OSError: The range cannot be mapped.
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
            OSError: The changes cannot be written.
        """
        if _C.msync(*self._place, _MS_SYNC):
            raise _last_error("msync", self._place[1])

    def forget(self) -> None:
        """Remove the pages from this process's memory. The page cache may keep them."""
        if _C.madvise(*self._place, mmap.MADV_DONTNEED):
            raise _last_error("madvise", self._place[1])


def _last_error(call: str, num_bytes: int) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call} of {num_bytes} bytes of state: {os.strerror(code)}")


class DiskBlock:
    """``num_bytes`` zeroed bytes of ``file``. The memory ledger does not count them.

    Attributes:
        bytes: The bytes as a 1-D tensor, mapped through the page cache.

    Raises:
        OSError: See :meth:`DiskFile.extend`.
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
        """Read bytes at ``start`` into the CPU tensor ``target``, and drop the block's pages from
        the page cache."""
        self.read_part(target, start)
        self.forget()

    def read_part(self, target: Tensor, start: int) -> None:
        """Read bytes at ``start`` into the CPU tensor ``target``. The page cache keeps them until
        :meth:`forget` and reads ahead."""
        view, place = _memory_of(target), 0
        while place < len(view):
            at = self._start + start + place
            count = os.preadv(self._file.number, [view[place : place + PIECE]], at)
            if not count:
                raise OSError(errno.EIO, f"expected {len(view)} bytes of state; found {place}")
            place += count

    def write(self, source: Tensor) -> None:
        """Write all bytes from the CPU tensor ``source`` to the disk."""
        for start in range(0, len(source), PIECE):
            piece = source[start : start + PIECE]
            _STAGING.bytes[: len(piece)].copy_(piece)
            self.write_part(_STAGING.bytes, start, len(piece))
        self.finish_writing()

    def write_part(self, staging: Tensor, start: int, num_bytes: int) -> None:
        """Write ``num_bytes`` at ``start``, a multiple of :data:`PIECE`. Call
        :meth:`finish_writing` after the last part.

        Args:
            staging: The bytes, starting at a page, with space up to a multiple of a disk block.
        """
        count = _in_blocks(num_bytes)
        written = os.pwritev(self._file.output, [_memory_of(staging[:count])], self._start + start)
        if written < count:
            raise OSError(errno.EIO, f"expected to write {count} bytes at {start}; found {written}")

    def finish_writing(self) -> None:
        """If writes are not direct, write the page cache to the disk and drop the block's pages."""
        if not self._file.is_direct:
            os.fdatasync(self._file.number)
            self.forget()

    def flush(self) -> None:
        """Write changes of the mapping to the disk, and drop the block's pages."""
        if self._num_bytes:
            self._mapping.flush()
            self.forget()

    def forget(self) -> None:
        """Drop the pages of this block from the page cache."""
        if self._num_bytes:
            self._mapping.forget()  # Mapped pages would stay in the cache.
            place = self._start, self._num_bytes
            os.posix_fadvise(self._file.number, *place, os.POSIX_FADV_DONTNEED)


def _memory_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a uint8 tensor. ``Tensor.numpy`` would make its storage unresizable."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


def _in_blocks(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to a multiple of a disk block."""
    return -(-num_bytes // _BLOCK) * _BLOCK


def _open_direct(name: str) -> int | None:
    """Returns a descriptor for direct writes; None if the file system does not support them."""
    try:
        return os.open(name, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


@contextmanager
def errors_of_disk() -> Iterator[None]:
    """Context that turns an OSError into a ValueError, which is not reported as an error of
    communication."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"state on disk: {error}") from error


class Pending:
    """A call in a thread, with the interface of works that lanes wait for."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the call is done.

        Raises:
            ValueError: The disk has failed.
        """
        with errors_of_disk():
            self._future.result()


class DiskThreads:
    """One thread for reads and one for writes."""

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
