"""The exposed communication of the engine is the minimum.

The engine runs on the simulated machine of ``scene.py``; ``ideal.py`` computes the minimum
independently of the engine. Compute takes twice the time of communication, so that communication
that is issued in time is hidden.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_engine.runtime import schedule
from fsdp_engine.runtime.reductions import Reductions
from tests.matrices import thorough_but
from tests.pairs import FEW_PAIRS, PAIRS
from tests.planner.simulation.scene import (
    BACKWARD,
    BLOCK_NUMEL,
    BLOCKS,
    budgets_of,
    ideal,
    network,
    simulated,
)

NETWORK = network(0.5)
BUDGETS = {"none": 0, "one unit": BLOCK_NUMEL, "default": None}
LEVEL_2, LEVEL_3 = ("optim_grads", "no_shard"), ("optim_grads_params", "no_shard")

# The ordinary tests run a pair with unsharded weights, and one with weights sharded along both
# axes.
TWO_PAIRS = [("optim", "optim"), ("optim_grads_params", "optim_grads")]
# Budget, whether there is an embedding, microbatches. Any two values of different columns occur
# together at least once.
STEPS = [
    ("none", False, 1),
    ("one unit", False, 3),
    ("one unit", True, 1),
    ("default", False, 1),
    ("default", True, 3),
]


@pytest.mark.parametrize("pair", thorough_but(TWO_PAIRS, PAIRS), ids="-".join)
def test_nothing_more_is_exposed_than_must_be(pair: tuple[str, str]) -> None:
    # Some steps also with messages that take twice the time of compute.
    for net, (budget, has_embedding, microbatches) in (
        *((NETWORK, each) for each in STEPS),
        *((network(2.0), each) for each in STEPS[3:]),
    ):
        options = {"has_embedding": has_embedding, "microbatches": microbatches}
        found = simulated(pair, net, budget=BUDGETS[budget], **options)
        must = ideal(pair, net, budgets=budgets_of(found), **options)
        assert found.exposed_seconds == pytest.approx(must.exposed, abs=1e-9)
        assert found.seconds == pytest.approx(must.seconds, abs=1e-9)
        both = found.compute_seconds + found.exposed_seconds
        assert found.seconds == pytest.approx(both, abs=1e-9)


def test_only_the_first_gather_and_the_last_reduction_of_equal_units() -> None:
    found = simulated(LEVEL_3, NETWORK)
    seen = {(each.unit, each.phase, each.lane) for each in found.exposed}
    first, last = ("blocks.0", "forward", "inner gather"), ("blocks.0", "backward", "inner reduce")
    assert seen == {first, last}


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="-".join)
def test_the_default_exposes_nothing_that_a_larger_budget_would_hide(pair: tuple[str, str]) -> None:
    found = simulated(pair, NETWORK, has_embedding=True)
    larger = simulated(pair, NETWORK, budget=4 * found.budget, has_embedding=True)
    assert found.exposed_seconds == pytest.approx(larger.exposed_seconds, abs=1e-9)
    assert sum(found.memory.values()) <= sum(larger.memory.values())


@pytest.mark.parametrize("pair", [LEVEL_2, LEVEL_3])
def test_a_smaller_budget_than_the_default_exposes_more(pair: tuple[str, str]) -> None:
    # A reduction takes longer than a unit's backward until its first gradient.
    slower = network(0.7)
    found = simulated(pair, slower)
    one = simulated(pair, slower, budget=found.budget)
    assert one.exposed_seconds > found.exposed_seconds + 1e-9  # the staging budget is too small
    none = simulated(pair, slower, budget=0)
    assert none.exposed_seconds > found.exposed_seconds + 1e-9


@pytest.mark.parametrize("pair", [LEVEL_2, LEVEL_3])
def test_reductions_that_wait_for_each_other_are_caught(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Reductions.open_unit

    def open_unit(self: Reductions, unit: Any) -> None:
        self._pending.finish()
        right(self, unit)

    monkeypatch.setattr(Reductions, "open_unit", open_unit)
    found = simulated(pair, NETWORK)
    must = ideal(pair, NETWORK, budgets=budgets_of(found))
    # The previous reduction overlaps only with a quarter of the unit's backward, until its first
    # gradient; it takes longer than that.
    assert found.exposed_seconds > must.exposed + 0.1 * (BLOCKS - 2) * BACKWARD
    assert {each.unit for each in found.exposed} > {"blocks.0", "blocks.2", "blocks.3"}


def test_gathers_one_unit_late_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = schedule.prefetch_windows

    def late(*args: Any) -> list[tuple[schedule.Use, ...]]:
        return [(), *right(*args)[:-1]]

    monkeypatch.setattr(schedule, "prefetch_windows", late)
    found = simulated(LEVEL_3, NETWORK, budget=BLOCK_NUMEL)
    must = ideal(LEVEL_3, NETWORK, budgets=(BLOCK_NUMEL, (BLOCK_NUMEL, 0)))
    gather = NETWORK.ring(BLOCK_NUMEL, 0)
    # In forward all gathers are exposed, not only the first; in backward compute waits for
    # reductions, too.
    assert found.exposed_seconds > must.exposed + (BLOCKS - 1) * gather
    late_ones = [each for each in found.exposed if each.phase == "forward"]
    assert [each.seconds for each in late_ones] == pytest.approx([gather] * BLOCKS)


def test_the_ideal_schedule_by_hand() -> None:
    """Prefetch of two, one and no units, with four blocks, HSDP."""
    slower = network(0.7)
    gather = inner_reduction = slower.ring(BLOCK_NUMEL, 0)
    reduction = inner_reduction + slower.ring(BLOCK_NUMEL / 4, 1, 2)
    until_first = BACKWARD / 4
    sizes = [n * BLOCK_NUMEL for n in (2, 1, 0)]
    exposed = [ideal(LEVEL_3, slower, budgets=(n, (n, 0))).exposed for n in sizes]
    assert exposed[0] == pytest.approx(gather + reduction)
    # Three blocks wait for their predecessor's inner reduction when their first gradient comes.
    assert exposed[1] == pytest.approx(gather + 3 * (inner_reduction - until_first) + reduction)
    # Four gathers in forward and three in backward, during which reductions run.
    assert exposed[2] == pytest.approx(7 * gather + reduction)


def test_no_gather_for_backward_starts_in_forward() -> None:
    """The highest pair with four blocks, by hand. A gather along the inner axis takes as long as a
    block's backward, so the preceding gather along the outer axis is exposed."""
    pair, slow = ("optim_grads_params", "optim_grads_params"), network(2.0)
    inner, outer = slow.ring(BLOCK_NUMEL, 0), slow.ring(BLOCK_NUMEL / 4, 1)
    assert inner == pytest.approx(BACKWARD)
    in_forward = inner + outer + (BLOCKS - 1) * (inner - BACKWARD / 2)
    # Block 2 waits: its gather starts when the backward of block 3 starts. Block 1 does not wait:
    # its gather starts when block 2 begins to wait. Block 0 waits again.
    in_backward = 2 * outer
    reduction = inner + outer
    found = simulated(pair, slow)
    must = ideal(pair, slow, budgets=budgets_of(found))
    assert must.exposed == pytest.approx(in_forward + in_backward + reduction)
    assert found.exposed_seconds == pytest.approx(must.exposed, abs=1e-9)
