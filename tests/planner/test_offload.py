"""Plans with offloaded state and activations: when they are tried, and their output."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from fsdp_engine.planner.estimates import compare, estimate
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.state_places import offloads_to_host
from fsdp_engine.terminal import format_bytes
from tests.planner.made_plans import assert_outcome_of, simulated_as, times_of
from tests.planner.simulation.copying import ALONE, RANKS, ROWS, SAVED, WIDTH, Blocks, computing

_, EVERYTHING = offloads_to_host()
STATE_LANES = names_of_copies("state")
WORLD, BLOCKS = 4, 6
build = partial(Blocks, BLOCKS)  # most of its memory is optimizer state
HOST = fe.Offload(optimizer_state="host")
# A host that is fast enough to keep the device busy with small models.
MACHINE = replace(fe.H100, ranks_per_node=2, host_seconds=0.0)
PLENTY = 2.0**40
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STATE = 8 * BLOCKS * WIDTH * WIDTH


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def plan(
    offload: Any, memory: float = PLENTY, machine: fe.Machine = MACHINE, **options: Any
) -> fe.StrategyPlan:
    """A plan on one axis."""
    given = {"checkpointing": (False,), "min_unit_size": 0, "meshes": ((WORLD,),), **options}
    return fe.plan(
        build, batch, world_size=WORLD, machine=machine, memory=memory, offload=offload, **given
    )


planned = functools.cache(plan)


@functools.cache
def limit() -> float:
    """A memory limit that some candidate fits with its state on the host, but none fits without."""
    without, host = least(None), least(HOST)
    assert host < 0.8 * without
    return (host + without) / 2


def least(offload: Any) -> int:
    return min(each.peak_bytes for each in planned(offload).outcomes)


def planned_tightly() -> fe.StrategyPlan:
    return planned("auto", limit())


def chosen_of(planning: fe.StrategyPlan) -> Outcome:
    assert planning.chosen is not None
    return planning.chosen


def test_state_on_the_host_is_tried_only_if_nothing_fits() -> None:
    assert not any(each.candidate.offload for each in planned("auto").outcomes)
    chosen = chosen_of(planned_tightly())
    assert chosen.candidate.offload == HOST
    assert all(each.lacking for each in planned_tightly().outcomes if not each.candidate.offload)
    tried = [each for each in planned_tightly().outcomes if each.candidate.offload]
    without = [each for each in planned_tightly().outcomes if not each.candidate.offload]
    # Offload is only tried where a candidate lacks at most the bytes of its optimizer state.
    might = [each for each in without if each.lacking <= each.memory["optimizer"]]
    assert len(without) > len(might) == len(tried)
    without = planned(None).within(limit())
    assert without.chosen is None
    assert "Optimizer state on the host (`offload`) may be enough." in str(without)
    assert "Offloaded optimizer state is not enough." in str(planned_tightly().within(1024.0))
    # The text names the offload and the host memory of a node.
    text = str(planned_tightly())
    each = chosen.elsewhere["host"]
    assert each == STATE // WORLD
    assert ", no checkpointing, optimizer state on the host: " in text
    node = f"{format_bytes(2 * each)} on the host, {format_bytes(each)} of each rank."
    assert f"Each node keeps {node}" in text
    header = next(line for line in text.splitlines() if "recompute" in line)
    assert "offloaded" in header
    assert "elsewhere" in header
    assert "offloaded" not in str(planned(None))


def test_an_offloaded_outcome_equals_its_simulation() -> None:
    chosen = chosen_of(planned_tightly())
    found = simulated_as(chosen.candidate, build, batch(), machine=MACHINE, min_unit_size=0)
    assert_outcome_of(found, chosen)
    times = times_of(chosen)
    waited = sum(found.exposed_by_lane.get(lane, 0.0) for lane in STATE_LANES)
    assert waited > 0
    assert times.exposed["state"] == pytest.approx(waited)
    assert times.shares()["state copies"] == pytest.approx(waited / found.seconds)


def test_a_plan_with_it_is_saved_and_loaded_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    planned_tightly().save(path)
    loaded = fe.StrategyPlan.load(path)
    assert loaded.outcomes == planned_tightly().outcomes
    assert loaded.best["extensions"] == [HOST]
    mpl: Any = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    save_figure(planned_tightly(), tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert ", offload" in drawn
    assert "waits for the state copies" in drawn


def test_formulas_try_it_too() -> None:
    # Formulas ignore activations: a candidate lacks at least its computed bytes minus the limit.
    without = min(each.peak_bytes for each in plan(None, formulas=True).outcomes)
    planning = plan("auto", 0.9 * without, formulas=True)
    first = planning.outcomes[0]
    assert first.candidate.offload == HOST
    assert first.fits is None
    assert first.elsewhere["host"] >= STATE / WORLD


@pytest.mark.parametrize("level", LEVELS)
def test_an_estimate_holds_two_units_of_state_on_the_device(level: str) -> None:
    options: dict[str, Any] = {"world_size": 8, "num_units": 32, "strategy": level}
    kept, found = estimate(8e9, **options), estimate(8e9, extensions=[HOST], **options)
    assert found.elsewhere == {"host": kept.optimizer_bytes}
    assert found.optimizer_bytes == kept.optimizer_bytes / 16
    assert kept.peak_bytes - found.peak_bytes == kept.optimizer_bytes * 15 / 16
    assert kept.elsewhere == {}


POLICIES = {
    "fp32": fe.MixedPrecisionPolicy(),
    "bf16": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("place", "step_on"), [("host", "device"), ("host", "host"), ("disk", "device")]
)
def test_an_estimate_is_the_simulation_of_what_lies_elsewhere(
    level: str, policy: str, place: str, step_on: str, tmp_path: Path
) -> None:
    offload = fe.Offload(place, tmp_path, main_weights=place, gradients=place, step_on=step_on)
    options = {"offload": offload, "mp_policy": POLICIES[policy], "strategy": level}
    tries: list[Any] = [
        partial(estimate, Blocks(), world_size=4, min_unit_size=0, **options),
        partial(fe.simulate, Blocks, 4, batch=batch(), min_unit_size=0, **options),
    ]
    refused = "" if level in LEVELS[2:] else r"offload\.gradients: expected 'device'"
    if (level, policy) == ("optim_grads", "fp32"):
        refused = r"offload\.main_weights: expected main weights .* not part of compute weights"
    if refused:
        for refuses in tries:
            with pytest.raises(ValueError, match=refused):
                refuses()
        return
    planned, found = (each() for each in tries)
    assert found.elsewhere == planned.elsewhere
    counters = 4 * 4
    assert found.memory["optimizer"] <= planned.optimizer_bytes + counters
    assert (planned.optimizer_bytes == 0) == (step_on == "host")


def test_levels_that_do_not_allow_it_are_left_out() -> None:
    options: dict[str, Any] = {"world_size": 8, "offload": EVERYTHING}
    assert [each.strategy.inner.name for each in compare(8e9, **options)] == [LEVELS[-1]]
    found = compare(8e9, mp_policy=POLICIES["bf16"], **options)
    assert [each.strategy.inner.name for each in found] == list(LEVELS[2:])
    found = compare(8e9, outer_size=2, **options)
    pairs = [(each.strategy.inner.name, each.strategy.outer.name) for each in found]
    assert pairs == [(LEVELS[-1], "no_shard"), (LEVELS[-1], LEVELS[-1])]


@pytest.mark.parametrize("quick", [False, True])
def test_a_plan_leaves_them_out(quick: bool, simulated: list[Any]) -> None:
    """Also in a quick plan, which first leaves out candidates that are too large."""
    found = plan(EVERYTHING, quick=quick, meshes=((2, 2), (4,)))
    kept = {(each.candidate.strategy, each.candidate.mesh) for each in found.outcomes}
    assert kept == {(LEVELS[-1], (4,)), (LEVELS[-1], (2, 2))}
    assert all(each.candidate.offload == EVERYTHING for each in found.outcomes)


@pytest.mark.thorough
def test_everything_is_on_the_host_if_state_there_is_not_enough() -> None:
    assert least(EVERYTHING) < 0.9 * least(HOST)
    limit = least(HOST) - 1
    planning = planned("auto", limit)
    chosen = chosen_of(planning)
    assert chosen.candidate.offload == EVERYTHING
    tried = [each.candidate for each in planning.outcomes if each.candidate.offload == EVERYTHING]
    assert {each.strategy for each in tried} == {LEVELS[-1]}
    assert any(each.candidate.offload == HOST for each in planning.outcomes)
    assert all(each.lacking for each in planning.outcomes if each.candidate.offload != EVERYTHING)
    assert planning.best["extensions"] == [EVERYTHING]
    assert "everything on the host" in str(planning)
    assert times_of(chosen).exposed["state"] > 0
    # A machine without the figure of its host's memory.
    planning = plan("auto", limit, machine=replace(MACHINE, host_memory_bandwidth=None))
    assert {each.candidate.offload for each in planning.outcomes} == {None, HOST}
    assert "Offloaded optimizer state is not enough." in str(planning)
    kept = planned(None).within(least(EVERYTHING))
    assert "Main weights, gradients and optimizer state on the host may be enough." in str(kept)
    assert "No candidate fits with optimizer state, main weights" in (
        str(planned(EVERYTHING).within(1024.0))
    )


ACTIVATION_LANES = names_of_copies("activations")
PAIRS_OF_LINEARS = 5
KEPT_OR_NOT = {False, "selective", True}
# Copies of a block are hidden behind its forward, which has two products.
FAST = computing(1.1)
SLOW = replace(FAST, host_link=fe.TwoWayLink(ALONE / 10, ALONE / 10, ALONE / 5))


def build_pairs() -> nn.Module:
    def linear() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, bias=False)

    return nn.Sequential(*(nn.Sequential(linear(), linear()) for _ in range(PAIRS_OF_LINEARS)))


def planned_of(memory: float, machine: fe.Machine = FAST, **options: Any) -> fe.StrategyPlan:
    given = {"batch": torch.zeros(ROWS, WIDTH), "world_size": RANKS, "min_unit_size": 0, **options}
    return fe.plan(build_pairs, machine=machine, memory=memory, **given)


@functools.cache
def least_of(checkpointing: bool | str) -> int:
    """The smallest peak of all candidates."""
    outcomes = planned_of(PLENTY, checkpointing=(checkpointing,)).outcomes
    return min(each.peak_bytes for each in outcomes)


def ways_of(planning: fe.StrategyPlan) -> set[bool | str]:
    return {each.candidate.checkpointing for each in planning.outcomes}


def test_activations_on_the_host_are_chosen_where_they_do_not_fit_and_copies_are_hidden() -> None:
    limit = least_of(False) - 1
    planning = planned_of(limit)
    chosen = chosen_of(planning)
    assert chosen.candidate.checkpointing == "offload"
    assert chosen.elsewhere == {"host": 2 * PAIRS_OF_LINEARS * SAVED}
    assert chosen.peak_bytes <= limit
    recomputed = [each.rate for each in planning.outcomes if each.candidate.checkpointing is True]
    assert max(recomputed) < 0.95 * chosen.rate
    assert planning.best["extensions"] == [fe.OffloadActivations()]
    text = str(planning)
    assert "ranks, no checkpointing, activations on the host: " in text
    assert "Each node keeps 40.0 MiB on the host, 10.0 MiB of each rank." in text


@pytest.mark.thorough
def test_blocks_are_recomputed_where_copies_take_longer() -> None:
    assert ways_of(planned_of(PLENTY)) == KEPT_OR_NOT
    planning = planned_of(least_of(False) - 1, SLOW)
    assert ways_of(planning) == {*KEPT_OR_NOT, "offload"}
    assert chosen_of(planning).candidate.checkpointing is True
    (slow, *_) = (each for each in planning.outcomes if each.candidate.checkpointing == "offload")
    rows = torch.zeros(ROWS, WIDTH)
    found = simulated_as(slow.candidate, build_pairs, rows, machine=SLOW, min_unit_size=0)
    assert_outcome_of(found, slow)
    waited = sum(found.exposed_by_lane[lane] for lane in ACTIVATION_LANES)
    assert times_of(slow).exposed["activations"] == pytest.approx(waited)
    assert times_of(slow).shares()["activation copies"] == pytest.approx(waited / found.seconds)
    alone = planned_of(PLENTY, SLOW, checkpointing=("offload",))
    assert "Bottleneck: copies of activations; " in str(alone)


@pytest.mark.thorough
def test_steps_beside_forward_are_a_trial() -> None:
    planning = planned_tightly()
    chosen = chosen_of(planning)
    (trial,) = (each for each in planning.trials if "overlap_forward" in each.change)
    assert trial.speedup > 1.05
    beside = planned(replace(HOST, overlap_forward=True), limit())
    found = {each.candidate: each.rate for each in beside.outcomes}
    rate = found[replace(chosen.candidate, offload=replace(HOST, overlap_forward=True))]
    assert trial.speedup == pytest.approx(rate / chosen.rate)
    assert "With optimizer steps during the next forward (`overlap_forward=True`): " in str(
        planning
    )
    assert "optimizer state on the host, updated during the next forward: " in str(beside)
    assert not any("overlap_forward" in each.change for each in beside.trials)
