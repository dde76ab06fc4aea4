"""Asynchronous tensor parallelism, as inductor compiles it: products with their collectives."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fsdp_engine as fe
from fsdp_engine.comm.lanes import COMPUTE
from fsdp_engine.planner.simulation.clock import MODEL_LANE

TP, BATCH, LENGTH, WIDTH, INNER = 8, 4, 8192, 4096, 16384
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

pytestmark = pytest.mark.filterwarnings("ignore:`enable_symm_mem_for_group` is deprecated")


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Model(nn.Sequential):
    def __init__(self, inner: int) -> None:
        super().__init__(Block(inner))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.chunk(TP, 1)[0].requires_grad_()).sum()


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parallelize with sequence parallelism, and enable symmetric memory as torchtitan does."""
    plan = {
        "0.norm": SequenceParallel(use_local_output=True),
        "0.up": ColwiseParallel(input_layouts=Shard(1)),
        "0.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)


@functools.cache
def simulated(is_async: bool, **options: Any) -> fe.Simulation:
    before = dict(symmetric_memory._group_name_to_store)
    with inductor.patch(_micro_pipeline_tp=is_async):
        found = fe.simulate(
            partial(Model, options.pop("inner", INNER)),
            2 * TP,
            batch=torch.zeros(BATCH, LENGTH, WIDTH),
            tensor_parallel=TP,
            parallelize=cut,
            compile=True,
            mp_policy=BF16,
            **options,
        )
    assert symmetric_memory._group_name_to_store == before
    return found


def named(found: fe.Simulation, name: str, lane: str, phase: str = "forward") -> list[float]:
    spans = [each for each in found.spans if each.lane == lane and each.phase == phase]
    return [each.end - each.start for each in spans if name in each.label]


@pytest.mark.parametrize(("inner", "is_waiting"), [(4096, True), (INNER, False)])
def test_times_by_hand(inner: int, is_waiting: bool) -> None:
    found = simulated(True, **({} if inner == INNER else {"inner": inner}))
    machine = fe.H100
    rows, processor = BATCH * LENGTH, machine.processor
    flops = 2 * rows * WIDTH * inner / TP
    activations = 2 * rows * WIDTH
    message = machine.link(TP, 1).seconds(activations * (TP - 1) / TP, TP - 1)
    # Each product is divided into chunks of rows. The two products' results differ in size.
    for name, columns in (
        ("fused_all_gather_matmul", inner / TP),
        ("fused_matmul_reduce_scatter", WIDTH),
    ):
        elements = int(rows / TP * columns)
        chunk = processor.seconds(flops / TP, 0, torch.bfloat16, product_elements=elements)
        assert (message > (TP - 1) * chunk) == is_waiting
        assert named(found, name, MODEL_LANE) == [pytest.approx(message)]
        assert sum(named(found, name, COMPUTE)) == pytest.approx(TP * chunk)
        spans = [each for each in found.spans if name in each.label and each.phase == "forward"]
        start, end = min(each.start for each in spans), max(each.end for each in spans)
        assert end - start == pytest.approx(max(message + chunk, TP * chunk))


def test_flops_and_bytes_are_those_of_separate_operations() -> None:
    found, alone = (simulated(each, checkpointing=True) for each in (True, False))
    assert found.sent_bytes["tensor"] == pytest.approx(alone.sent_bytes["tensor"])
    assert found.model_flops == alone.model_flops
    assert found.seconds < 0.97 * alone.seconds
