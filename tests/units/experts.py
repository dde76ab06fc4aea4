"""A model whose experts are spread over a group of ranks, and batches for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.nn import functional as F

DIM = 6


NUM_EXPERTS = 2


class Mixture(nn.Module):
    """Two linears and experts. This rank holds the experts ``held``. The ranks of ``group``
    together hold all experts."""

    def __init__(self, held: list[int], group: Any = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(NUM_EXPERTS, DIM, DIM, generator=generator) / DIM**0.5
        self.first = nn.Linear(DIM, DIM)
        self.experts = nn.ParameterDict({str(e): nn.Parameter(weights[e].clone()) for e in held})
        self.last = nn.Linear(DIM, 1)
        self.group = group
        for expert in self.experts.values():
            expert.allreduce = group is None

    def mix(self, x: Tensor) -> Tensor:
        # In backward, gradients of gathered rows are reduced to the ranks of the rows, and
        # gradients of the sums are gathered.
        whole = x if self.group is None else all_gather_tensor_autograd(x, 0, self.group)
        goes_to = (whole.detach()[:, 0] > 0).long()
        out = whole * 0.0  # part of the graph even if no token goes to an expert of this rank
        for name, weight in self.experts.items():
            chosen = (goes_to == int(name)).unsqueeze(1)
            if not chosen.any():
                continue
            out = out + torch.where(chosen, torch.tanh(whole @ weight), 0.0)
        if self.group is None:
            return out
        return reduce_scatter_tensor_autograd(out, "sum", 0, self.group)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.mix(self.first(x))), y)


def batches(num_micro: int) -> list[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(7)

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randn(5, DIM, generator=generator), torch.randn(5, 1, generator=generator)

    return [[rows() for _ in range(4)] for _ in range(num_micro)]


def build(held: list[int], group: Any = None) -> Mixture:
    torch.manual_seed(2)
    return Mixture(held, group)
