"""A model's third step, planned and measured; see ``live_storages.py`` and ``memory_models.py``."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.simulation.machine import Link, Machine, Processor
from fsdp_engine.simulation.simulate import STEPS
from tests.simulation.live_storages import LiveStorages
from tests.simulation.memory_models import MODELS

NUM_RANKS = 2
# One whose host computes, as two gloo ranks do.
_LINK = Link(1e9, 1e-4, processor_share=0.5)
_SPEED = {torch.float32: 1e11}
HOST = Machine("a host", Processor(_SPEED, 1e10, 1e10), _LINK, _LINK, NUM_RANKS, 1e-5, False)


def built(name: str, checkpointed: bool) -> nn.Module:
    model = MODELS[name].build()
    if checkpointed:
        fe.checkpoint_units(model)
    return model


def planned(name: str, level: str, checkpointed: bool) -> fe.Simulation:
    """What ``fe.simulate`` says."""
    return fe.simulate(
        lambda: built(name, checkpointed),
        NUM_RANKS,
        batch=MODELS[name].batch,
        machine=HOST,
        strategy=level,
        min_unit_size=0,
    )


def measured(name: str, level: str, checkpointed: bool) -> int:
    """Most bytes that this rank held in its third step; on all ranks."""
    gc.collect()  # of models before
    torch.manual_seed(0)
    watch = LiveStorages()
    with watch:
        model = built(name, checkpointed)
        engine = fe.shard(model, strategy=level, min_unit_size=0)
        optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        batch = MODELS[name].batch()
        for step in range(STEPS):
            if step == STEPS - 1:
                watch.restart()
            output = model(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            del output
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    del engine
    dist.barrier()
    return watch.peak
