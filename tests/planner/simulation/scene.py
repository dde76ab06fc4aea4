"""A model with known times, simulated and computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine import DistributedDataParallelConfig
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor
from fsdp_engine.planner.simulation.pipeline import PipelineSimulation, simulate_pipeline
from fsdp_engine.planner.simulation.simulate import Simulation, simulate
from fsdp_engine.strategies import Strategy
from tests.planner.simulation.ideal import Ideal, IdealUnit, Network

WIDTH, LINEARS, BLOCKS, ROWS = 64, 4, 4, 32
VOCABULARY = 2048
SIZES = (2, 4)  # outer, inner
BLOCK_NUMEL = LINEARS * WIDTH * WIDTH
FLOPS = 1e9

_PRODUCT = 2 * ROWS * WIDTH * WIDTH / FLOPS
BACKWARD = 2 * LINEARS * _PRODUCT


class LinearBlock(nn.Sequential):
    """A sequence of linears, so that a unit's first gradient is ready long before its last."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS)))


class Tower(nn.Module):
    """Blocks, after an embedding or not."""

    def __init__(self, has_embedding: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if has_embedding else None
        self.blocks = nn.ModuleList(LinearBlock() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def on_meta(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with torch.device("meta"):
            return build()

    return built


def network(ratio: float) -> Network:
    """On each axis, the messages of a block's backward take ``ratio`` of its compute: an all-reduce
    of a full unit along the inner axis, of a shard along the outer one."""
    inner, outer = SIZES[1], SIZES[0]
    longest = ratio * BACKWARD
    sent = [2 * 4 * BLOCK_NUMEL * (n - 1) / n for n in (inner, outer)]
    return Network((inner, outer), (sent[0] / longest, sent[1] / longest))


FREE = Link(math.inf, 0.0)


def plain_machine(
    within: Link = FREE, between: Link = FREE, ranks_per_node: int = 8, **options: Any
) -> Machine:
    """Only matrix products and messages take time."""
    options = {"host_seconds": 0.0, **options}
    processor = Processor({torch.float32: FLOPS}, math.inf, 1e12)
    name = "a machine without surprises"
    return Machine(name, processor, within, between, ranks_per_node, **options)


def machine(net: Network) -> Machine:
    inner, outer = (Link(bandwidth, 0.0) for bandwidth in net.bandwidth)
    return plain_machine(inner, outer, SIZES[1])


def product_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def pipelined(
    stages: Any, x: Tensor, schedule: Any, *, pipeline: int = 2, **options: Any
) -> PipelineSimulation:
    """A step of a pipeline; by default with two data-parallel ranks of each stage."""
    options = {"batch": x, "target": x, "loss": product_loss, "microbatches": 4, **options}
    world_size = options.pop("world_size", 2 * pipeline)
    return simulate_pipeline(stages, world_size, pipeline=pipeline, schedule=schedule, **options)


def simulated(
    pair: tuple[str, str],
    net: Network,
    *,
    budget: int | None = None,
    has_embedding: bool = False,
    microbatches: int = 1,
    **options: Any,
) -> Simulation:
    """A step of the engine."""
    inputs = torch.zeros(ROWS, dtype=torch.long) if has_embedding else torch.zeros(ROWS, WIDTH)
    return simulate(
        lambda: Tower(has_embedding),
        math.prod(SIZES),
        batch=inputs,
        mesh=SIZES,
        machine=machine(net),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        microbatches=microbatches,
        strategy=pair[0],
        outer_strategy=pair[1],
        units=[LinearBlock, nn.Embedding] if has_embedding else [LinearBlock],
        config=DistributedDataParallelConfig(suggested_communication_unit_size=budget),
        **options,
    )


def budgets_of(found: Simulation) -> tuple[int, tuple[int, int]]:
    """The prefetch window in elements, and the limit on gradients in flight."""
    return found.budget, found.staging_budget


def ideal(
    pair: tuple[str, str],
    net: Network,
    *,
    budgets: tuple[int, tuple[int, int]],
    has_embedding: bool = False,
    microbatches: int = 1,
) -> Ideal:
    """The ideal schedule of the same step. ``budgets``: limits on prefetch and staging."""
    block = IdealUnit(BLOCK_NUMEL, LINEARS * _PRODUCT, 2 * _PRODUCT, BACKWARD)
    units = [block] * BLOCKS
    if has_embedding:
        units = [IdealUnit(VOCABULARY * WIDTH, 0.0, 0.0, 0.0, reads_in_backward=False), *units]
    else:
        # The model's input needs no gradient.
        units[0] = IdealUnit(BLOCK_NUMEL, LINEARS * _PRODUCT, 2 * _PRODUCT, BACKWARD - _PRODUCT)
    return Ideal(units, Strategy.from_names(*pair), net, budgets, microbatches)
