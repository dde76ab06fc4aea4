"""The default codec: main weights travel in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.codecs.base import ParamCodec
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.memory import begin_together


class CastCodec(ParamCodec):
    """A dtype cast, which is nothing at all where both dtypes are one."""

    def __init__(self, main_dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self.wire_dtype = compute_dtype
        self.is_identity = main_dtype == compute_dtype

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`."""
        (wire,) = wires
        if not begin_together(wire, main):
            wire.copy_(main)
        yield from ()
