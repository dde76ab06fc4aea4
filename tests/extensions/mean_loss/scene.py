"""A small model for ranks whose batches differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    """Blocks, of which batches may leave out one, and a head; in fp64, so that sums have one result
    in any order. Returns the loss of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.double()

    def forward(self, x: Tensor, left_out: int = -1) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = torch.tanh(block(x))
        losses: Tensor = self.head(x).square().flatten()
        return losses


def rows(number: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)
