"""Parameters travel as fp8 (e4m3) bytes, for any module on any device.

``scaled.py`` has scales, encoding and decoding. The largest e4m3 number is 448 (Micikevicius et
al., "FP8 formats for deep learning", 2022).

Worked example, granularity "row", a row (0.5, -7.0, 3.5): its amax 7 makes the scale 7 / 448 =
1 / 64, and 32, -448, 224 travel, all of which e4m3 holds exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.extensions.fp8.scaled import ScaledCodec, ScaledEncoding


class Float8Codec(ScaledCodec):
    """Encodes as e4m3."""

    largest = 448.0
    encoded_dtype = torch.float8_e4m3fn

    def to_encoded(self, scaled: Tensor) -> Tensor:
        """See :class:`ScaledCodec`."""
        return scaled.to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Float8(ScaledEncoding):
    """Which parameters travel as fp8, and how; one of the ``extensions`` of ``fe.shard``.

    Floating-point parameters of two dims and more do. Norms, biases and other vectors travel in
    the compute dtype.

    Args:
        granularity: "tensor", "row" or "block" (128 x 128): the elements that share a scale.
        power_of_two_scales: scales are powers of two, so that only the rounding to e4m3 rounds.
        exclude: patterns of names of parameters that are left to the next rule; behind the last one
            they travel in the compute dtype.

    Raises:
        ValueError: ``granularity`` is none of these.
        TypeError: ``exclude`` is not a tuple of strings.
    """

    codec = Float8Codec
    label = "float8"
