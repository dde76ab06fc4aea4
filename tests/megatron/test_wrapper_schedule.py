"""The wrapper's schedule has no race, judged by ``trace_lanes.py``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from tests import reference
from tests.comm.trace_lanes import Tracer
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.models import LateModel, Small, late_modules, vector_batch
from tests.pool import on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough


def train(ddp: fe.DistributedDataParallel, starts_gathers: bool) -> None:
    """With everything that a loop may do in between."""
    optimizer = reference.adamw(ddp.parameters())
    for step in range(3):
        ddp.zero_grad_buffer(zero_buffer=step == 1)
        for micro in range(2):
            needs_no_sync = ddp.ddp_config.overlap_grad_reduce and micro == 0
            with ddp.no_sync() if needs_no_sync else nullcontext():
                ddp(*vector_batch(2, 10 * step + 2 * micro + dist.get_rank())).backward()
            for module in late_modules(ddp.module):
                module.backward_dw()
        if step == 2:
            ddp.start_grad_sync()
        ddp.finish_grad_sync()
        ddp.scale_gradients(0.5)
        ddp.engine.clip_grad_norm_(1.0)
        optimizer.step()
        if starts_gathers:
            ddp.start_param_sync()


def traced(model: Any, config: fe.DistributedDataParallelConfig, **options: Any) -> None:
    tracer = Tracer(lambda waiter, awaited: False)
    with tracer:
        ddp = fe.DistributedDataParallel(model(), config, mesh_of(2, 2), **options)
        tracer.watch(ddp.engine)
        train(ddp, starts_gathers=config.overlap_param_gather)
    assert all(order.num_checks for order in tracer.orders)


@on_ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", [*LEVEL_NAMES, "hfsdp"])
def test_a_wrapped_model_has_no_race(level: str, overlap: bool) -> None:
    levels = ("optim_grads_params", "optim") if level == "hfsdp" else (level, "no_shard")
    for fields in (
        {},
        {"bucket_size": 100, "check_for_nan_in_grad": True, "check_for_large_grads": True},
        {"bucket_size": 100, "gradient_reduce_div_fusion": False, "fp8_param_gather": True},
        {"bucket_size": 100, "align_param_gather": overlap, "fsdp_double_buffer": True},
    ):
        traced(Small, config_of(*levels, overlap=overlap, **fields))


@on_ranks(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_delayed_and_converted_gradients_have_no_race(level: str, overlap: bool) -> None:
    for planned in (False, True):
        fields = {"delay_wgrad_compute": True, "fsdp_double_buffer": planned, "bucket_size": 200}
        traced(LateModel, config_of(level, overlap=overlap, **fields), units="blocks.*")
    config = config_of(level, overlap=overlap, bucket_size=100)
    traced(lambda: Cast(Small().to(torch.bfloat16)), config)


class Cast(nn.Module):
    """Takes fp32 inputs to a model in bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.model(x.to(torch.bfloat16), y)
