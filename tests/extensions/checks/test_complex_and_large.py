"""Checks of complex gradients, and of as many elements as fp32 sums badly."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.pool import on_ranks


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))

    def forward(self, scale: float) -> Tensor:
        return (self.filter * scale).abs().sum()


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_complex_gradients_that_are_nan_or_large_are_found(level: str) -> None:
    model = Complex()
    fe.shard(model, strategy=level, extensions=[fe.GradientChecks(large=True)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1.0, 1.0, 30.0):
            model.zero_grad()
            model(scale).backward()
    found = [str(each.message) for each in caught if "check_for_large_grads" in str(each.message)]
    (text,) = found
    assert "have norm 36.7 on this" in text  # 30 * sqrt(6) of 2 ranks
    model.zero_grad()
    loss = model(1.0) * (float("nan") if dist.get_rank() == 1 else 1.0)
    with pytest.raises(RuntimeError, match=r"NaN or Inf, .* in .*filter \(data-parallel rank 1\)"):
        loss.backward()


class Weighted(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2_400_000))

    def forward(self, by: torch.Tensor) -> torch.Tensor:
        return (self.weight * by).sum()


@on_ranks(1)
def test_the_check_for_large_gradients_is_exact_to_fp32_rounding() -> None:
    model = Weighted()
    checks = fe.GradientChecks(nan=False, large=True)
    fe.shard(model, strategy="optim_grads", extensions=[checks])
    large, one = torch.randn(2_400_000), torch.zeros(2_400_000)
    # The norm of one element is exact. That of all is 10 times as large and a bit.
    one[0] = torch.linalg.vector_norm(large.double()) / 10 / (1 + 1e-5)
    model(one).backward()
    model.zero_grad()
    loss = model(large)
    with pytest.warns(UserWarning, match="more than 10 times the largest"):
        loss.backward()
