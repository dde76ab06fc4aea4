"""Triton kernels for e4m3: one each for amaxes, rounding and widening.

Functions of torch read and write a buffer once for each operation, and issue tens of kernels for a
unit. Here a kernel reads each element once, and one launch serves all parameters of a buffer. The
results are equal to those of ``TorchArithmetic`` bit by bit.

[Note: Tiles]
A program of a kernel works on one *tile*: ``ROWS`` x ``COLUMNS`` elements of a parameter, seen as a
matrix. A table on the device, made at construction, has one line of ``_FIELDS`` integers for each
piece, with the number of tiles before it. A program finds its piece by counting the lines that
begin at or before its own number. A piece may begin and end within a row: elements of other ranks
are masked. Wide and narrow matrices have tiles of different shapes, and a launch each. If the
numbers of columns, the bounds and the offsets in a table are all multiples of 16, the kernel
declares this, and the compiler accesses 16 bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdp_engine.codecs.base import Piece
from fsdp_engine.extensions.fp8.arithmetic import BLOCK, GRANULARITIES, Encoding, Grid

# Elements of a tile, and its largest number of columns.
_ELEMENTS, _MOST_COLUMNS = 8192, 2048
_ALIGNMENT = 16
_NUM_WARPS = 8
# Integers in a line of the table.
_FIELDS = tl.constexpr(9)
_BLOCK = tl.constexpr(BLOCK)
_TENSOR, _ROW = (tl.constexpr(GRANULARITIES.index(name)) for name in ("tensor", "row"))


@dataclass(frozen=True)
class _Launch:
    """The tiles of one shape: see [Note: Tiles]."""

    table: Tensor
    num_pieces: int
    num_tiles: int
    rows: int
    columns: int
    alignment: int

    def run(self, kernel: Any, granularity: int, *tensors: Any, **constants: Any) -> None:
        """Launch ``kernel`` on the current stream."""
        kernel[(self.num_tiles,)](
            *tensors,
            self.table,
            self.num_pieces,
            LINES=triton.next_power_of_2(self.num_pieces),
            ROWS=self.rows,
            COLUMNS=self.columns,
            ALIGNMENT=self.alignment,
            GRANULARITY=granularity,
            num_warps=_NUM_WARPS,
            **constants,
        )


class FusedArithmetic:
    """Encodes and decodes e4m3 by Triton kernels, on a CUDA device.

    Args:
        encoding: The encoding, e4m3.
        grids: The parameters of the buffer.
        pieces: The pieces of this rank's shard.
        device: The device.
    """

    def __init__(
        self,
        encoding: Encoding,
        grids: Sequence[Grid],
        pieces: Sequence[Piece],
        device: torch.device,
    ) -> None:
        self._granularity = GRANULARITIES.index(encoding.granularity)
        self._largest = encoding.largest
        self._grids = grids
        self._device = device
        self._shard = self._launches(pieces)
        self._whole: list[_Launch] = []
        self._offsets: Sequence[int] | None = None

    def note_amaxes(self, main: Tensor, amaxes: Tensor) -> None:
        """See :class:`Arithmetic`."""
        for launch in self._shard:
            launch.run(_note_amaxes, self._granularity, main, amaxes.view(torch.int32))

    def encode(self, main: Tensor, scales: Tensor, wire: Tensor) -> None:
        """See :class:`Arithmetic`."""
        for launch in self._shard:
            launch.run(_encode, self._granularity, main, scales, wire, LARGEST=self._largest)

    def decode(
        self, wire: Tensor, scales: Tensor, offsets: Sequence[int], params: Sequence[Tensor]
    ) -> None:
        """See :class:`Arithmetic`. All ``params`` must be in one storage, at the same distances as
        in ``offsets``."""
        if self._offsets != offsets:
            self._offsets = list(offsets)
            self._whole = self._launches(
                [
                    Piece(index, 0, grid.rows * grid.columns, offset)
                    for index, (grid, offset) in enumerate(zip(self._grids, offsets, strict=True))
                ]
            )
        index = next((i for i, param in enumerate(params) if param.numel()), None)
        if index is None:
            return
        for launch in self._whole:
            launch.run(_decode, self._granularity, wire, scales, params[index], offsets[index])

    def _launches(self, pieces: Sequence[Piece]) -> list[_Launch]:
        """Returns the launches that cover ``pieces``."""
        by_columns: dict[int, list[Piece]] = {}
        for piece in pieces:
            if piece.start < piece.stop:
                columns = triton.next_power_of_2(self._grids[piece.index].columns)
                columns = min(max(columns, BLOCK), _MOST_COLUMNS)
                if GRANULARITIES[self._granularity] == "block":
                    columns = BLOCK
                by_columns.setdefault(columns, []).append(piece)
        return [self._launch(each, columns) for columns, each in by_columns.items()]

    def _launch(self, pieces: Sequence[Piece], columns: int) -> _Launch:
        rows = min(_ELEMENTS // columns, BLOCK)
        lines: list[list[int]] = []
        num_tiles = 0
        for piece in pieces:
            grid = self._grids[piece.index]
            # Tiles begin at multiples of their number of rows, so that each is in one block.
            first_row = piece.start // grid.columns // rows * rows
            last_row = (piece.stop - 1) // grid.columns
            across = -(-grid.columns // columns)
            lines.append(
                [
                    num_tiles,
                    across,
                    first_row,
                    grid.columns,
                    piece.start,
                    piece.stop,
                    piece.offset - piece.start,
                    grid.first,
                    grid.scale_columns,
                ]
            )
            num_tiles += ((last_row - first_row) // rows + 1) * across
        is_aligned = all(number % _ALIGNMENT == 0 for line in lines for number in line[3:7])
        table = torch.tensor(lines, dtype=torch.int64, device=self._device)
        return _Launch(table, len(lines), num_tiles, rows, columns, _ALIGNMENT if is_aligned else 1)


@triton.jit
def _tile(
    table,
    num_pieces,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    GRANULARITY: tl.constexpr,
):
    """Returns the places of this program's elements in the buffer, which of them are in the piece,
    the place of the scale for each row, and which of the rows have elements in the piece."""
    tile = tl.program_id(0)
    lines = tl.arange(0, LINES)
    begins = tl.load(table + lines * _FIELDS, mask=lines < num_pieces, other=2147483647)
    line = table + (tl.sum((begins <= tile).to(tl.int32), 0) - 1) * _FIELDS
    number = tile - tl.load(line)
    across = tl.load(line + 1)
    columns = tl.multiple_of(tl.load(line + 3), ALIGNMENT)
    start = tl.multiple_of(tl.load(line + 4), ALIGNMENT)
    stop = tl.multiple_of(tl.load(line + 5), ALIGNMENT)
    first_row = tl.load(line + 2) + number // across * ROWS
    first_column = number % across * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    element = row[:, None] * columns + column[None, :]
    inside = (column < columns)[None, :] & (element >= start) & (element < stop)
    place = tl.multiple_of(tl.load(line + 6), ALIGNMENT) + element
    first_scale = tl.load(line + 7)
    if GRANULARITY == _ROW:
        scale = first_scale + row
    elif GRANULARITY == _TENSOR:
        scale = first_scale + row * 0
    else:
        block = first_row // _BLOCK * tl.load(line + 8) + first_column // _BLOCK
        scale = first_scale + block + row * 0
    has_scale = (row * columns < stop) & ((row + 1) * columns > start)
    return place, inside, scale, has_scale


@triton.jit
def _note_amaxes(
    main,
    amaxes,
    table,
    num_pieces,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    GRANULARITY: tl.constexpr,
):
    """Raise ``amaxes``, the bits of floats, to those of the tile. NaN has the largest bits."""
    place, inside, scale, has_scale = _tile(
        table, num_pieces, LINES, ROWS, COLUMNS, ALIGNMENT, GRANULARITY
    )
    values = tl.load(main + place, mask=inside, other=0.0).to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    of_rows = tl.max(bits, 1)
    if GRANULARITY == _ROW:
        tl.atomic_max(amaxes + scale, of_rows, mask=has_scale)
    else:
        tl.atomic_max(amaxes + tl.min(scale, 0), tl.max(of_rows, 0))


@triton.jit
def _encode(
    main,
    scales,
    wire,
    table,
    num_pieces,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    GRANULARITY: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write ``main / scales``, rounded to e4m3, into ``wire``."""
    place, inside, scale, has_scale = _tile(
        table, num_pieces, LINES, ROWS, COLUMNS, ALIGNMENT, GRANULARITY
    )
    values = tl.load(main + place, mask=inside, other=0.0).to(tl.float32)
    divisors = tl.load(scales + scale, mask=has_scale, other=1.0)[:, None]
    # Triton's own division of fp32 is not rounded correctly.
    scaled = tl.div_rn(values, tl.broadcast_to(divisors, values.shape))
    above = tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    limited = tl.minimum(above, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    encoded = limited.to(tl.float8e4nv)
    tl.store(wire + place, encoded.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def _decode(
    wire,
    scales,
    target,
    first,
    table,
    num_pieces,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    GRANULARITY: tl.constexpr,
):
    """Write ``wire * scales`` into ``target``, a pointer to the element at ``first``."""
    place, inside, scale, has_scale = _tile(
        table, num_pieces, LINES, ROWS, COLUMNS, ALIGNMENT, GRANULARITY
    )
    encoded = tl.load(wire + place, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
    factors = tl.load(scales + scale, mask=has_scale, other=1.0)[:, None]
    values = encoded.to(tl.float32) * factors
    tl.store(target + (place - first), values.to(target.dtype.element_ty), mask=inside)
