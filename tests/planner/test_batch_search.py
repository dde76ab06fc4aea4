"""The largest microbatch and the number of microbatches of a global batch; quick plans."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from fsdp_engine.planner.batch_search import (
    divisors,
    fastest_fitting,
    largest_fitting,
    rows_of_rank,
)
from fsdp_engine.planner.candidates import Candidate, quick_candidates
from fsdp_engine.planner.job import MOST_SIMULATED
from fsdp_engine.planner.outcome import Outcome, Times
from fsdp_engine.strategies import ALL_STRATEGIES
from tests.planner.made_plans import (
    LENGTH,
    Words,
    assert_same_outcome,
    quick_plan,
    simulated_as,
    words,
)

WORLD = 4
POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
# The host of this machine keeps the device busy even with a small model.
DEVICE = replace(fe.H100, ranks_per_node=2, host_seconds=0.0)
SLOW = replace(DEVICE, between_nodes=replace(DEVICE.between_nodes, bandwidth=2e8))
HOST = replace(
    DEVICE,
    host_runs_ahead=False,
    within_node=replace(DEVICE.within_node, processor_share=0.5),
    processor=replace(DEVICE.processor, overlap=0.3, function_seconds=1e-9),
)


def outcome_of(candidate: Candidate, machine: fe.Machine, simulated: int) -> Outcome:
    """The outcome of a step, computed from ``simulated`` of its microbatches."""
    options = {"machine": machine, "mp_policy": POLICY, "min_unit_size": 0}
    batch, build = words(candidate.microbatch_size), functools.partial(Words, 3)
    found = simulated_as(candidate, build, batch, microbatches=simulated, **options)
    items = candidate.microbatches * candidate.microbatch_size * LENGTH * WORLD
    more = candidate.microbatches - simulated
    return Outcome.of_simulation(candidate, found, items, 1e12, more)


CANDIDATES = [
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
    candidate = replace(candidate, microbatches=5)
    found, expected = (outcome_of(candidate, machine, each) for each in (MOST_SIMULATED, 5))
    assert_same_outcome(found, expected)


def test_the_rows_of_a_rank_are_the_nearest_number() -> None:
    assert rows_of_rank(4 * 2**20, 64, 8192, "tokens") == 8
    assert rows_of_rank(4e6, 64, 8192, "tokens") == 8  # 7.63
    with pytest.raises(ValueError, match=r"multiple of 524,288 tokens \(64 ranks x 8,192 tokens"):
        rows_of_rank(1.5 * 524_288, 64, 8192, "tokens")
    with pytest.raises(ValueError, match="found 1,000"):
        rows_of_rank(1000, 64, 8192, "tokens")


@pytest.mark.parametrize("limit", [50, 111, 130, 171, 1311, 1312, 10_000])
def test_the_largest_microbatch_that_fits_is_found_with_few_simulations(limit: int) -> None:
    """Memory of a step: 110 for weights and constant parts, 1 for each row, and from 8 rows on 2
    more, as for a workspace."""
    tried: list[int] = []

    def simulated(each: Candidate) -> Outcome:
        size = each.microbatch_size
        assert size is not None
        assert each.microbatches == rows // size
        tried.append(size)
        activations = 10 + size + 2 * (size >= 8)
        memory = {"weights": 100, "activations": activations}
        return Outcome(each, memory, {}, max(100 + activations - limit, 0.0))

    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    rows, sizes = 1200, divisors(1200)
    found = largest_fitting(
        Candidate((4,), "optim", "no_shard", False), rows, sizes, limit, simulated
    )
    fitting = [size for size in sizes if 110 + size + 2 * (size >= 8) <= limit]
    assert found.microbatch_size == max([1, *fitting])
    assert found.microbatches == rows // found.microbatch_size
    assert len(tried) <= 8  # of 30 sizes


def test_the_fastest_microbatch_that_fits() -> None:
    candidate = Candidate((2,), "optim", "no_shard", False, pipeline=2)
    for rates, fitting, expected in (
        ({1: 3.0, 2: 4.0, 4: 3.0, 8: 5.0}, 8, 2),  # until one is slower
        ({1: 3.0, 2: 4.0, 4: 5.0, 8: 6.0}, 4, 4),  # until one does not fit
        ({1: 3.0, 2: 4.0, 4: 5.0, 8: 6.0}, 0, 1),
    ):

        def simulated(each: Candidate, rates: Any = rates, fitting: int = fitting) -> Outcome:
            size = each.microbatch_size
            assert size is not None
            assert each.microbatches == 8 // size
            times, lacking = Times(1.0, 1.0, {}), float(size > fitting)
            return Outcome(each, {}, {}, lacking, items=rates[size], times=times)

        found = fastest_fitting(candidate, 8, list(rates), simulated)
        assert (found.microbatch_size, found.microbatches) == (expected, 8 // expected)


def planned(memory: float, make: Any = fe.plan, **options: Any) -> fe.StrategyPlan:
    """A plan of one block on one axis."""
    given = {"machine": DEVICE, "meshes": [(WORLD,)], "checkpointing": (False,), **options}
    build = functools.partial(Words, 1)
    return make(build, words, world_size=WORLD, memory=memory, min_unit_size=0, **given)


def test_a_global_batch_has_the_largest_microbatch_of_each_candidate() -> None:
    total = WORLD * 4 * LENGTH
    roomy = planned(2.0**30, global_batch=total)
    assert roomy.setting.global_batch == total
    assert {each.items for each in roomy.outcomes} == {total}
    assert {each.candidate.microbatch_size for each in roomy.outcomes} == {4}
    tight = planned(max(each.peak_bytes for each in roomy.outcomes) - 1, global_batch=total)
    sizes = {each.candidate.strategy: each.candidate.microbatch_size for each in tight.outcomes}
    assert min(sizes.values()) < 4
    assert f"{total:,} tokens per step" in str(tight)
    chosen = tight.chosen.candidate
    assert f"{chosen.microbatches} x {chosen.microbatch_size}" in str(tight)


def test_given_sizes_and_lengths_alone_are_tried(simulated: list[Any]) -> None:
    found = planned(2.0**30, global_batch=WORLD * 6 * LENGTH, microbatch_sizes=(2, 4))
    assert {each.candidate.microbatch_size for each in found.outcomes} == {2}
    found = planned(2.0**30, sequences=(4, LENGTH))
    rows = {(each.candidate.sequence, each.items) for each in found.outcomes}
    assert rows == {(4, 4 * 4 * WORLD), (LENGTH, 4 * LENGTH * WORLD)}
    assert "sequence" in str(found)


def test_quick_candidates_are_those_of_level_3_first() -> None:
    level, meshes, recompute = "optim_grads_params", ((16,), (2, 8)), (False, "selective", True)
    every = [
        Candidate(mesh, pair.inner.name, pair.outer.name, each)
        for mesh, each, pair in itertools.product(meshes, recompute, ALL_STRATEGIES)
        if len(mesh) == 2 or pair.outer.name == "no_shard"
    ]
    first = [(mesh, level, "no_shard") for mesh in meshes] + [((2, 8), level, "optim")]
    pairs = [*first, ((16,), "optim", "no_shard"), ((16,), "no_shard", "no_shard")]
    expected = [Candidate(*pair, each) for pair in pairs for each in recompute[::-1]]
    assert quick_candidates(every) == expected


def test_a_quick_plan_of_a_model_that_fits_easily_tries_all_levels() -> None:
    quick = fe.plan(Words, words(), world_size=2, quick=True)
    assert quick.chosen.candidate == Candidate((2,), "no_shard", "no_shard", False)
    tried = [(each.candidate.strategy, each.candidate.checkpointing) for each in quick.outcomes]
    assert ("optim", False) in tried
    assert ("no_shard", True) not in tried
    assert len(tried) == len(set(tried)) == 6


def test_a_quick_plan_ends_when_its_time_is_over_and_a_full_one_simulates_the_others(
    simulated: list[Any],
) -> None:
    quick = planned(2.0**30, quick_plan, fitting=1, checkpointing=(True,))
    assert [each.candidate.strategy for each in quick.outcomes] == ["optim_grads_params"]
    levels = {"optim_grads_params", "optim", "no_shard"}
    compared = quick.replan(is_compared=True)  # tries all levels, however long it takes
    assert {each.candidate.strategy for each in compared.outcomes} == levels
    assert quick.setting.is_quick
    assert "This is a quick plan, of 1 of the candidates: others may be faster." in str(quick)
    quick = planned(2.0**30, quick_plan)
    simulated.clear()
    full = quick.full()
    tried = [each["strategy"] for each in simulated]
    # Level 3, ZeRO-1 and DDP are known, so level 2 is simulated; two more runs try the choice with
    # a larger microbatch, and with more microbatches.
    assert tried.count("optim_grads") == 1 + 2 * (full.chosen.candidate.strategy == "optim_grads")
    assert len(tried) == 3
    assert not full.setting.is_quick
    assert full.outcomes == planned(2.0**30).outcomes
