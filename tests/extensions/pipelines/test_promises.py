"""Stages of torch.distributed.pipelining: the gradients of all microbatches, scaled once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fsdp_engine as fe
from tests import reference
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS

NUM_STEPS, NUM_MICROBATCHES, ROWS = 3, 3, 6  # rows of each data-parallel rank
WIDTHS = (5, 8, 3)


def make_stages() -> list[nn.Sequential]:
    torch.manual_seed(3)
    return [
        nn.Sequential(nn.Linear(a, a), nn.Tanh(), nn.Linear(a, b))
        for a, b in itertools.pairwise(WIDTHS)
    ]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Rows of both data-parallel ranks, by step."""
    torch.manual_seed(4)
    return [(torch.randn(2 * ROWS, 5), torch.randn(2 * ROWS, 3)) for _ in range(NUM_STEPS)]


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize("level", LEVELS)
@on_ranks(4)
def test_a_stage_that_scales_its_gradients_trains_as_one_process(level: str, schedule: Any) -> None:
    alone = nn.Sequential(*make_stages())
    optimizer = make_optimizer(alone)
    for x, y in batches():
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    index, data = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    module = make_stages()[index]
    fe.shard(module, mesh["data"], level)
    optimizer = make_optimizer(module)
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    run = schedule(stage, NUM_MICROBATCHES, loss_fn=F.mse_loss)
    for x, y in batches():
        mine = slice(data * ROWS, (data + 1) * ROWS)
        run.step(x[mine]) if index == 0 else run.step(target=y[mine])
        optimizer.step()
        optimizer.zero_grad()
    reference.assert_same_weights(module, alone[index])
