"""What autograd keeps of kernels on a CUDA device, beside what simulations say. Skipped where there
is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from tests.gpu.scene import requested_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]

ROWS, WIDTH, HEADS = 4096, 512, 8


class Applied(nn.Module):
    """A function of each product."""

    def __init__(self, function: Callable[[Tensor], Tensor], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.function(block(x))
        return x.sum()


def attention(x: Tensor, dropout: float) -> Tensor:
    x = x.view(1, ROWS, HEADS, -1).transpose(1, 2)
    x = F.scaled_dot_product_attention(x, x, x, None, dropout, is_causal=True)
    return x.transpose(1, 2).reshape(ROWS, WIDTH)


def kept(function: Callable[[Tensor], Tensor], count: int) -> int:
    model = Applied(function, count).to("cuda", torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    before = requested_bytes("current")
    loss = model(x)
    found = requested_bytes("current") - before
    loss.backward()
    return found


def simulated(function: Callable[[Tensor], Tensor], count: int) -> int:
    found = fe.simulate(
        partial(Applied, function, count),
        2,
        batch=torch.zeros(ROWS, WIDTH),
        strategy="no_shard",
        mp_policy=fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    return max(activations for _, (*_, activations) in found.memory_series)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rms_norm(x, [WIDTH]),
        lambda x: F.layer_norm(x, [WIDTH]),
        lambda x: F.dropout(F.gelu(x), 0.1),
        partial(attention, dropout=0.0),
        partial(attention, dropout=0.1),
    ],
    ids=["rms_norm", "layer_norm", "dropout", "attention", "attention with dropout"],
)
def test_a_block_keeps_what_a_simulation_says(function: Callable[[Tensor], Tensor]) -> None:
    measured, planned = (
        (bytes_of(function, 8) - bytes_of(function, 4)) / 4 for bytes_of in (kept, simulated)
    )
    assert planned == pytest.approx(measured, rel=0.01)
