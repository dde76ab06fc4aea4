"""Training loops, meshes and options that many tests share. The expected results of training are
computed in ``reference.py``; models are in ``models.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from tests import reference
from tests.comm.trace_lanes import Forgets, Tracer
from tests.models import vector_batch

OPTIMIZERS = {"sgd": reference.sgd, "adamw": reference.adamw}


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("outer", "inner")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def report(results: list[list[str]]) -> str:
    return "\n".join(
        f"rank {rank}: {line}" for rank, lines in enumerate(results) for line in lines[:8]
    )


BUDGETS = {"nothing": 0, "one unit": 1, "everything": 10**9}


def config_of(budget: int | None, narrow_wire: bool = False) -> fe.DistributedDataParallelConfig:
    return fe.DistributedDataParallelConfig(
        suggested_communication_unit_size=budget,
        reduce_scatter_with_fp32_accumulation=narrow_wire,
    )


def train(
    model: nn.Module,
    engine: Any,
    microbatches: Iterable[int] = (2, 1),
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """One step for each entry of ``microbatches``, with that number of microbatches; clipped,
    AdamW."""
    optimizer = reference.adamw(model.parameters())
    for step, num in enumerate(microbatches):
        before_step(step)
        for micro in range(num):
            x, y = vector_batch(2, 100 * step + 10 * micro + dist.get_rank())
            if micro == num - 1:
                model(x, y).backward()
            else:
                with engine.no_sync():
                    model(x, y).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def traced(
    make_model: Callable[[], nn.Module],
    body: Callable[[nn.Module, Any], None] = train,
    forgets: Forgets = lambda waiter, awaited: False,
    **options: Any,
) -> Tracer:
    """Shards a model and runs ``body`` under a tracer, which raises where the schedule is wrong."""
    tracer = Tracer(forgets)
    with tracer:
        model = make_model()
        engine = fe.shard(model, **options)
        tracer.watch(engine)
        body(model, engine)
    assert all(order.num_checks for order in tracer.orders)
    return tracer


# By name: policy, bytes of compute weights, of main weights (0: they are the compute weights), of
# gradients, of gradients on the wire.
POLICIES: dict[str, tuple[fe.MixedPrecisionPolicy, int, int, int, int]] = {
    "fp32": (fe.MixedPrecisionPolicy(), 4, 0, 4, 4),
    "bf16": (fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16), 2, 4, 4, 4),
    "bf16 reduced in bf16": (
        fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        2,
        4,
        4,
        2,
    ),
}
