"""Elements that kernels do not stream through, and the temporary memory of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.simulation.memory_access import irregular_elements, scratch_bytes

ROWS, WIDTH = 8, 16
SIZE = ROWS * WIDTH
X = torch.randn(ROWS, WIDTH)
HEADS = X.view(2, 4, 4, 4)


class Counted(TorchDispatchMode):
    """Sums irregular elements of operations."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += irregular_elements(func, args, out)
        return out


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: X * X, 0),
        (lambda: X * 2.0, 0),
        (lambda: X.add_(X), 0),
        (lambda: X.t() + X.t(), 0),
        (lambda: X @ X.t(), 0),
        (lambda: X.sum(0), SIZE / 2),
        (lambda: X.view(-1), 0),
        (lambda: torch.zeros_like(X).copy_(X), 0),
        (lambda: X.to(torch.bfloat16), 0),
        (lambda: X.bfloat16().float(), SIZE),
        (lambda: X + X.bfloat16(), SIZE),
        (lambda: X * X[0], SIZE),
        (lambda: X * X[:, :1], SIZE),
        (lambda: X * X[0, 0], SIZE),
        (lambda: HEADS.transpose(1, 2).contiguous(), SIZE),
        (lambda: X.t().contiguous(), 4 * SIZE),
        (lambda: X.t().bfloat16().contiguous(), 4 * SIZE),
        (lambda: X[:, :1].t().contiguous(), 4 * ROWS),
        (lambda: torch.stack((X, X)), 2 * 2 * SIZE),
        (lambda: HEADS.transpose(1, 2) + HEADS, SIZE),
        (lambda: torch.cat((X, X), -1), 2 * 2 * SIZE),
        (lambda: torch.softmax(X, -1), SIZE),
        (lambda: F.layer_norm(X, [WIDTH]), SIZE),
    ],
)
def test_elements_that_are_not_streamed(function: Callable[[], Tensor], expected: float) -> None:
    with Counted() as counted:
        function()
    assert counted.found == expected


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


def test_attention_s_backward_sums_gradients_of_queries_in_fp32_on_devices() -> None:
    shape = (2, 4, 256, 64)

    def peak(machine: fe.Machine) -> int:
        options = {"strategy": "no_shard", "machine": machine}
        found = fe.simulate(_Attention, 1, batch=torch.zeros(shape), **options)
        return found.peak_bytes

    host = dataclasses.replace(fe.H100, host_runs_ahead=False, host_link=None)
    # At that moment are the query, which is key and value, output, its gradient, and three results.
    assert peak(fe.H100) - peak(host) == pytest.approx(4 * torch.zeros(shape).numel(), rel=0.01)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (128, 4096, 0),  # too few rows for several thread blocks
        (512, 64, 8 * 512 * 64),
        (8192, 4096, 148 * 2**20),
        (2**16, 2**14, 2**29),
    ],
)
def test_sums_over_rows_have_partial_sums(rows: int, columns: int, expected: int) -> None:
    total = torch.ops.aten.sum.dim_IntList
    x = torch.empty(rows, columns, device="meta", dtype=torch.bfloat16)
    assert scratch_bytes(total, (x, [0]), total(x, [0])) == expected
    assert scratch_bytes(total, (x, [1]), total(x, [1])) == 0
    assert scratch_bytes(total, (x, [0, 1]), total(x, [0, 1])) == 0


def test_a_bias_gradient_s_partial_sums_are_in_the_peak_of_a_device() -> None:
    rows, width = 4096, 1024

    def peak(bias: bool) -> int:
        def build() -> torch.nn.Module:
            return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias) for _ in range(8)])

        batch = torch.zeros(rows, width)
        found = fe.simulate(build, 1, batch=batch, loss=Tensor.sum, strategy="no_shard")
        return found.peak_bytes

    assert peak(bias=True) - peak(bias=False) == pytest.approx(8 * rows * width, rel=0.05)
