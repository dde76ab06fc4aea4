"""The default codec: main weights are cast to the compute dtype for the gather."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.codecs.base import ParamCodec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.precision import ParamDtypes


class CastCodec(ParamCodec):
    """A cast to the compute dtype, or the identity if both dtypes are equal.

    Args:
        main: Dtype of main weights.
        compute: Dtype of compute weights.
        copies: Whether main and compute weights have separate memory even if dtypes are equal.
    """

    def __init__(self, main: torch.dtype, compute: torch.dtype, *, copies: bool = False) -> None:
        self.wire_dtype = compute
        self._copies = copies
        self.is_identity = main == compute and not copies

    def converted(self, dtypes: ParamDtypes) -> CastCodec:
        """See :class:`ParamCodec`."""
        return CastCodec(dtypes.main, dtypes.compute, copies=self._copies)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        """See :class:`ParamCodec`."""
        (wire,) = wires
        wire.copy_(main)
        yield from ()
