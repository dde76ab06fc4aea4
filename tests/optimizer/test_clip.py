"""The norm of gradients: its accuracy, on any number of elements."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.optimizer.clip import total_norm
from tests.pool import Ranks

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
