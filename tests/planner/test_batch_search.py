"""The largest microbatch and the number of microbatches of a global batch; quick plans."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner import job, strategy_search
from fsdp_engine.planner.batch_search import divisors, largest_fitting, rows_of_rank
from fsdp_engine.planner.candidates import Candidate, quick_candidates
from fsdp_engine.planner.job import MOST_SIMULATED
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.strategies import ALL_STRATEGIES
from tests.models import LENGTH, Transformer, token_batch

WORLD = 4
POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# Its host keeps the device busy, also with such a small model.
DEVICE = replace(fe.H100, ranks_per_node=2, host_seconds=0.0)
SLOW = replace(DEVICE, between_nodes=replace(DEVICE.between_nodes, bandwidth=2e8))
HOST = replace(
    DEVICE,
    host_runs_ahead=False,
    within_node=replace(DEVICE.within_node, processor_share=0.5),
    processor=replace(DEVICE.processor, overlap=0.3, function_seconds=1e-9),
)


def build() -> nn.Module:
    return Transformer(num_blocks=3, dim=32)


def build_shallow() -> nn.Module:
    return Transformer(num_blocks=1, dim=32)


def batch(size: int = 1, sequence: int = LENGTH) -> tuple[Tensor, Tensor]:
    tokens, labels = token_batch(size, 1)
    return tokens[:, :sequence], labels[:, :sequence]


def outcome_of(candidate: Candidate, machine: fe.Machine, simulated: int) -> Outcome:
    """The outcome of a step of which this number of microbatches is simulated."""
    found = fe.simulate(
        build,
        WORLD,
        batch=batch(candidate.microbatch_size),
        mesh=candidate.mesh,
        machine=machine,
        strategy=candidate.strategy,
        outer_strategy=candidate.outer_strategy,
        checkpointing=candidate.checkpointing,
        microbatches=simulated,
        mp_policy=POLICY,
    )
    items = candidate.microbatches * candidate.microbatch_size * LENGTH * WORLD
    more = candidate.microbatches - simulated
    return Outcome.of_simulation(candidate, found, items, 1e12, more)


CANDIDATES = [
    Candidate((4,), "no_shard", "no_shard", False, 2),
    Candidate((4,), "optim_grads", "no_shard", True, 2),
    Candidate((2, 2), "optim_grads_params", "optim", "offload", 2),
    Candidate((2, 2), "optim_grads_params", "optim_grads_params", True, 2),
]


@pytest.mark.parametrize("machine", [DEVICE, SLOW, HOST], ids=["device", "slow", "host"])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_a_step_of_many_microbatches_is_that_of_three_and_equal_ones(
    candidate: Candidate, machine: fe.Machine
) -> None:
    if machine is HOST and candidate.checkpointing == "offload":
        candidate = replace(candidate, checkpointing=False)
    candidate = replace(candidate, microbatches=6)
    found, expected = (outcome_of(candidate, machine, each) for each in (MOST_SIMULATED, 6))
    assert found.memory == expected.memory
    assert found.items == expected.items
    assert found.sent == pytest.approx(expected.sent)
    assert found.model_flops == pytest.approx(expected.model_flops)
    assert found.times.step == pytest.approx(expected.times.step, rel=1e-9)
    assert found.times.compute == pytest.approx(expected.times.compute, rel=1e-9)
    assert found.times.mfu == pytest.approx(expected.times.mfu, rel=1e-9)
    for what, seconds in expected.times.exposed.items():
        assert found.times.exposed[what] == pytest.approx(seconds, abs=1e-9 * expected.times.step)


def test_the_rows_of_a_rank_are_the_nearest_number() -> None:
    assert rows_of_rank(4 * 2**20, 64, 8192, "tokens") == 8
    assert rows_of_rank(4e6, 64, 8192, "tokens") == 8  # 7.63
    with pytest.raises(ValueError, match=r"multiple of 524,288 tokens \(64 ranks x 8,192 tokens"):
        rows_of_rank(1.5 * 524_288, 64, 8192, "tokens")
    with pytest.raises(ValueError, match="found 1,000"):
        rows_of_rank(1000, 64, 8192, "tokens")


def test_divisors_are_all_of_them() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


@pytest.mark.parametrize("limit", [50, 110, 111, 130, 171, 1000, 1311, 1312, 10_000])
def test_the_largest_microbatch_that_fits_is_found_with_few_simulations(limit: int) -> None:
    """Memory of a step: 100 for weights, 1 for each row beside 10 that no size changes, and 2 more
    from 8 rows on, as of a workspace."""
    tried: list[int] = []

    def simulated(each: Candidate) -> Outcome:
        size = each.microbatch_size
        assert size is not None
        assert each.microbatches == rows // size
        tried.append(size)
        activations = 10 + size + 2 * (size >= 8)
        memory = {"weights": 100, "activations": activations}
        return Outcome(each, memory, {}, max(100 + activations - limit, 0.0))

    rows, sizes = 1200, divisors(1200)
    found = largest_fitting(
        Candidate((4,), "optim", "no_shard", False), rows, sizes, limit, simulated
    )
    fitting = [size for size in sizes if 110 + size + 2 * (size >= 8) <= limit]
    assert found.microbatch_size == max([1, *fitting])
    assert found.microbatches == rows // found.microbatch_size
    assert len(tried) <= 8  # of 30 sizes


def planned(memory: float, **options: object) -> fe.StrategyPlan:
    return fe.plan(
        build_shallow,
        batch,
        world_size=WORLD,
        machine=DEVICE,
        memory=memory,
        meshes=[(WORLD,)],
        checkpointing=(False,),
        mp_policy=POLICY,
        min_unit_size=0,
        **options,
    )


def test_a_global_batch_has_the_largest_microbatch_of_each_candidate() -> None:
    total = WORLD * 4 * LENGTH
    roomy = planned(2.0**30, global_batch=total)
    assert roomy.setting.global_batch == total
    assert {each.items for each in roomy.outcomes} == {total}
    assert {each.candidate.microbatch_size for each in roomy.outcomes} == {4}
    tight = planned(max(each.peak_bytes for each in roomy.outcomes) - 1, global_batch=total)
    sizes = {each.candidate.strategy: each.candidate.microbatch_size for each in tight.outcomes}
    assert min(sizes.values()) < 4
    by_size = planned(tight.setting.memory, microbatch_sizes=(1, 2, 4))
    for each in by_size.outcomes:  # of one microbatch, whose memory is not larger
        size = each.candidate.microbatch_size
        if each.lacking:
            assert sizes[each.candidate.strategy] < size
    assert f"{total:,} tokens per step" in str(tight)
    chosen = tight.chosen.candidate
    assert f"{chosen.microbatches} x {chosen.microbatch_size}" in str(tight)


def test_a_global_batch_takes_given_sizes_alone() -> None:
    found = planned(2.0**30, global_batch=WORLD * 6 * LENGTH, microbatch_sizes=(2, 4))
    assert {each.candidate.microbatch_size for each in found.outcomes} == {2}
    with pytest.raises(ValueError, match=r"expected a divisor of a rank's 6 rows in a step"):
        planned(2.0**30, global_batch=WORLD * 6 * LENGTH, microbatch_sizes=(4,))


def test_sequences_are_tried_at_each_length() -> None:
    found = planned(2.0**30, sequences=(4, LENGTH))
    rows = {(each.candidate.sequence, each.items) for each in found.outcomes}
    assert rows == {(4, 4 * WORLD), (LENGTH, LENGTH * WORLD)}
    assert "sequence" in str(found)


def test_quick_candidates_are_those_of_level_3_first() -> None:
    every = [
        Candidate(mesh, pair.inner.name, pair.outer.name, recompute)
        for mesh, recompute, pair in itertools.product(
            ((16,), (2, 8)), (False, "selective", True), ALL_STRATEGIES
        )
        if len(mesh) == 2 or pair.outer.name == "no_shard"
    ]
    level, ddp = "optim_grads_params", "no_shard"
    pairs = [
        ((16,), level, ddp),
        ((2, 8), level, ddp),
        ((2, 8), level, "optim"),
        ((16,), "optim", ddp),
        ((16,), ddp, ddp),
    ]
    assert quick_candidates(every) == [
        Candidate(*pair, recompute) for pair in pairs for recompute in (True, "selective", False)
    ]


def test_a_quick_plan_ends_with_the_first_that_fits_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy_search, "QUICK_SECONDS", 0.0)
    quick = planned(2.0**30, quick=True)
    assert [each.candidate.strategy for each in quick.outcomes] == ["optim_grads_params"]
    for row in quick.what_if("memory_bytes=1x").rows:  # all of them, whatever the time
        assert row.chosen.candidate.strategy in ("no_shard", "optim")
    assert quick.setting.is_quick
    assert "This is a quick plan, of 1 of the candidates: others may be faster." in str(quick)


@pytest.mark.thorough
def test_the_full_plan_after_a_quick_one_simulates_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy_search, "QUICK_SECONDS", math.inf)
    quick = planned(2.0**30, quick=True)
    tried = []
    simulate = job.simulate

    def counted(*args: object, **options: object) -> fe.Simulation:
        tried.append(options["strategy"])
        return simulate(*args, **options)

    monkeypatch.setattr(job, "simulate", counted)
    full = quick.full()
    # Level 3, ZeRO-1 and DDP are there; the choice is tried with a larger batch, and with more.
    assert tried.count("optim_grads") == 1 + 2 * (full.chosen.candidate.strategy == "optim_grads")
    assert len(tried) == 3
    assert not full.setting.is_quick
    assert full.outcomes == planned(2.0**30).outcomes
