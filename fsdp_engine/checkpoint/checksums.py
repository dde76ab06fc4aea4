"""Checksums of blocks: bytes that are read are compared with what was written, whoever reads them.

A file's sums are those of its blocks of 256 KiB, so that a rank that reads a range checks the
blocks that it touches, and reads at most a part of two blocks more. They are CRC-32C, for which
processors have an instruction. They stand in DCP's metadata (``dcp_metadata.py``), 16 bytes for a
MiB of checkpoint.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 18
_SUM_BYTES = 4
# Blocks of which a part was read are kept for the next read: an archive's directory, its end.
_KEPT_BLOCKS = 4


class DamagedError(ValueError):
    """Bytes of a checkpoint are not those that were written."""


def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of what ``crc`` is of and of ``data`` after it."""
    # Only here: training without checkpoints needs no library that has to be compiled.
    from crc32c import crc32c as library

    return int(library(data, crc))


@dataclass(frozen=True)
class FileSums:
    """Size of a file, and a CRC-32C of 4 bytes, the lowest first, for each of its blocks."""

    num_bytes: int
    sums: bytes
    block_bytes: int = BLOCK_BYTES

    def __post_init__(self) -> None:
        num_blocks = -(-self.num_bytes // self.block_bytes)
        if len(self.sums) != num_blocks * _SUM_BYTES:
            raise ValueError(
                f"sums: expected {_SUM_BYTES} bytes for each of {num_blocks} blocks; found "
                f"{len(self.sums)}"
            )

    def of(self, number: int) -> int:
        """The sum of a block."""
        start = number * _SUM_BYTES
        return int.from_bytes(self.sums[start : start + _SUM_BYTES], "little")

    def length(self, number: int) -> int:
        """Bytes of a block: the last one may be shorter."""
        return min(self.block_bytes, self.num_bytes - number * self.block_bytes)


class BlockSummer:
    """Sums blocks as bytes pass by, in pieces of any size."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._sums = bytearray()
        self._crc = 0  # of the block that is not full

    def add(self, data: memoryview) -> None:
        """The next bytes of the file."""
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
        """CRC-32C of the sums so far, and of how many bytes they are of."""
        found = self.result()
        return crc32c(found.sums + found.num_bytes.to_bytes(8, "little"))

    def result(self) -> FileSums:
        """Sums of all bytes so far."""
        last = self._crc.to_bytes(_SUM_BYTES, "little") if self._num_bytes % BLOCK_BYTES else b""
        return FileSums(self._num_bytes, bytes(self._sums) + last)


class CheckedFile(io.RawIOBase):
    """A file of a checkpoint whose bytes are compared with their sums as they are read.

    Whole blocks are read into place; of others, a few are kept.

    Args:
        file: opened for reading bytes; closing this leaves it open.
        name: of the file, for errors.
        sums: of the file.

    Raises:
        DamagedError: in any read: bytes are missing, or not those that were written.
    """

    def __init__(self, file: BinaryIO, name: str, sums: FileSums) -> None:
        self._file, self._sums, self._place = file, sums, 0
        self.name = name
        self._kept: OrderedDict[int, bytearray] = OrderedDict()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as in any file."""
        ends = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._sums.num_bytes}
        self._place = ends[whence] + offset
        return self._place

    def tell(self) -> int:
        """The place."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``, or as much of it as the file has bytes left."""
        view = memoryview(buffer).cast("B")
        start, block_bytes = self._place, self._sums.block_bytes
        view = view[: max(self._sums.num_bytes - start, 0)]
        done = 0
        while done < len(view):
            number, within = divmod(start + done, block_bytes)
            length = self._sums.length(number)
            if within == 0 and len(view) - done >= length and number not in self._kept:
                self._fill(number, view[done : done + length])
                done += length
            else:
                piece = memoryview(self._block(number))[within:][: len(view) - done]
                view[done : done + len(piece)] = piece
                done += len(piece)
        self._place += done
        return done

    def _block(self, number: int) -> bytearray:
        """A block that was checked, kept for the next time."""
        found = self._kept.pop(number, None)
        if found is None:
            found = bytearray(self._sums.length(number))
            self._fill(number, memoryview(found))
        self._kept[number] = found
        if len(self._kept) > _KEPT_BLOCKS:
            self._kept.popitem(last=False)
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
                f"{self.name}: expected bytes {start} to {start + len(out)} as they were written "
                f"(CRC-32C {expected:08x}); found them damaged ({found:08x})"
            )
