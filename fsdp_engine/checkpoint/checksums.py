"""Computes and verifies the checksums of blocks of files. Every read verifies them.

A file has a checksum for each block of 256 KiB, so that a rank that reads a range verifies only the
blocks of that range and reads at most two partial blocks in addition. The checksums are CRC-32C,
which processors compute in hardware. They are stored in DCP's metadata (``dcp_metadata.py``), 16
bytes per MiB of checkpoint.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 18
_SUM_BYTES = 4
# Maximum number of blocks in the cache. Only partially read blocks are cached, such as those with
# the central directory of a zip archive.
_CACHED_BLOCKS = 4


class DamagedError(ValueError):
    """The content of a checkpoint differs from the content that was written."""


def crc32c(data: Any, crc: int = 0) -> int:
    """Returns the CRC-32C of ``data``, continued from ``crc``."""
    # The import is here because training without checkpoints does not need this compiled library.
    from crc32c import crc32c as library

    return int(library(data, crc))


@dataclass(frozen=True)
class FileSums:
    """The size of a file in bytes, and a little-endian CRC-32C of 4 bytes for each block."""

    num_bytes: int
    sums: bytes
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        num_blocks = -(-self.num_bytes // self.block_bytes)
        if len(self.sums) != num_blocks * _SUM_BYTES:
            raise ValueError(
                f"sums: expected {_SUM_BYTES} bytes for each of {num_blocks} blocks; found "
                f"{len(self.sums)} bytes"
            )

    def of(self, number: int) -> int:
        """Returns the checksum of a block."""
        start = number * _SUM_BYTES
        return int.from_bytes(self.sums[start : start + _SUM_BYTES], "little")

    def length(self, number: int) -> int:
        """Returns the number of bytes of a block. The last block may be shorter."""
        return min(self.block_bytes, self.num_bytes - number * self.block_bytes)


class BlockSummer:
    """Computes the checksums of blocks from consecutive pieces of any size."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._sums = bytearray()
        self._crc = 0  # checksum of the incomplete block

    def add(self, data: memoryview) -> None:
        """Append the next bytes of the file."""
        start = 0
        while start < len(data):
            left = BLOCK_BYTES - self._num_bytes % BLOCK_BYTES
            piece = data[start : start + left]
            self._crc = crc32c(piece, self._crc)
            self._num_bytes += len(piece)
            start += len(piece)
            if len(piece) == left:
                self._sums += self._crc.to_bytes(_SUM_BYTES, "little")
                self._crc = 0

    def whole(self) -> int:
        """Returns one CRC-32C over all checksums so far and over the number of bytes."""
        found = self.result()
        return crc32c(found.sums + found.num_bytes.to_bytes(8, "little"))

    def result(self) -> FileSums:
        """Returns the checksums of all bytes so far."""
        last = self._crc.to_bytes(_SUM_BYTES, "little") if self._num_bytes % BLOCK_BYTES else b""
        return FileSums(self._num_bytes, bytes(self._sums) + last)


class CheckedFile(io.RawIOBase):
    """A file of a checkpoint. Every read verifies the checksums of the blocks.

    Full blocks are read directly into the destination. A few partially read blocks are cached.

    Args:
        file: A file that is open for reading bytes. Closing this object does not close the file.
        name: The name of the file, for errors.
        sums: The checksums of the file.

    Raises:
        DamagedError: A read finds bytes that are missing or differ from those that were written.
    """

    def __init__(self, file: BinaryIO, name: str, sums: FileSums) -> None:
        self._file, self._sums, self._place = file, sums, 0
        self.name = name
        self._cached: OrderedDict[int, bytearray] = OrderedDict()

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        ends = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._sums.num_bytes}
        self._place = ends[whence] + offset
        return self._place

    def tell(self) -> int:
        """Returns the position."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` until it is full or the file ends. Returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        start, block_bytes = self._place, self._sums.block_bytes
        view = view[: max(self._sums.num_bytes - start, 0)]
        done = 0
        while done < len(view):
            number, within = divmod(start + done, block_bytes)
            length = self._sums.length(number)
            if within == 0 and len(view) - done >= length and number not in self._cached:
                self._fill(number, view[done : done + length])
                done += length
            else:
                piece = memoryview(self._block(number))[within:][: len(view) - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
        self._place += done
        return done

    def _block(self, number: int) -> bytearray:
        """Returns a verified block, from the cache if possible."""
        found = self._cached.pop(number, None)
        if found is None:
            found = bytearray(self._sums.length(number))
            self._fill(number, memoryview(found))
        self._cached[number] = found
        if len(self._cached) > _CACHED_BLOCKS:
            self._cached.popitem(last=False)
        return found

    def _fill(self, number: int, out: memoryview) -> None:
        start = number * self._sums.block_bytes
        self._file.seek(start)
        done = 0
        while done < len(out):
            count = self._file.readinto(out[done:])  # type: ignore[attr-defined]
            if not count:
                raise DamagedError(
                    f"{self.name}: expected {self._sums.num_bytes} bytes; found {start + done}"
                )
            done += count
        expected, found = self._sums.of(number), crc32c(out)
        if found != expected:
            raise DamagedError(
                f"{self.name}: expected CRC-32C {expected:08x} of bytes {start} to "
                f"{start + len(out)}; found {found:08x}. The file is damaged"
            )
