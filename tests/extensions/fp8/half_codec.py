"""A codec for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.comm.collectives import Steps
from fsdp_engine.extensions.fp8 import DecodingCodec


class HalfCodec(DecodingCodec):
    wire_dtype = torch.float16

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        self.full = [*getattr(self, "full", ()), full[0]]
        return super().bind(param, full)

    def encode(self, main: Tensor, wires: Sequence[Tensor]) -> Steps:
        wires[0].copy_(main)
        yield from ()

    def decode(self, wire: Tensor, offsets: Any, params: Any) -> None:
        for offset, param in zip(offsets, params, strict=True):
            param.copy_(wire[offset : offset + param.numel()].view(param.shape))

    def after_gather(self) -> None:
        self.total = sum(param.sum() for param in self.full)

    def before_release(self) -> None:
        self.total = self.total - sum(param.sum() for param in self.full)
