"""A model's third step, planned and measured; see ``live_storages.py`` and ``memory_models.py``."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor
from tests.planner.simulation.live_storages import LiveStorages
from tests.planner.simulation.memory_models import MODELS

NUM_RANKS = 2
# A machine whose host computes, like the two gloo ranks.
_LINK = Link(1e9, 1e-4, processor_share=0.5)
_SPEED = {torch.float32: 1e11, torch.bfloat16: 1e11}
HOST = Machine("a host", Processor(_SPEED, 1e10, 1e10), _LINK, _LINK, NUM_RANKS, 1e-5, False)


@dataclass(frozen=True)
class Run:
    """A model by name, a level, and whether blocks are checkpointed and compute is in bf16."""

    name: str
    level: str
    checkpointing: bool | str = False
    in_bf16: bool = False
    microbatches: int = 1

    def build(self) -> nn.Module:
        """The model."""
        model = MODELS[self.name].build()
        if self.checkpointing:
            fe.checkpoint_units(model, None, self.checkpointing)
        return model

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``fe.shard``."""
        policy = None
        if self.in_bf16:
            policy = fe.MixedPrecisionPolicy(torch.bfloat16, grad_comm_dtype=torch.bfloat16)
        return {"strategy": self.level, "min_unit_size": 0, "mp_policy": policy}


def planned(run: Run, machine: Machine = HOST) -> fe.Simulation:
    """Memory by ``fe.simulate``."""
    return fe.simulate(
        run.build,
        NUM_RANKS,
        batch=MODELS[run.name].batch,
        machine=machine,
        microbatches=run.microbatches,
        **run.options,
    )


def train(
    model: nn.Module,
    batch: dict[str, Any],
    num_steps: int,
    *,
    engine: fe.Engine | None = None,
    watch: LiveStorages | None = None,
    microbatches: int = 1,
) -> tuple[list[float], list[int]]:
    """Losses of all microbatches, and the peak of each step but the first."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if engine is not None:
        fe.shard_optimizer(optimizer)
    losses, peaks = [], []
    for step in range(num_steps):
        if step > 0 and watch is not None:
            watch.restart()
        for number in range(microbatches):
            is_last = number == microbatches - 1
            with nullcontext() if engine is None or is_last else engine.no_sync():
                output = model(**batch)
                loss = output if isinstance(output, torch.Tensor) else output.loss
                del output
                loss.backward()
                losses.append(loss.item())
                del loss
        optimizer.step()
        optimizer.zero_grad()
        if step > 0 and watch is not None:
            peaks.append(watch.peak)
    return losses, peaks


def measured(run: Run, num_steps: int = 2) -> int:
    """Most bytes that this rank held in the last step; to be called on all ranks."""
    gc.collect()  # frees earlier models
    torch.manual_seed(0)
    with LiveStorages() as watch:
        model = run.build()
        engine = fe.shard(model, **run.options)
        options: dict[str, Any] = {"watch": watch, "microbatches": run.microbatches}
        _, peaks = train(model, MODELS[run.name].batch(), num_steps, engine=engine, **options)
    dist.barrier()
    return peaks[-1]


def measured_all(runs: list[Run]) -> list[int]:
    """Measure each run, one after another."""
    return [measured(run) for run in runs]
