"""Plans with activations on the host: when they are tried, and what users see of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from tests.planner.made_plans import simulated
from tests.planner.simulation.copying import ALONE, RANKS, ROWS, SAVED, WIDTH, computing

ACTIVATION_LANES = names_of_copies("activations")
BLOCKS = 5
PLENTY = 2.0**40
KEPT_OR_NOT = {False, "selective", True}
# Copies of a block are hidden behind its forward, which has two products.
FAST = computing(1.1)
SLOW = replace(FAST, host_link=fe.TwoWayLink(ALONE / 10, ALONE / 10, ALONE / 5))


def build() -> nn.Module:
    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    return nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(BLOCKS)))


def planned(memory: float, machine: fe.Machine = FAST, **options: Any) -> fe.StrategyPlan:
    given = {"batch": torch.zeros(ROWS, WIDTH), "world_size": RANKS, "min_unit_size": 0, **options}
    return fe.plan(build, machine=machine, memory=memory, **given)


@functools.cache
def least(checkpointing: bool | str) -> int:
    """Bytes that some candidate needs at most."""
    outcomes = planned(PLENTY, checkpointing=(checkpointing,)).outcomes
    return min(each.peak_bytes for each in outcomes)


def ways_of(planning: fe.StrategyPlan) -> set[bool | str]:
    return {each.candidate.checkpointing for each in planning.outcomes}


def test_they_are_the_choice_where_they_do_not_fit_and_copies_are_hidden() -> None:
    limit = least(False) - 1
    planning = planned(limit)
    chosen = planning.chosen
    assert chosen is not None
    assert chosen.candidate.checkpointing == "offload"
    assert chosen.elsewhere == {"host": 2 * BLOCKS * SAVED}
    assert chosen.peak_bytes <= limit
    recomputed = [each.rate for each in planning.outcomes if each.candidate.checkpointing is True]
    assert max(recomputed) < 0.95 * chosen.rate
    assert planning.best["extensions"] == [fe.OffloadActivations()]
    text = str(planning)
    assert "ranks, no checkpointing, activations on the host: " in text
    assert "Each node keeps 40.0 MiB on the host, 10.0 MiB of each rank." in text


@pytest.mark.thorough
def test_blocks_are_recomputed_where_copies_take_longer() -> None:
    assert ways_of(planned(PLENTY)) == KEPT_OR_NOT
    planning = planned(least(False) - 1, SLOW)
    assert ways_of(planning) == {*KEPT_OR_NOT, "offload"}
    assert planning.chosen is not None
    assert planning.chosen.candidate.checkpointing is True
    (slow, *_) = (each for each in planning.outcomes if each.candidate.checkpointing == "offload")
    candidate, times = slow.candidate, slow.times
    assert times is not None
    found = simulated(build, candidate, torch.zeros(ROWS, WIDTH), machine=SLOW, min_unit_size=0)
    waited = sum(found.exposed_by_lane[lane] for lane in ACTIVATION_LANES)
    assert (times.step, slow.memory) == (found.seconds, found.memory)
    assert times.exposed["activations"] == pytest.approx(waited)
    assert times.shares()["activation copies"] == pytest.approx(waited / found.seconds)
    alone = planned(PLENTY, SLOW, checkpointing=("offload",))
    assert "Bottleneck: copies of activations; " in str(alone)
