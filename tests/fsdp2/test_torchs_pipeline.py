"""torch's own pipeline stage over modules of ``fully_shard``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from fsdp_engine import fsdp2
from tests.pool import on_ranks
from tests.reference import full_gradients


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@on_ranks(4)
def test_gradients_are_those_of_one_process(schedule: str, reshard: bool) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
    whole = nn.Sequential(*copy.deepcopy(stages))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = stages[place]
    fsdp2.fully_shard(module[0], mesh=mesh["dp"], reshard_after_forward=reshard)
    fsdp2.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
    stage = pipelining.PipelineStage(
        module, place, 2, torch.device("cpu"), group=mesh.get_group("pp")
    )
    run = getattr(pipelining, schedule)(
        stage, 4, loss_fn=lambda output, target: (output - target).square().mean()
    )
    for step in range(2):
        torch.manual_seed(step)
        batch, target = torch.randn(2, 2, 8, 8)
        module.zero_grad()
        whole.zero_grad()
        if place == 0:
            run.step(batch[replica])
        else:
            run.step(target=target[replica])
        (whole(batch) - target).square().mean().backward()
        expected = {name: param.grad for name, param in whole[place].named_parameters()}
        torch.testing.assert_close(full_gradients(module), expected, rtol=0, atol=1e-6)
