"""All-gathers of parameters in fp8 (e4m3), for any module on any device.

``scaled.py`` implements scales, encoding and decoding. On CUDA devices of compute capability 8.9
and above ``fused_kernels.py`` encodes and decodes, if Triton is installed. The largest e4m3 number
is 448 (Micikevicius et al., "FP8 formats for deep learning", 2022).

Worked example with granularity "row" for the row (0.5, -7.0, 3.5): its amax 7 gives the scale
7 / 448 = 1 / 64, so 32, -448 and 224 are gathered, all of which are exact in e4m3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.codecs.base import Piece
from fsdp_engine.extensions.fp8.arithmetic import (
    E4M3_LARGEST,
    Arithmetic,
    Encoding,
    Grid,
    to_e4m3,
)
from fsdp_engine.extensions.fp8.scaled import ScaledCodec, ScaledEncoding


class Float8Codec(ScaledCodec):
    """Codec that encodes weights as e4m3."""

    largest = E4M3_LARGEST
    encoded_dtype = torch.float8_e4m3fn

    def to_encoded(self, scaled: Tensor) -> Tensor:
        """See :class:`ScaledCodec`."""
        return to_e4m3(scaled)

    def make_arithmetic(
        self,
        encoding: Encoding,
        grids: Sequence[Grid],
        pieces: Sequence[Piece],
        device: torch.device,
    ) -> Arithmetic:
        """See :class:`ScaledCodec`."""
        plain = super().make_arithmetic(encoding, grids, pieces, device)
        if device.type != "cuda":
            return plain
        from fsdp_engine.extensions.fp8.fused_check import works_on

        if not works_on(device, encoding.granularity):
            return plain
        from fsdp_engine.extensions.fp8.fused_kernels import FusedArithmetic

        return FusedArithmetic(encoding, grids, pieces, device)


@dataclass(frozen=True)
class Float8(ScaledEncoding):
    """Gathers parameters in fp8; pass it in ``extensions`` of ``fe.shard``.

    It applies to floating-point parameters of at least two dimensions. Norms, biases and other
    vectors are gathered in the compute dtype.

    Args:
        granularity: Elements that share a scale: "tensor", "row" or "block" (128 x 128).
        power_of_two_scales: Round scales up to powers of two, so that scaling itself is exact.
        exclude: Patterns of names of parameters that this rule does not encode. The next rule
            applies to them. If there is none, they are gathered in the compute dtype.

    Raises:
        ValueError: ``granularity`` is unknown.
        TypeError: ``exclude`` is one string, or contains other objects than strings.
    """

    codec = Float8Codec
    label = "float8"
