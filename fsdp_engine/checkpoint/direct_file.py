"""Writes a file sequentially with direct I/O, and computes its checksums.

A checkpoint is written, synced, and not read again for hours. The page cache would cost memory, and
time to allocate, clear and copy pages before the disk starts to write. Therefore blocks are written
directly (``O_DIRECT``), and the next block is filled while the previous one is written. On file
systems without direct I/O the same blocks are written through the page cache.

    measured: 2 processes, 512 MiB each into new files    1.7 s buffered and synced, 0.4 s directly
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fsdp_engine.checkpoint.checksums import BlockSummer

BLOCK_BYTES = 8 << 20
# Alignment of direct writes, which satisfies the requirements of all disks.
_ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """A file that is written with direct I/O; see the module docstring.

    Args:
        path: The path of the file, which is created or truncated.

    Attributes:
        num_bytes: Number of bytes written so far.
        crc: The CRC-32 of these bytes.
        sums: The CRC-32C of their blocks.

    Raises:
        OSError: The file cannot be opened. After a failed write, every method that writes raises
            the error of that write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.num_bytes = 0
        self.crc = 0
        self.sums = BlockSummer()
        self._path = path
        self._descriptor = _open(path)
        # Memory maps are page-aligned, as direct writes require.
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)]
        self._filled = 0  # number of bytes in the first block
        self._num_submitted = 0  # number of bytes of submitted full blocks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint file")
        self._pending: Future[None] | None = None
        self._error: OSError | None = None

    def writable(self) -> bool:
        """Returns True."""
        return True

    def write(self, data: Any) -> int:
        """Append ``data``, and submit full blocks to the writing thread. Returns the number of
        bytes of ``data``."""
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        self.sums.add(view)
        self.num_bytes += len(view)
        start = 0
        while start < len(view):
            count = min(len(view) - start, BLOCK_BYTES - self._filled)
            self._blocks[0][self._filled : self._filled + count] = view[start : start + count]
            self._filled += count
            start += count
            if self._filled == BLOCK_BYTES:
                self._submit(BLOCK_BYTES)
                self._num_submitted += BLOCK_BYTES
                self._filled = 0
        return len(view)

    def tell(self) -> int:
        """Returns the number of bytes written so far."""
        return self.num_bytes

    def fileno(self) -> int:
        """Write all data, and return the descriptor of the file, so that the caller can sync it."""
        if self._filled:
            # The last block is padded, and the file is then truncated. The data of the block is
            # kept, because more data may follow.
            padded = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
            kept = self._blocks[0][: self._filled]
            self._submit(padded)
            self._blocks[0][: self._filled] = kept
        self._wait()
        os.ftruncate(self._descriptor, self.num_bytes)
        return self._descriptor

    def close(self) -> None:
        """Write the remaining data, and close the file."""
        if self.closed:
            return
        try:
            self.fileno()
        finally:
            super().close()
            self._thread.shutdown()
            os.close(self._descriptor)

    def _submit(self, num_bytes: int) -> None:
        """Submit the first block to the writing thread, and swap the blocks."""
        self._wait()
        block, place = self._blocks[0], self._num_submitted
        self._blocks.reverse()
        self._pending = self._thread.submit(self._write_block, block, num_bytes, place)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except OSError as error:
            self._error = error
        if self._error is not None:
            raise self._error  # every later call raises, because the file has a hole

    def _write_block(self, block: mmap.mmap, num_bytes: int, place: int) -> None:
        written = 0
        with memoryview(block) as view:
            while written < num_bytes:
                try:
                    written += os.pwrite(self._descriptor, view[written:num_bytes], place + written)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._stop_direct_writes():
                        # Errors of a descriptor do not contain the path.
                        raise OSError(error.errno, error.strerror, str(self._path)) from error
                if written % _ALIGNMENT:
                    self._stop_direct_writes()  # the rest is not aligned

    def _stop_direct_writes(self) -> bool:
        """Switch to writes through the page cache. Returns whether direct I/O was enabled."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        if not _DIRECT or not flags & _DIRECT:
            return False
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return True


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)
