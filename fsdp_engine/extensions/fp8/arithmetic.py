"""Amaxes, rounding and widening of encodings with scales, in functions of torch.

``fused_kernels.py`` computes the same in one kernel for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdp_engine.codecs.base import Piece
from fsdp_engine.memory import allocator

BLOCK = 128
GRANULARITIES = ("tensor", "row", "block")
# Number of elements that are converted to fp32 at a time: 64 MiB, whatever the matrix size.
CHUNK = 1 << 24
E4M3_LARGEST = 448.0


def to_e4m3(scaled: Tensor) -> Tensor:
    """Round fp32 numbers between -448 and 448 to e4m3."""
    return scaled.to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Grid:
    """A parameter as a matrix with ``shape[0]`` rows, and its scales among those of the buffer.

    Attributes:
        rows, columns: The shape of the matrix.
        scale_rows, scale_columns: The shape of its scales.
        first: The index of its first scale.
    """

    rows: int
    columns: int
    scale_rows: int
    scale_columns: int
    first: int

    @property
    def stop(self) -> int:
        """The index after its last scale."""
        return self.first + self.scale_rows * self.scale_columns

    def of(self, scales: Tensor) -> Tensor:
        """Returns the scales of this parameter, of shape (scale_rows, scale_columns)."""
        return scales[self.first : self.stop].view(self.scale_rows, self.scale_columns)


def grids_of(params: Sequence[Tensor], granularity: str) -> list[Grid]:
    """Returns the grids of parameters whose scales follow each other in one tensor."""
    grids: list[Grid] = []
    for param in params:
        rows, columns = param.shape[0], math.prod(param.shape[1:])
        shape = (1, 1)
        if granularity == "row":
            shape = (rows, 1)
        elif granularity == "block":
            shape = (-(-rows // BLOCK), -(-columns // BLOCK))
        grids.append(Grid(rows, columns, *shape, grids[-1].stop if grids else 0))
    return grids


@dataclass(frozen=True)
class Encoding:
    """The properties of an encoding that its arithmetic needs.

    Attributes:
        granularity: One of ``GRANULARITIES``.
        largest: The largest number of the encoding.
        dtype: The dtype of encoded elements.
        round: Rounds fp32 numbers between ``-largest`` and ``largest`` to ``dtype``.
    """

    granularity: str
    largest: float
    dtype: torch.dtype
    round: Callable[[Tensor], Tensor]


class Arithmetic(Protocol):
    """The work on elements of one buffer. Tensors are 1-D where no shape is mentioned."""

    def note_amaxes(self, main: Tensor, amaxes: Tensor) -> None:
        """Raise ``amaxes`` to the largest magnitudes in the shard of main weights.

        Args:
            main: This rank's shard of the main weights.
            amaxes: fp32, one for each scale, not negative. NaN counts as larger than all numbers;
                its sign is undefined.
        """
        ...

    def encode(self, main: Tensor, scales: Tensor, wire: Tensor) -> None:
        """Divide the shard of main weights by their scales, and round it into ``wire``."""
        ...

    def decode(
        self, wire: Tensor, scales: Tensor, offsets: Sequence[int], params: Sequence[Tensor]
    ) -> None:
        """Multiply elements of the full wire by their scales.

        Args:
            wire: The full wire.
            scales: The scales.
            offsets: The index in ``wire`` at which each parameter starts.
            params: The parameters, of their own shapes, which receive the products.
        """
        ...


class TorchArithmetic:
    """Implements :class:`Arithmetic` by functions of torch, on any device, for any encoding.

    Args:
        encoding: The encoding.
        grids: The parameters of the buffer.
        pieces: The pieces of this rank's shard.
    """

    def __init__(self, encoding: Encoding, grids: Sequence[Grid], pieces: Sequence[Piece]) -> None:
        self._encoding = encoding
        self._grids = grids
        self._pieces = [part for piece in pieces for part in _parts(piece, grids[piece.index])]

    def note_amaxes(self, main: Tensor, amaxes: Tensor) -> None:
        """See :class:`Arithmetic`."""
        for piece in self._pieces:
            self._note_amax(piece, main, amaxes)

    def encode(self, main: Tensor, scales: Tensor, wire: Tensor) -> None:
        """See :class:`Arithmetic`."""
        largest = self._encoding.largest
        for piece in self._pieces:
            grid = self._grids[piece.index]
            matrix, skipped = _matrix(piece, grid, main)
            first_row = piece.start // grid.columns
            scaled = matrix / self._spread(scales, grid, first_row, first_row + matrix.shape[0])
            encoded = self._encoding.round(scaled.clamp_(-largest, largest))
            count = piece.stop - piece.start
            part = encoded.view(wire.dtype).view(-1)[skipped : skipped + count]
            wire[piece.offset : piece.offset + count].copy_(part)

    def decode(
        self, wire: Tensor, scales: Tensor, offsets: Sequence[int], params: Sequence[Tensor]
    ) -> None:
        """See :class:`Arithmetic`."""
        for grid, offset, param in zip(self._grids, offsets, params, strict=True):
            if not param.numel():
                continue
            encoded = wire[offset : offset + param.numel()].view(self._encoding.dtype)
            source, target = (t.view(grid.rows, grid.columns) for t in (encoded, param))
            step = _rows_at_once(grid)
            for first in range(0, grid.rows, step):
                stop = min(first + step, grid.rows)
                values = source[first:stop].to(torch.float32)
                target[first:stop].copy_(values.mul_(self._spread(scales, grid, first, stop)))

    def _note_amax(self, piece: Piece, main: Tensor, amaxes: Tensor) -> None:
        grid = self._grids[piece.index]
        matrix, _ = _matrix(piece, grid, main)
        size = matrix.abs()
        target = grid.of(amaxes)
        first = piece.start // grid.columns
        if self._encoding.granularity == "tensor":
            torch.maximum(target, size.amax(), out=target)
        elif self._encoding.granularity == "row":
            rows = target[first : first + size.shape[0], 0]
            torch.maximum(rows, size.amax(1), out=rows)
        else:
            padded = F.pad(size, (0, grid.scale_columns * BLOCK - grid.columns))
            by_row = padded.view(size.shape[0], grid.scale_columns, BLOCK).amax(2)
            blocks = torch.arange(first, first + size.shape[0], device=size.device) // BLOCK
            target.scatter_reduce_(0, blocks.unsqueeze(1).expand_as(by_row), by_row, "amax")

    def _spread(self, all_scales: Tensor, grid: Grid, first: int, stop: int) -> Tensor:
        """Returns the scales of rows ``first`` to ``stop``, broadcastable over their elements."""
        scales = grid.of(all_scales)
        if self._encoding.granularity == "tensor":
            return scales
        if self._encoding.granularity == "row":
            return scales[first:stop]
        rows = scales[torch.arange(first, stop, device=scales.device) // BLOCK]
        return rows.repeat_interleave(BLOCK, 1)[:, : grid.columns]


def _matrix(piece: Piece, grid: Grid, main: Tensor) -> tuple[Tensor, int]:
    """Returns the rows that ``piece`` overlaps, in fp32 with zeros for elements of other ranks, and
    the number of such elements before the piece in the first row."""
    count = piece.stop - piece.start
    part = main[piece.offset : piece.offset + count]
    skipped = piece.start % grid.columns
    num_rows = -(-(skipped + count) // grid.columns)
    if num_rows * grid.columns == count:
        return part.view(num_rows, grid.columns).to(torch.float32), 0
    rows = allocator.zeros(num_rows * grid.columns, torch.float32, main.device)
    rows[skipped : skipped + count].copy_(part)
    return rows.view(num_rows, grid.columns), skipped


def _rows_at_once(grid: Grid) -> int:
    return max(CHUNK // max(grid.columns, 1), 1)


def _parts(piece: Piece, grid: Grid) -> Iterator[Piece]:
    """Split ``piece`` into pieces of at most as many rows as are converted at a time."""
    start = piece.start
    while start < piece.stop:
        end = (start // grid.columns + _rows_at_once(grid)) * grid.columns
        stop = min(end, piece.stop)
        yield Piece(piece.index, start, stop, piece.offset + start - piece.start)
        start = stop
