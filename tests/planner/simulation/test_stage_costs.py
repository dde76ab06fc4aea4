"""Steps of pipelines from the costs of stages, compared with simulations of all forwards and
backwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.simulation import pipeline as pipelines
from fsdp_engine.planner.simulation.pipeline_job import PipelineJob
from fsdp_engine.planner.simulation.stage_costs import StageCosts, stage_costs
from tests.models import Mlp
from tests.planner.simulation.memory_runs import HOST
from tests.planner.simulation.scene import pipelined

WIDTH, ROWS = 1024, 512
ON_GPUS = {"machine": fe.H100, "mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def blocks(index: int, num_stages: int) -> nn.Module:
    """A stage of two blocks; the last one has a head."""
    made: list[Any] = [Mlp(WIDTH, 4 * WIDTH) for _ in range(2)]
    for number, block in enumerate(made):
        block.block_number = 2 * index + number
    head = [nn.Linear(WIDTH, WIDTH)] * (index == num_stages - 1)
    return nn.Sequential(*made, *head)


def simulated(quick: bool, schedule: str, **options: Any) -> fe.PipelineSimulation:
    options = {"stages": blocks, "microbatches": 6, "pipeline": 2, **options}
    options |= {"world_size": 4 * options["pipeline"], "quick": quick}
    return pipelined(options.pop("stages"), torch.zeros(ROWS, WIDTH), schedule, **options)


LEVELS = ["no_shard", "optim", "optim_grads_params"]
LEVEL_3, HOST_STATE = "optim_grads_params", fe.Offload(optimizer_state="host")
UNSPLIT = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
FEW: list[tuple[str, str, dict[str, Any]]] = [
    ("1F1B", "optim", {"machine": HOST}),
    ("Interleaved1F1B", LEVEL_3, {**ON_GPUS, "offload": HOST_STATE}),
    ("ZBVZeroBubble", "optim", {**ON_GPUS, "checkpointing": True}),
]
EVERY = [
    *itertools.product([*UNSPLIT, *SPLIT], LEVELS, [ON_GPUS, {"machine": HOST}]),
    # A turn of a V between other stages, and as many microbatches again as a stage runs alone.
    *itertools.product(SPLIT, LEVELS[1:], [{**ON_GPUS, "pipeline": 4, "microbatches": 12}]),
]


@pytest.mark.parametrize(
    ("schedule", "level", "options"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.thorough) for each in EVERY if each not in FEW)],
)
def test_a_quick_simulation_is_like_a_full_one(
    schedule: str, level: str, options: dict[str, Any]
) -> None:
    """Steps, memory, bytes and flops."""
    within = 0.02 if "pipeline" in options else 0.03 if "checkpointing" in options else 0.04
    quick, full = (simulated(each, schedule, strategy=level, **options) for each in (True, False))
    assert quick.actions == full.actions
    assert quick.stages == full.stages
    assert quick.seconds == pytest.approx(full.seconds, rel=within)
    assert quick.mfu * quick.seconds == pytest.approx(full.mfu * full.seconds)
    assert quick.tokens_per_second * quick.seconds == pytest.approx(
        full.tokens_per_second * full.seconds
    )
    for one, other in zip(quick.ranks, full.ranks, strict=True):
        assert 0.99 * other.peak_bytes <= one.peak_bytes <= 1.02 * other.peak_bytes
        assert one.sent_bytes == pytest.approx(other.sent_bytes, rel=0.01)
        assert one.compute_seconds == pytest.approx(other.compute_seconds, rel=0.02)
        assert one.copied_bytes == pytest.approx(other.copied_bytes)
        assert one.elsewhere == other.elsewhere
        assert one.checkpoint_bytes == other.checkpoint_bytes
        assert one.title == other.title


def test_stages_that_are_alike_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(job: PipelineJob, index: int, *args: Any) -> StageCosts:
        tried.append(index)
        return stage_costs(job, index, *args)

    monkeypatch.setattr(pipelines, "stage_costs", noted)
    # The first returns no gradient of its inputs, and receives nothing; the last has a head.
    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    simulated(True, "1F1B", pipeline=4, microbatches=8, batch=x, **ON_GPUS)
    assert tried == [0, 1, 3]


def test_blocks_of_stages_are_compiled() -> None:
    def compiled(index: int, num_stages: int) -> nn.Module:
        stage = blocks(index, num_stages)
        for block in stage.children():
            block.compile()
        return stage

    options = {"strategy": "optim", "microbatches": 4, **ON_GPUS}
    by_hand = simulated(True, "1F1B", stages=compiled, **options)
    found = simulated(True, "1F1B", compile=True, **options)
    assert found.seconds == by_hand.seconds
    assert found.peak_bytes == by_hand.peak_bytes
    assert found.seconds < simulated(True, "1F1B", **options).seconds
