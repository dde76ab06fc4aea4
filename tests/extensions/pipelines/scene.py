"""Stages of a model, sharded over data-parallel ranks and trained by a schedule on many ranks, and
trained by plain torch on one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_engine as fe
from fsdp_engine.pipelining import PipelineStage
from fsdp_engine.strategies import LEVELS as ALL_LEVELS
from tests import reference

DIM = 6
NUM_STEPS = 2
NUM_MICROBATCHES = 4
ROWS = 2  # of a microbatch on one data-parallel rank

LEVELS = tuple(ALL_LEVELS)
# One stage on each rank, or two of them: s and s + ranks, or, in V-schedules, s and n - 1 - s.
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble",)
SCHEDULES = SINGLE + LOOPED + V_SHAPED

# Before torch 2.13 a rank that holds stages next to each other (V-schedules; all stages) sends to
# itself as it starts, which gloo does not do.
passes_on_to_itself = pytest.mark.skipif(
    not hasattr(PipelineStage, "_warmup_forward_vote"), reason="torch sends to itself on gloo"
)


def marked(schedules: Sequence[str], *, default: Sequence[str]) -> list[Any]:
    """Parameters of tests: those not named in ``default`` are run by ``make test-all`` alone."""
    marks = {each: [passes_on_to_itself] if each in V_SHAPED else [] for each in schedules}
    for each in set(schedules) - set(default):
        marks[each].append(pytest.mark.thorough)
    return [pytest.param(each, marks=marks[each]) for each in schedules]


class Block(nn.Module):
    """A residual block whose norm has a weight between the input and the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stage(nn.Module):
    """Blocks between a linear of its own and a gain that its forward reads. ``what`` selects a
    case of ``SPECIAL``, or "deep"."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(6 if what == "deep" else 2))
        self.gain = nn.Parameter(torch.rand(DIM) + 0.5)
        if what == "tied":
            self.blocks[1].up.weight = self.blocks[0].up.weight
        if what == "unused":
            self.blocks[0].spare = nn.Linear(DIM, DIM)
            self.spare = nn.Parameter(torch.randn(3))
        if what == "frozen":
            self.blocks[0].requires_grad_(False)
            self.first.bias.requires_grad_(False)
        if what == "parametrized":
            for block in self.blocks:
                nn.utils.parametrizations.weight_norm(block.down)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * self.gain


SPECIAL = ("tied", "unused", "frozen", "parametrized")


def make_stages(num_stages: int, what: str = "") -> list[Stage]:
    torch.manual_seed(3)
    return [Stage(what) for _ in range(num_stages)]


def batches(num_data_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step, ``[data-parallel ranks, rows, DIM]``."""
    generator = torch.Generator().manual_seed(4)
    shape = (num_data_ranks, NUM_MICROBATCHES * ROWS, DIM)
    for _ in range(NUM_STEPS):
        yield torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target)


@functools.cache
def trained_alone(
    num_stages: int, num_data_ranks: int, what: str = "", dtype: torch.dtype | None = None
) -> tuple[list[Stage], list[float]]:
    """New stages trained by one process on the batches of all ranks, in ``dtype``, and the mean
    loss of each step."""
    stages = make_stages(num_stages, what)
    data = []
    for x, y in batches(num_data_ranks):
        chunks = zip(x.chunk(NUM_MICROBATCHES, 1), y.chunk(NUM_MICROBATCHES, 1), strict=True)
        data.append([list(zip(*parts, strict=True)) for parts in chunks])
    steps = reference.train(
        nn.Sequential(*stages),
        data,
        compute_dtype=dtype,
        loss_of=lambda model, batch: loss_of(model(batch[0]), batch[1]),
    )
    return stages, [step.loss for step in steps]


@dataclass
class Pipeline:
    """This rank's stages, and the schedule that runs them. ``losses`` are those of each step's
    microbatches, on ranks with the last stage."""

    indices: list[int]
    modules: list[Stage]
    engines: list[fe.Engine]
    schedule: Any
    data_rank: int
    losses: list[list[float]]

    def step(self, x: Tensor, y: Tensor) -> None:
        losses: list[Tensor] = []
        num_stages = self.schedule._num_stages
        device = self.engines[0].mesh.device
        args = [x[self.data_rank].to(device)] if 0 in self.indices else []
        last = num_stages - 1 in self.indices
        target = {"target": y[self.data_rank].to(device), "losses": losses} if last else {}
        self.schedule.step(*args, **target)
        self.losses.append([loss.item() for loss in losses])


def make_pipeline(
    schedule: str,
    level: str,
    outer: str = "no_shard",
    *,
    what: str = "",
    data_shape: tuple[int, ...] = (2,),
    stage_class: Any = PipelineStage,
    device_type: str = "cpu",
    **options: Any,
) -> Pipeline:
    """Stages of this rank, sharded over its data-parallel ranks, on ``device_type``."""
    num_ranks = dist.get_world_size() // math.prod(data_shape)
    names = ("pipeline", *("outer", "inner")[-len(data_shape) :])
    mesh = init_device_mesh(device_type, (num_ranks, *data_shape), mesh_dim_names=names)
    rank = mesh.get_local_rank("pipeline")
    indices = stage_indices(schedule, rank, num_ranks)
    stages = make_stages(num_ranks * len(indices), what)
    modules = [stages[index] for index in indices]
    options = {"min_unit_size": 0, **options}
    data: DeviceMesh = mesh[names[1:]]
    engines = [fe.shard(module, data, level, outer, **options) for module in modules]
    group = mesh.get_group("pipeline")
    device = torch.device(device_type)
    run = make_schedule(schedule, modules, indices, group, stage_class, device)
    data_rank = engines[0].mesh.rank
    return Pipeline(indices, modules, engines, run, data_rank, [])


def make_schedule(
    schedule: str,
    modules: list[Stage],
    indices: list[int],
    group: Any,
    stage_class: Any,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Any:
    stages = [
        stage_class(module, index, group.size() * len(indices), device, group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    make = getattr(pipelining, f"Schedule{schedule}")
    return make(stages[0] if schedule in SINGLE else stages, NUM_MICROBATCHES, loss_fn=loss_of)


def stage_indices(schedule: str, rank: int, num_ranks: int) -> list[int]:
    if schedule in SINGLE:
        return [rank]
    if schedule in V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank, rank + num_ranks]


def train(pipeline: Pipeline, num_data_ranks: int) -> None:
    optimizers = [reference.sgd(module.parameters()) for module in pipeline.modules]
    for x, y in batches(num_data_ranks):
        pipeline.step(x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
