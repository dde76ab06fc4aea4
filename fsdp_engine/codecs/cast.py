"""The default codec: main weights travel in the compute dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.codecs.base import ParamCodec
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.memory import begin_together
from fsdp_engine.precision import ParamDtypes


class CastCodec(ParamCodec):
    """A dtype cast, which is nothing at all where both dtypes are one."""

    def __init__(self, main: torch.dtype, compute: torch.dtype, *, copies: bool = False) -> None:
        """``copies``: main weights stay apart from compute weights, though their dtype is one."""
        self.wire_dtype = compute
        self.is_identity = main == compute and not copies

    def converted(self, dtypes: ParamDtypes) -> CastCodec:
        """See :class:`ParamCodec`."""
        return CastCodec(dtypes.main, dtypes.compute)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`."""
        (wire,) = wires
        if not begin_together(wire, main):
            wire.copy_(main)
        yield from ()
