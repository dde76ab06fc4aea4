"""torchao's optimizers with quantised state, at every level, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from tests.integrations.trainer_scene import LEVELS
from tests.pool import Ranks
from tests.programs.packages import PROGRAM, with_torchao

pytestmark = PROGRAM
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def train(name: str, level: str | None) -> list[float]:
    """Losses of each step, of one process where there is no level."""
    with with_torchao():
        import torchao.optim
    torch.manual_seed(0)
    width = 128
    blocks = (
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(2)
    )
    model = nn.Sequential(*blocks)
    if level is not None:
        fe.shard(model, strategy=level, min_unit_size=0)
    optimizer: Any = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    if level is not None:
        fe.shard_optimizer(optimizer)
    rank, size = (dist.get_rank(), dist.get_world_size()) if level is not None else (0, 1)
    losses = []
    with torch.compiler.set_stance("force_eager"):
        for step in range(10):
            batch = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
            part = batch.chunk(size)[rank]
            loss = (model(part) - part).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            if level is not None:
                dist.all_reduce(total)
            losses.append(total.item() / size)
    return losses


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, list[float]]:
    return {name: ranks.run(train, name, None, world_size=1)[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantised_state_lies_in_slices(
    ranks: Ranks, alone: dict[str, list[float]], name: str, level: str
) -> None:
    for losses in ranks.run(train, name, level, world_size=2):
        assert losses == pytest.approx(alone[name], rel=1e-3)
        assert losses[-1] < 0.9 * losses[0]
