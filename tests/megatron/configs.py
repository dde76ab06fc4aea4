"""The training loop of Megatron-Core's users; records steps in the form of ``reference.train``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.reference import (
    Data,
    OptimizerMaker,
    Step,
    full_gradients,
    mean_over_ranks,
    nothing,
    sgd,
)

Config = fe.DistributedDataParallelConfig

LEVEL_NAMES = list(LEVELS)


def config_of(
    inner: str, outer: str = "no_shard", *, overlap: bool = False, **fields: Any
) -> Config:
    """A config that names levels as Megatron-FSDP does, with both overlaps or none."""
    names: dict[str, Any] = {
        "data_parallel_sharding_strategy": inner,
        "outer_dp_sharding_strategy": outer,
    }
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    return Config(use_megatron_fsdp=True, **{**names, **overlaps, **fields})


def train_wrapped(
    ddp: fe.DistributedDataParallel,
    data: Data,
    make_optimizer: OptimizerMaker = sgd,
    zero_buffer: bool = True,
    after_backward: Callable[[], object] = nothing,
    finish: Callable[[fe.DistributedDataParallel], object] | None = None,
) -> list[Step]:
    """Trains a wrapped module on this rank's part of the data. ``finish`` is called in the place of
    ``finish_grad_sync``."""
    optimizer = make_optimizer(ddp.parameters())
    steps = []
    for microbatches in data:
        ddp.zero_grad_buffer(zero_buffer)
        loss = torch.zeros(())
        for index, parts in enumerate(microbatches):
            last = index == len(microbatches) - 1
            # Without overlap no reduction is issued before finish_grad_sync.
            needs_no_sync = ddp.ddp_config.overlap_grad_reduce and not last
            with ddp.no_sync() if needs_no_sync else nullcontext():
                part_loss = ddp(*parts[dist.get_rank()]) / len(microbatches)
                part_loss.backward()
            after_backward()
            loss += part_loss.detach()
        (finish or fe.DistributedDataParallel.finish_grad_sync)(ddp)
        gradients = full_gradients(ddp.module)
        norm = ddp.engine.clip_grad_norm_(float("inf")).item()
        optimizer.step()
        state = ddp.engine.full_state_dict()
        weights = {name: state[name] for name in gradients}
        steps.append(Step(mean_over_ranks(loss), gradients, norm, weights))
    return steps


class Layers(nn.Module):
    """Ten square linears, with biases or not; the model of Megatron-Core's own bucket test."""

    def __init__(self, dim: int = 95, num_layers: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, dim, bias=bias) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Chunk(fe.DistributedDataParallel):
    """Counts how often its gradients were finished."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh | None, strategy: str, **options: Any
    ) -> None:
        super().__init__(module, config_of(strategy), mesh, **options)
        self.num_finished = 0

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        self.num_finished += 1
        super().finish_grad_sync(force_all_reduce)
