"""The norm of gradients: its accuracy, on any number of elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.optim.clip import total_norm
from tests.pool import Ranks, on_ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@pytest.mark.parametrize("num_elements", [0, 1, 4095, 4096, 4097, 2_400_000])
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_of_a_shard_is_exact_to_fp32_rounding(num_elements: int, order: float) -> None:
    torch.manual_seed(0)
    shard = torch.randn(num_elements)
    expected = 0.0
    if num_elements:
        expected = torch.linalg.vector_norm(shard.double(), order).item()
    norm = total_norm([shard], order, None, torch.device("cpu"))
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)


def _relative_error(level: str) -> float:
    torch.manual_seed(0)
    model = nn.Linear(1200, 2000)
    reference = nn.Linear(1200, 2000)
    reference.load_state_dict(model.state_dict())
    engine = fe.shard(model, strategy=level)
    batch = torch.randn(32, 1200)
    model(batch).square().mean().backward()
    reference(batch).square().mean().backward()
    grads = [param.grad.double().flatten() for param in reference.parameters()]
    expected = torch.linalg.vector_norm(torch.cat(grads)).item()
    return abs(engine.clip_grad_norm_(1.0).item() / expected - 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_clip_grad_norm_is_as_accurate_as_fp32(ranks: Ranks, level: str, world_size: int) -> None:
    assert max(ranks.run(_relative_error, level, world_size=world_size)) < 2e-6


def _errors_of_norms(level: str) -> list[float]:
    """Of ``param.norm()`` and of torch's clipping, relative; a slice has 1.2M elements or more."""
    torch.manual_seed(0)
    model = nn.Linear(1200, 2000)
    weight = model.weight.detach().clone()
    fe.shard(model, strategy=level)
    model.weight.grad = None
    model(torch.zeros(1, 1200)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.grad.copy_(param.detach())
    bias = model.bias.detach()
    bias = bias.full_tensor() if hasattr(bias, "full_tensor") else bias
    norms = [
        (model.weight.detach().norm(), weight),
        (torch.linalg.vector_norm(model.weight.detach(), 3), weight),
        (
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            torch.cat([weight.flatten(), bias]),
        ),
    ]
    orders = (2, 3, 2)
    exact = [
        torch.linalg.vector_norm(values.double(), order).item()
        for (_, values), order in zip(norms, orders, strict=True)
    ]
    return [abs(norm.item() / right - 1) for (norm, _), right in zip(norms, exact, strict=True)]


@pytest.mark.parametrize("level", LEVELS[1:])
def test_norms_of_sharded_tensors_are_as_accurate(ranks: Ranks, level: str) -> None:
    for world_size in (1, 2):
        assert max(ranks.run(_errors_of_norms, level, world_size=world_size)[0]) < 2e-6


class _Weighted(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2_400_000))

    def forward(self, by: torch.Tensor) -> torch.Tensor:
        return (self.weight * by).sum()


@on_ranks(1)
def test_the_check_for_large_gradients_is_as_accurate() -> None:
    model = _Weighted()
    checks = fe.GradientChecks(nan=False, large=True)
    fe.shard(model, strategy="optim_grads", extensions=[checks])
    torch.manual_seed(0)
    large, one = torch.randn(2_400_000), torch.zeros(2_400_000)
    # The norm of one element is exact. That of all is 10 times as large and a bit.
    one[0] = torch.linalg.vector_norm(large.double()) / 10 / (1 + 1e-5)
    model(one).backward()
    model.zero_grad()
    loss = model(large)
    with pytest.warns(UserWarning, match="more than 10 times the largest"):
        loss.backward()
