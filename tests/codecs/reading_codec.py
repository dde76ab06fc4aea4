"""A codec for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_engine.codecs import CastCodec


class ReadingCodec(CastCodec):
    """Copies fp32 weights, and reads full parameters after a gather and before they are freed."""

    def __init__(self) -> None:
        super().__init__(torch.float32, torch.float32, copies=True)
        self.full: list[Tensor] = []

    def bind(self, param: nn.Parameter, full: Sequence[Tensor]) -> nn.Parameter:
        self.full.append(full[0])
        return super().bind(param, full)

    def after_gather(self) -> None:
        self.total = sum(param.sum() for param in self.full)

    def before_release(self) -> None:
        self.total = self.total - sum(param.sum() for param in self.full)
