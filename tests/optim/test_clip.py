"""The norm of gradients: its accuracy, on any number of elements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.optim.clip import clip_, total_norm
from fsdp_engine.strategies import LEVELS
from tests.pool import on_few_ranks, on_ranks


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


@pytest.mark.parametrize(
    ("value", "order"), [(1e4, 10.0), (1e-5, 10.0), (3e19, 2.0), (1e-25, 2.0), (2e38, 1.5)]
)
@on_ranks(2)
def test_powers_of_norms_neither_overflow_nor_become_zero(value: float, order: float) -> None:
    shard = torch.full((1,), value)
    for group, num_ranks in ((None, 1), (dist.group.WORLD, 2)):
        norm = total_norm([shard, shard[:0]], order, group, shard.device)
        assert norm.dtype == torch.float32
        exact = value * num_ranks ** (1 / order)
        if exact > torch.finfo(torch.float32).max:
            continue
        assert norm.item() == pytest.approx(exact, rel=1e-6)
        gradient = shard.clone()
        clip_([gradient], norm, value / 10)
        expected = value * min(1.0, value / 10 / (exact + 1e-6))
        assert gradient.item() == pytest.approx(expected, rel=1e-5)


@on_few_ranks
def test_norms_of_sharded_tensors_are_as_accurate() -> None:
    for level in LEVELS:
        model = nn.Linear(1200, 2000)
        weight, bias = (param.detach().clone() for param in model.parameters())
        engine = fe.shard(model, strategy=level)
        model(torch.zeros(1, 1200)).sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param.grad.copy_(param.detach())
        all_values = torch.cat([weight.flatten(), bias])
        largest: Any = engine.clip_grad_norm_("1e9", "inf")  # type: ignore[arg-type]
        assert largest == all_values.abs().max()  # torch takes strings, too
        norms = [(engine.clip_grad_norm_(1e9), all_values, 2)]
        if level != "no_shard":  # at no_shard, torch sums plain tensors, less accurately
            norms += [
                (model.weight.detach().norm(), weight, 2),
                (torch.linalg.vector_norm(model.weight.detach(), 3), weight, 3),
                (nn.utils.clip_grad_norm_(model.parameters(), 1.0), all_values, 2),
            ]
        for norm, values, order in norms:
            exact = torch.linalg.vector_norm(values.double(), order).item()
            assert norm.item() == pytest.approx(exact, rel=2e-6), (level, order)


@on_ranks(2)
def test_a_nan_of_any_rank_is_the_largest_magnitude() -> None:
    for rank in range(2):
        values = torch.tensor([0.5, math.nan if dist.get_rank() == rank else 0.1])
        assert total_norm([values], math.inf, dist.group.WORLD, values.device).isnan()
    infinite = torch.tensor([1.0 if dist.get_rank() else math.inf])
    assert total_norm([infinite], math.inf, dist.group.WORLD, infinite.device) == math.inf
