"""Base class of codecs that gather parameters in few bits per element, with scales.

    main --amax, reduced over the ranks--> scales     main / scale --round--> wire --all-gather-->
    wire * scale --> full parameters in the compute dtype

A *scale* applies to a tensor, a row, or a block of 128 x 128 elements of the parameter, seen as a
matrix with ``shape[0]`` rows. ``scale = amax / largest``, where ``largest`` is the largest number
of the encoding, optionally rounded up to a power of two. Every rank keeps all scales beside the
flat buffer. One collective reduces the amaxes of a buffer, so shards may start at any element, and
every rank computes the scales, and so the bytes, of the unsharded parameter.

A subclass of :class:`ScaledCodec` defines ``largest``, ``encoded_dtype`` (and ``wire_dtype``, if an
element is not one byte) and :meth:`~ScaledCodec.to_encoded`. A subclass of :class:`ScaledEncoding`
is its rule for ``fe.shard(extensions=...)``. Examples are ``float8.py`` and the int8 codec of
``tests/extensions/fp8/int8_codec.py``. The scale propagates NaN and Inf: a scale that is NaN or Inf
makes all elements that share it NaN.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.comm.collectives import Steps, max_steps
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.fp8.decoded_weights import DecodingCodec
from fsdp_engine.memory import allocator
from fsdp_engine.patterns import compile_pattern
from fsdp_engine.precision import ParamDtypes

BLOCK = 128
GRANULARITIES = ("tensor", "row", "block")
# Number of elements that are converted to fp32 at a time: 64 MiB, whatever the matrix size.
CHUNK = 1 << 24
# Smallest scale: fp32 is denormal below. Elements below `largest` times this scale become zero.
_LEAST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ScaledEncoding(EngineExtension):
    """Base class of rules that select the parameters that a ``ScaledCodec`` encodes.

    The rule applies to floating-point parameters of at least two dimensions. Norms, biases and
    other vectors are gathered in the compute dtype.

    Args:
        granularity: Elements that share a scale: "tensor", "row" or "block" (128 x 128).
        power_of_two_scales: Round scales up to powers of two.
        exclude: Patterns of names of parameters that this rule does not encode. The next rule
            applies to them. If there is none, they are gathered in the compute dtype.

    Raises:
        ValueError: ``granularity`` is unknown.
        TypeError: ``exclude`` is not a tuple of strings.

    Attributes:
        codec: Class of the codec.
        label: Name of the encoding. Different codecs must have different labels.
    """

    codec: ClassVar[type[ScaledCodec]]
    label: ClassVar[str]

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

    @property
    def codec_rules(self) -> Sequence[CodecRule]:
        """See the base class."""
        return (self,)

    def __call__(
        self, name: str, param: Tensor, dtypes: ParamDtypes
    ) -> tuple[str, Callable[[], ParamCodec]] | None:
        """Returns the key of a parameter's codec and a function that makes it; None: no codec."""
        if param.ndim < 2 or not param.is_floating_point():
            return None
        if any(compile_pattern(pattern).fullmatch(name) for pattern in self.exclude):
            return None
        suffix = " power of two" if self.power_of_two_scales else ""
        return f"{self.label} {self.granularity}{suffix}", lambda: self.codec(self)


@dataclass(frozen=True)
class _Grid:
    """A parameter as a matrix, and the range of its scales among those of the buffer."""

    rows: int
    columns: int
    scale_rows: int
    scale_columns: int
    first: int

    @property
    def stop(self) -> int:
        return self.first + self.scale_rows * self.scale_columns

    def of(self, scales: Tensor) -> Tensor:
        """Returns the scales of this parameter, of shape (scale_rows, scale_columns)."""
        return scales[self.first : self.stop].view(self.scale_rows, self.scale_columns)


class ScaledCodec(DecodingCodec):
    """Base class of codecs with scales; see the module docstring. An object encodes one buffer.

    Attributes:
        largest: Largest number of the encoding; scales are ``amax / largest``.
        encoded_dtype: Dtype of encoded elements; has the size of ``wire_dtype``.
    """

    wire_dtype = torch.uint8
    keeps_wire = True  # because encoding needs a collective
    largest: float
    encoded_dtype: torch.dtype

    def __init__(self, options: ScaledEncoding) -> None:
        self._options = options
        self._grids: list[_Grid] = []
        self._pieces: Sequence[Piece] = ()
        self._groups: Sequence[Any] = ()

    @abstractmethod
    def to_encoded(self, scaled: Tensor) -> Tensor:
        """Round to ``encoded_dtype``.

        Args:
            scaled: fp32 tensor of any shape with elements in ``[-largest, largest]`` or NaN. A NaN
                means that the scale is NaN or Inf; its result may be any number.
        """

    def converted(self, dtypes: ParamDtypes) -> ScaledCodec:
        """See :class:`ParamCodec`."""
        return type(self)(self._options)

    @property
    def state(self) -> Sequence[Tensor]:
        """See :class:`ParamCodec`."""
        return (self._scales,)

    @property
    def scales(self) -> Tensor:
        """All scales of the buffer: fp32, 1-D, equal on every rank."""
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
        self._scales = allocator.zeros(first, torch.float32, device)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`. Reduces the amaxes once for each axis that shards weights."""
        (wire,) = wires
        amax = self._scales
        amax.zero_()
        for piece in self._pieces:
            self._note_amax(piece, main, amax)
        # The maximum of floats loses NaN, in gloo as in NCCL. The maximum of their bits does not:
        # the bits of non-negative floats have the order of the floats, and NaN has the largest
        # bits. The sign is masked because a kernel may set the sign bit of a NaN.
        bits = amax.view(torch.int32).bitwise_and_(0x7FFFFFFF)
        for group in self._groups:
            yield from max_steps(bits, group)
        amax.div_(self.largest)
        if self._options.power_of_two_scales:
            torch.exp2(torch.ceil(torch.log2(amax)), out=amax)
        # Avoid a zero scale for parameters of zeros. NaN stays NaN.
        amax.clamp_(min=_LEAST_SCALE)
        for piece in self._pieces:
            grid = self._grids[piece.index]
            matrix, skipped = self._matrix(piece, grid, main)
            first_row = piece.start // grid.columns
            scaled = matrix / self._spread(grid, first_row, first_row + matrix.shape[0])
            encoded = self.to_encoded(scaled.clamp_(-self.largest, self.largest))
            count = piece.stop - piece.start
            part = encoded.view(self.wire_dtype).view(-1)[skipped : skipped + count]
            wire[piece.offset : piece.offset + count].copy_(part)

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """See :class:`ParamCodec`."""
        for grid, offset, param in zip(self._grids, offsets, params, strict=True):
            if not param.numel():
                continue
            encoded = wire[offset : offset + param.numel()].view(self.encoded_dtype)
            source, target = (t.view(grid.rows, grid.columns) for t in (encoded, param))
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
        """Returns the rows that ``piece`` overlaps, in fp32 with zeros for elements of other ranks,
        and the number of such elements before the piece in the first row."""
        count = piece.stop - piece.start
        part = main[piece.offset : piece.offset + count]
        skipped = piece.start % grid.columns
        num_rows = -(-(skipped + count) // grid.columns)
        if num_rows * grid.columns == count:
            return part.view(num_rows, grid.columns).to(torch.float32), 0
        rows = allocator.zeros(num_rows * grid.columns, torch.float32, main.device)
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
        """Returns the scales of rows ``first`` to ``stop``, broadcastable over their elements."""
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
    """Split ``piece`` into pieces of at most as many rows as are converted at a time."""
    start = piece.start
    while start < piece.stop:
        end = (start // grid.columns + _rows_at_once(grid)) * grid.columns
        stop = min(end, piece.stop)
        yield Piece(piece.index, start, stop, piece.offset + start - piece.start)
        start = stop
