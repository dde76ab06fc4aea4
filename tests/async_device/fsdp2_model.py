"""A model of FSDP2's programs on the asynchronous device."""

from __future__ import annotations

from torch import Tensor

from tests.async_device import device as on
from tests.fsdp2 import programs


class OnDevice(programs.Model):
    """Copies tokens to the device, and logits to the CPU, where the loss is computed."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.to(on.DEVICE)).cpu()
