"""Models that apply a function to several products; autograd keeps its tensors for backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe


class Applied(nn.Module):
    """``count`` blocks; each applies a function to weights times the input."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.function(block(x))
        return x.sum()


def attention(x: Tensor, heads: int, dropout: float) -> Tensor:
    """Causal, of one sequence: rows x width."""
    rows, width = x.shape
    x = x.view(1, rows, heads, -1).transpose(1, 2)
    x = F.scaled_dot_product_attention(x, x, x, None, dropout, is_causal=True)
    return x.transpose(1, 2).reshape(rows, width)


def simulated_activations(
    function: Callable[[Tensor], Tensor], rows: int, width: int, count: int, machine: fe.Machine
) -> int:
    """Most bytes of activations in a simulated step in bf16."""
    found = fe.simulate(
        partial(Applied, function, width, count),
        2,
        batch=torch.zeros(rows, width),
        machine=machine,
        strategy="no_shard",
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    return max(activations for _, (*_, activations) in found.memory_series)
