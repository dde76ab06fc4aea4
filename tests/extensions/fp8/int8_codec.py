"""A short codec on the base class of fp8's codec: parameters are gathered as int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.extensions.fp8 import ScaledCodec, ScaledEncoding


class Int8Codec(ScaledCodec):
    """Encodes as int8, in steps of ``amax / 127``."""

    largest = 127.0
    encoded_dtype = torch.int8

    def to_encoded(self, scaled: Tensor) -> Tensor:
        # NaN has no int8; the scale carries it.
        return scaled.round().nan_to_num(0.0).to(torch.int8)


@dataclass(frozen=True)
class Int8(ScaledEncoding):
    """The rule of :class:`Int8Codec` for ``fe.shard(extensions=[Int8()])``."""

    codec = Int8Codec
    label = "int8"
