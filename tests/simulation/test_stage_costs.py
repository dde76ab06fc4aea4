"""Steps of pipelines from the costs of stages, compared with simulations of all forwards and
backwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.simulation import pipeline as pipelines
from fsdp_engine.simulation import stage_costs as stage_costs_module
from fsdp_engine.simulation.pipeline_job import FORWARD, LETTERS, PipelineJob
from fsdp_engine.simulation.stage_costs import StageCosts, stage_costs
from tests.simulation.memory_runs import HOST

WIDTH, ROWS = 1024, 512
ON_GPUS = {"machine": fe.H100, "mp_policy": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


class Block(nn.Module):
    """Two linears that keep activations."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.block_number = number
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def blocks(index: int, num_stages: int) -> nn.Module:
    """A stage of two blocks; the last one has a head."""
    made: list[nn.Module] = [Block(2 * index + number) for number in range(2)]
    head = [nn.Linear(WIDTH, WIDTH)] * (index == num_stages - 1)
    return nn.Sequential(*made, *head)


def product_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def simulated(quick: bool, schedule: str, **options: Any) -> fe.PipelineSimulation:
    x = torch.zeros(ROWS, WIDTH)
    given: dict[str, Any] = {"stages": blocks, "pipeline": 2, "microbatches": 6, **options}
    pipeline = given.pop("pipeline")
    return fe.simulate_pipeline(
        given.pop("stages"),
        given.pop("world_size", 4 * pipeline),
        pipeline=pipeline,
        batch=given.pop("batch", x),
        target=x,
        loss=product_loss,
        schedule=schedule,
        quick=quick,
        **given,
    )


FEW = [("1F1B", "optim", "device"), ("1F1B", "optim_grads_params", "device")]
FEW += [("1F1B", "optim", "host"), ("Interleaved1F1B", "optim_grads_params", "device")]
FEW += [("ZBVZeroBubble", "optim_grads_params", "device"), ("DualPipeV", "optim", "device")]
UNSPLIT = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
EVERY = itertools.product(
    [*UNSPLIT, *SPLIT],
    ["no_shard", "optim", "optim_grads_params"],
    ["device", "host"],
)


@pytest.mark.parametrize(
    ("schedule", "level", "machine"),
    [pytest.param(*each, marks=[] if each in FEW else pytest.mark.thorough) for each in EVERY],
)
def test_a_quick_simulation_is_like_a_full_one(schedule: str, level: str, machine: str) -> None:
    """Steps, memory, bytes and flops."""
    options: dict[str, Any] = {"strategy": level, **(ON_GPUS if machine == "device" else {})}
    if machine == "host":
        options |= {"machine": HOST}
    quick, full = (simulated(each, schedule, **options) for each in (True, False))
    assert quick.actions == full.actions
    assert quick.stages == full.stages
    assert quick.seconds == pytest.approx(full.seconds, rel=0.04)
    assert quick.mfu * quick.seconds == pytest.approx(full.mfu * full.seconds)
    assert quick.tokens_per_second * quick.seconds == pytest.approx(
        full.tokens_per_second * full.seconds
    )
    for one, other in zip(quick.ranks, full.ranks, strict=True):
        print(schedule, level, machine, one.peak_bytes / other.peak_bytes)
        assert 0.99 * other.peak_bytes <= one.peak_bytes <= 1.02 * other.peak_bytes
        assert one.sent_bytes == pytest.approx(other.sent_bytes, rel=0.01)
        assert one.compute_seconds == pytest.approx(other.compute_seconds, rel=0.02)
        assert one.checkpoint_bytes == other.checkpoint_bytes
        assert one.title == other.title


def test_stages_that_are_alike_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def noted(job: PipelineJob, index: int, *args: Any) -> StageCosts:
        tried.append(index)
        return stage_costs(job, index, *args)

    monkeypatch.setattr(pipelines, "stage_costs", noted)
    simulated(True, "Interleaved1F1B", pipeline=4, microbatches=8, **ON_GPUS)
    # The first returns no gradient of its inputs; the last has a head.
    assert tried == [0, 1, 7]
    tried.clear()
    x = torch.zeros(ROWS, WIDTH, requires_grad=True)
    simulated(True, "1F1B", pipeline=4, microbatches=8, batch=x, **ON_GPUS)
    assert tried == [0, 1, 3]  # the first receives nothing
    tried.clear()
    simulated(True, "1F1B", pipeline=4, stages=_with_a_wide_block(2), **ON_GPUS)
    assert tried == [0, 1, 2, 3]


def _with_a_wide_block(wide: int) -> Callable[[int, int], nn.Module]:
    def made(index: int, num_stages: int) -> nn.Module:
        stage = blocks(index, num_stages)
        if index == wide:
            stage.append(nn.Linear(WIDTH, WIDTH))
        return stage

    return made


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


def test_a_step_of_few_microbatches_is_simulated_in_full() -> None:
    quick, full = (simulated(each, "1F1B", microbatches=2, **ON_GPUS) for each in (True, False))
    assert quick.ranks == full.ranks


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_a_pipeline_of_four_ranks_with_split_backwards(schedule: str, level: str) -> None:
    """A turn of a V between other stages, and as many microbatches again as a stage runs alone."""
    options = {"pipeline": 4, "microbatches": 12, "strategy": level, **ON_GPUS}
    quick, full = (simulated(each, schedule, **options) for each in (True, False))
    assert quick.actions == full.actions
    assert quick.seconds == pytest.approx(full.seconds, rel=0.02)
    assert quick.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("recompute", "most"), [(True, 1.01), pytest.param("offload", 1.04, marks=pytest.mark.thorough)]
)
def test_split_backwards_of_checkpointed_blocks(recompute: Any, most: float) -> None:
    options = {"checkpointing": recompute, "strategy": "optim", **ON_GPUS}
    quick, full = (simulated(each, "ZBVZeroBubble", **options) for each in (True, False))
    assert quick.seconds == pytest.approx(full.seconds, rel=0.03)
    for one, other in zip(quick.ranks, full.ranks, strict=True):
        assert 0.99 * other.peak_bytes <= one.peak_bytes <= 1.02 * other.peak_bytes


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("letters", stage_costs_module._ORDERS)
def test_stages_alone_run_all_cases(letters: str, stage: int) -> None:
    """In particular those that torch's schedules have."""
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    found = set()
    for order in stage_costs_module._ORDERS[letters]:
        letters_of_order = [each[0] for each in order.split()]
        assert set(letters_of_order) == set(letters)
        cases = stage_costs_module._Cases(stage)
        last = len(letters_of_order) - 1
        found |= {
            cases.of(kinds[each], is_last=number == last)
            for number, each in enumerate(letters_of_order)
        }
    before = {kinds[each] for each in letters if stage > 0 or each != "I"}
    whole = {kinds[each] for each in letters if each in "BW"}
    assert found >= {(kinds[each], other) for each in letters for other in before}
    assert found >= {(kind, end) for kind in whole for end in ("first", "last")}
    assert (FORWARD, "first") in found


def test_offloaded_state_is_copied_in_each_step() -> None:
    options = {"offload": fe.Offload(optimizer_state="host"), **ON_GPUS}
    quick, full = (simulated(each, "1F1B", **options) for each in (True, False))
    for one, other in zip(quick.ranks, full.ranks, strict=True):
        assert one.elsewhere == other.elsewhere
        assert one.copied_bytes == pytest.approx(other.copied_bytes)
    assert quick.seconds == pytest.approx(full.seconds, rel=0.04)
