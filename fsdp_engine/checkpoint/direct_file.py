"""A file that is written once, from start to end: past the page cache, with checksums.

A checkpoint is written, synced, and not read again for hours. Through the page cache that costs
memory that somebody else could use, and time: pages have to be found, cleared and copied to before
the disk sees anything. So blocks go straight to the disk (``O_DIRECT``): while one is on its way,
the next is filled. Where a file system cannot do that, the same blocks are written as usual.

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
# What direct writes have to be multiples of: no disk asks for more.
_ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """See the module docstring.

    Args:
        path: made anew, or emptied.

    Attributes:
        num_bytes: written so far.
        crc: CRC-32 of them.
        sums: CRC-32C of their blocks, so far.

    Raises:
        OSError: opening failed; or, in any later call, writing did.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.num_bytes = 0
        self.crc = 0
        self.sums = BlockSummer()
        self._path = path
        self._descriptor = _open(path)
        # Memory maps begin at a page, as direct writes want it.
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)]
        self._filled = 0  # bytes in the first block
        self._num_handed_over = 0  # bytes of full blocks before it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint file")
        self._under_way: Future[None] | None = None
        self._error: OSError | None = None

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Take all of ``data``; what is full goes to the disk."""
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
                self._hand_over(BLOCK_BYTES)
                self._num_handed_over += BLOCK_BYTES
                self._filled = 0
        return len(view)

    def tell(self) -> int:
        """Bytes written so far."""
        return self.num_bytes

    def fileno(self) -> int:
        """The descriptor, to be synced: with everything written to it."""
        if self._filled:
            # The last block is filled up, and the file cut to its length. More may follow.
            padded = -(-self._filled // _ALIGNMENT) * _ALIGNMENT
            kept = self._blocks[0][: self._filled]
            self._hand_over(padded)
            self._blocks[0][: self._filled] = kept
        self._wait()
        os.ftruncate(self._descriptor, self.num_bytes)
        return self._descriptor

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self.closed:
            return
        try:
            self.fileno()
        finally:
            super().close()
            self._thread.shutdown()
            os.close(self._descriptor)

    def _hand_over(self, num_bytes: int) -> None:
        """Let the thread write the first block; the other one becomes the first."""
        self._wait()
        block, place = self._blocks[0], self._num_handed_over
        self._blocks.reverse()
        self._under_way = self._thread.submit(self._write_block, block, num_bytes, place)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        try:
            if under_way is not None:
                under_way.result()
        except OSError as error:
            self._error = error
        if self._error is not None:
            raise self._error  # again and again: the file has a hole

    def _write_block(self, block: mmap.mmap, num_bytes: int, place: int) -> None:
        written = 0
        with memoryview(block) as view:
            while written < num_bytes:
                try:
                    written += os.pwrite(self._descriptor, view[written:num_bytes], place + written)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._stop_direct_writes():
                        # Of a descriptor the system does not say which file it is.
                        raise OSError(error.errno, error.strerror, str(self._path)) from error
                if written % _ALIGNMENT:
                    self._stop_direct_writes()  # the rest begins anywhere

    def _stop_direct_writes(self) -> bool:
        """Write through the page cache from here on; whether that is something new."""
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
