"""Parameters travel as fp8 (e4m3) bytes, for any module on any device.

    main --amax, reduced over the ranks--> scales        main / scale --round--> bytes --gather-->
    bytes * scale --> full parameters in the compute dtype

A *scale* serves a tensor, a row, or a block of 128 x 128 elements, of the parameter seen as a
matrix (``shape[0]`` rows). ``scale = amax / 448``, 448 being the largest e4m3 number (Micikevicius
et al., "FP8 formats for deep learning", 2022), or the next power of two. Scales lie beside the flat
buffer, whole on every rank: the amaxes of a buffer are one message, so slices may be cut anywhere,
and every rank finds the scales, and so the bytes, of an uncut parameter.

Worked example, granularity "row", a row (0.5, -7.0, 3.5): its amax 7 makes the scale 7 / 448 =
1 / 64, and 32, -448, 224 travel, all of which e4m3 holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdp_engine.codecs.base import ParamCodec, Piece
from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import Steps, max_steps
from fsdp_engine.patterns import compile_pattern
from fsdp_engine.precision import ParamDtypes

E4M3_MAX = 448.0
BLOCK = 128
GRANULARITIES = ("tensor", "row", "block")
# Elements that are widened to fp32 at a time: 64 MiB, whatever the size of a matrix.
CHUNK = 1 << 24
# The smallest scale: below it fp32 loses bits. What is smaller than 448 times this becomes zero.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Float8:
    """Which parameters travel as fp8, and how; one of ``codec_rules``.

    Floating-point parameters of two dims and more do. Norms, biases and other vectors travel in
    the compute dtype.

    Args:
        granularity: "tensor", "row" or "block" (128 x 128): what shares a scale.
        power_of_two_scales: scales are powers of two, by which nothing but the rounding to e4m3
            itself rounds.
        exclude: patterns of names that travel in the compute dtype all the same.

    Raises:
        ValueError: there is no such granularity.
        TypeError: ``exclude`` holds something else than strings.
    """

    granularity: str = "row"
    power_of_two_scales: bool = False
    exclude: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity: expected one of {', '.join(GRANULARITIES)}; "
                f"found {self.granularity!r}"
            )
        if isinstance(self.exclude, str) or not all(isinstance(p, str) for p in self.exclude):
            raise TypeError(f"exclude: expected a tuple of name patterns; found {self.exclude!r}")

    def __call__(
        self, name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        """The codec of a parameter, if this rule is for it."""
        if param.ndim < 2 or not param.is_floating_point():
            return None
        if any(compile_pattern(pattern).fullmatch(name) for pattern in self.exclude):
            return None
        key = f"float8 {self.granularity}{' power of two' if self.power_of_two_scales else ''}"
        return key, lambda: Float8Codec(self)


@dataclass(frozen=True)
class _Grid:
    """A parameter as a matrix, and where its scales lie among those of the buffer."""

    rows: int
    columns: int
    scale_rows: int
    scale_columns: int
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.scale_rows * self.scale_columns

    def of(self, scales: Tensor) -> Tensor:
        """This parameter's scales, (scale_rows, scale_columns)."""
        return scales[self.first : self.stop].view(self.scale_rows, self.scale_columns)


class Float8Codec(ParamCodec):
    """See the module docstring. One object serves one buffer."""

    wire_dtype = torch.uint8
    decodes = True
    encodes_once = True

    def __init__(self, options: Float8) -> None:
        self._options = options
        self._grids: list[_Grid] = []
        self._pieces: Sequence[Piece] = ()
        self._groups: Sequence[Any] = ()

    def converted(self, dtypes: ParamDtypes) -> Float8Codec:
        """See :class:`ParamCodec`."""
        return Float8Codec(self._options)

    @property
    def state(self) -> Sequence[Tensor]:
        """See :class:`ParamCodec`."""
        return (self._scales,)

    @property
    def scales(self) -> Tensor:
        """All scales of the buffer, fp32, 1-D, the same on every rank."""
        return self._scales

    def prepare(
        self,
        params: Sequence[Tensor],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """See :class:`ParamCodec`."""
        first = 0
        for param in params:
            rows, columns = param.shape[0], math.prod(param.shape[1:])
            scale_rows, scale_columns = self._scale_shape(rows, columns)
            self._grids.append(_Grid(rows, columns, scale_rows, scale_columns, first))
            first = self._grids[-1].stop
        self._pieces = [
            part for piece in pieces for part in _parts(piece, self._grids[piece.index])
        ]
        self._groups = groups
        self._scales = memory.zeros(first, torch.float32, device)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`; one message of amaxes for each axis that cuts the weights."""
        (wire,) = wires
        amax = self._scales
        amax.zero_()
        for piece in self._pieces:
            self._note_amax(piece, main, amax)
        # The maximum of floats loses NaN, over gloo as over NCCL; that of their bits does not: bits
        # of non-negative numbers are ordered like the numbers, those of NaN are the largest. A
        # kernel may set the sign bit of a NaN.
        bits = amax.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        for group in self._groups:
            yield from max_steps(bits, group)
        amax.div_(E4M3_MAX)
        if self._options.power_of_two_scales:
            torch.exp2(torch.ceil(torch.log2(amax)), out=amax)
        # A parameter of zeros has a scale, too; NaN stays NaN.
        amax.clamp_(min=_LEAST_SCALE)
        for piece in self._pieces:
            grid = self._grids[piece.index]
            matrix, skipped = self._matrix(piece, grid, main)
            first_row = piece.start // grid.columns
            scaled = matrix / self._spread(grid, first_row, first_row + matrix.shape[0])
            fp8 = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
            count = piece.stop - piece.start
            part = fp8.view(torch.uint8).view(-1)[skipped : skipped + count]
            wire[piece.offset : piece.offset + count].copy_(part)

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """See :class:`ParamCodec`."""
        for grid, offset, param in zip(self._grids, offsets, params, strict=True):
            if not param.numel():
                continue
            fp8 = wire[offset : offset + param.numel()].view(torch.float8_e4m3fn)
            source, target = (t.view(grid.rows, grid.columns) for t in (fp8, param))
            step = _rows_at_once(grid)
            for first in range(0, grid.rows, step):
                stop = min(first + step, grid.rows)
                values = source[first:stop].to(torch.float32)
                target[first:stop].copy_(values.mul_(self._spread(grid, first, stop)))

    def _scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        if self._options.granularity == "tensor":
            return 1, 1
        if self._options.granularity == "row":
            return rows, 1
        return -(-rows // BLOCK), -(-columns // BLOCK)

    def _matrix(self, piece: Piece, grid: _Grid, main: Tensor) -> tuple[Tensor, int]:
        """The rows that ``piece`` touches, in fp32, zeros where other ranks hold them; and how many
        elements of the first row are theirs."""
        count = piece.stop - piece.start
        part = main[piece.offset : piece.offset + count]
        skipped = piece.start % grid.columns
        num_rows = -(-(skipped + count) // grid.columns)
        if num_rows * grid.columns == count:
            return part.view(num_rows, grid.columns).to(torch.float32), 0
        rows = memory.zeros(num_rows * grid.columns, torch.float32, main.device)
        rows[skipped : skipped + count].copy_(part)
        return rows.view(num_rows, grid.columns), skipped

    def _note_amax(self, piece: Piece, main: Tensor, amax: Tensor) -> None:
        grid = self._grids[piece.index]
        matrix, _ = self._matrix(piece, grid, main)
        size = matrix.abs()
        target = grid.of(amax)
        first = piece.start // grid.columns
        if self._options.granularity == "tensor":
            torch.maximum(target, size.amax(), out=target)
        elif self._options.granularity == "row":
            rows = target[first : first + size.shape[0], 0]
            torch.maximum(rows, size.amax(1), out=rows)
        else:
            padded = F.pad(size, (0, grid.scale_columns * BLOCK - grid.columns))
            by_row = padded.view(size.shape[0], grid.scale_columns, BLOCK).amax(2)
            blocks = torch.arange(first, first + size.shape[0], device=size.device) // BLOCK
            target.scatter_reduce_(0, blocks.unsqueeze(1).expand_as(by_row), by_row, "amax")

    def _spread(self, grid: _Grid, first: int, stop: int) -> Tensor:
        """Scales of rows ``first`` to ``stop``, to be broadcast over their elements."""
        scales = grid.of(self._scales)
        if self._options.granularity == "tensor":
            return scales
        if self._options.granularity == "row":
            return scales[first:stop]
        rows = scales[torch.arange(first, stop, device=scales.device) // BLOCK]
        return rows.repeat_interleave(BLOCK, 1)[:, : grid.columns]


def _rows_at_once(grid: _Grid) -> int:
    return max(CHUNK // max(grid.columns, 1), 1)


def _parts(piece: Piece, grid: _Grid) -> Iterator[Piece]:
    """``piece`` in pieces of at most so many rows as are widened at once."""
    start = piece.start
    while start < piece.stop:
        end = (start // grid.columns + _rows_at_once(grid)) * grid.columns
        stop = min(end, piece.stop)
        yield Piece(piece.index, start, stop, piece.offset + start - piece.start)
        start = stop
