"""Base class of codecs that gather parameters in few bits per element, with scales.

    main --amax, reduced over the ranks--> scales     main / scale --round--> wire --all-gather-->
    wire * scale --> full parameters in the compute dtype

A *scale* applies to a tensor, a row, or a block of 128 x 128 elements of the parameter, seen as a
matrix with ``shape[0]`` rows. ``scale = amax / largest``, where ``largest`` is the largest number
of the encoding, optionally rounded up to a power of two. Every rank keeps all scales beside the
flat buffer. One collective reduces the amaxes of a buffer, so shards may start at any element, and
every rank computes the scales, and so the bytes, of the unsharded parameter.

``arithmetic.py`` works on elements. A subclass of :class:`ScaledCodec` defines ``largest``,
``encoded_dtype`` (and ``wire_dtype``, if an element is not one byte) and
:meth:`~ScaledCodec.to_encoded`. A subclass of :class:`ScaledEncoding` is its rule for
``fe.shard(extensions=...)``. Examples are ``float8.py`` and the int8 codec of
``tests/extensions/fp8/int8_codec.py``. The scale propagates NaN and Inf: a scale that is NaN or Inf
makes all elements that share it NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.comm.collectives import Steps, max_steps
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.fp8.arithmetic import (
    GRANULARITIES,
    Arithmetic,
    Encoding,
    Grid,
    TorchArithmetic,
    grids_of,
)
from fsdp_engine.extensions.fp8.decoded_weights import DecodingCodec
from fsdp_engine.memory import allocator
from fsdp_engine.patterns import compile_pattern
from fsdp_engine.precision import ParamDtypes

# Smallest scale, so that scales are never zero: fp32 numbers below it are denormal.
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
        TypeError: ``exclude`` is one string, or contains other objects than strings.

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
        granularity = self._options.granularity
        grids = grids_of(params, granularity)
        encoding = Encoding(granularity, self.largest, self.encoded_dtype, self.to_encoded)
        self._arithmetic = self.make_arithmetic(encoding, grids, pieces, device)
        self._groups = groups
        num_scales = grids[-1].stop if grids else 0
        self._scales = allocator.zeros(num_scales, torch.float32, device)

    def make_arithmetic(
        self,
        encoding: Encoding,
        grids: Sequence[Grid],
        pieces: Sequence[Piece],
        device: torch.device,
    ) -> Arithmetic:
        """Returns the object that works on elements. Its results must not depend on its class.

        Args:
            encoding: The encoding.
            grids: The parameters of the buffer.
            pieces: The pieces of this rank's shard.
            device: The device of the buffer.
        """
        return TorchArithmetic(encoding, grids, pieces)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`. Reduces the amaxes once for each axis that shards weights."""
        (wire,) = wires
        amax = self._scales
        amax.zero_()
        self._arithmetic.note_amaxes(main, amax)
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
        self._arithmetic.encode(main, self._scales, wire)

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """See :class:`ParamCodec`."""
        self._arithmetic.decode(wire, self._scales, offsets, params)
