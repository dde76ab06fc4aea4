"""Plans with offloaded state: when it is tried, its bytes and seconds, and what users see of it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.comm.lanes import STATE_LANES
from fsdp_engine.planner.estimates import estimate
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.terminal import format_bytes
from tests.pool import Ranks

WORLD, WIDTH, BLOCKS = 4, 256, 6
HOST = fe.Offload(optimizer_state="host")
MACHINE = replace(fe.H100, ranks_per_node=2)
PLENTY = 2.0**40
STATE = 8 * BLOCKS * WIDTH * WIDTH


def build() -> nn.Module:
    """Most of its memory is optimizer state."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS))
    )


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def planned(offload: Any, memory: float = PLENTY, **options: Any) -> fe.StrategyPlan:
    given = {"machine": MACHINE, "checkpointing": (False,), "min_unit_size": 0, **options}
    return fe.plan(build, batch, world_size=WORLD, memory=memory, offload=offload, **given)


@functools.cache
def limit() -> float:
    """Bytes that some candidate needs at most with its state on the host, and none without."""
    without, host = (
        min(each.peak_bytes for each in planned(offload).outcomes) for offload in (None, HOST)
    )
    assert host < 0.8 * without
    return (host + without) / 2


@functools.cache
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
    assert planned(None, limit()).chosen is None
    assert "Optimizer state on the host (`offload`) may be enough." in str(planned(None, limit()))
    assert "Offloaded optimizer state is not enough." in str(planned_tightly().within(1024.0))


def test_candidates_that_cannot_fit_with_it_are_not_tried() -> None:
    tried = [each.candidate for each in planned_tightly().outcomes if each.candidate.offload]
    without = [each for each in planned_tightly().outcomes if not each.candidate.offload]
    might = [each for each in without if each.lacking <= each.memory["optimizer"]]
    assert len(without) > len(might) == len(tried)
    assert not any(each.candidate.offload for each in planned("auto", 1024.0).outcomes)
    # A host that computes has no other memory.
    on_host = replace(MACHINE, host_runs_ahead=False)
    assert planned("auto", limit(), machine=on_host).chosen is None
    unknown = replace(MACHINE, host_link=None)
    assert planned("auto", limit(), machine=unknown).chosen is None


def test_an_offloaded_outcome_equals_its_simulation() -> None:
    chosen = chosen_of(planned_tightly())
    candidate = chosen.candidate
    found = fe.simulate(
        build,
        WORLD,
        batch=batch(),
        mesh=candidate.mesh,
        machine=MACHINE,
        strategy=candidate.strategy,
        outer_strategy=candidate.outer_strategy,
        offload=HOST,
        min_unit_size=0,
    )
    assert (chosen.memory, chosen.elsewhere) == (found.memory, found.elsewhere)
    assert chosen.times is not None
    assert chosen.times.step == found.seconds
    assert chosen.times.exposed_sum == pytest.approx(found.exposed_seconds)
    waited = sum(found.exposed_by_lane.get(lane, 0.0) for lane in STATE_LANES)
    assert waited > 0
    assert chosen.times.exposed["state"] == pytest.approx(waited)
    assert chosen.times.shares()["state copies"] == pytest.approx(waited / found.seconds)
    assert sum(chosen.times.shares().values()) == pytest.approx(1.0)


def test_the_plan_names_it_and_the_memory_of_a_node() -> None:
    text = str(planned_tightly())
    chosen = chosen_of(planned_tightly())
    each = chosen.elsewhere["host"]
    assert each in (STATE // WORLD, STATE // 2)
    assert ", no checkpointing, optimizer state on the host: " in text
    assert (
        f"Each node keeps {format_bytes(2 * each)} on the host, {format_bytes(each)} of each rank."
        in text
    )
    header = next(line for line in text.splitlines() if "recompute" in line)
    assert "offloaded" in header
    assert "elsewhere" in header
    assert "offloaded" not in str(planned(None))


def test_a_plan_with_it_is_saved_and_loaded_and_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned_tightly().save(path)
    loaded = fe.StrategyPlan.load(path)
    assert loaded.outcomes == planned_tightly().outcomes
    assert loaded.best["offload"] == HOST
    content = json.loads(path.read_text())
    for each in content["outcomes"]:  # a file of before
        del each["elsewhere"], each["candidate"]["offload"]
    path.write_text(json.dumps(content))
    old = fe.StrategyPlan.load(path)
    assert "offload" not in old.best
    pytest.importorskip("matplotlib")
    import matplotlib as mpl

    mpl.rcParams["svg.fonttype"] = "none"
    save_figure(planned_tightly(), tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert ", offload" in drawn
    assert "waits for the state copies" in drawn


def test_a_given_offload_is_that_of_all_candidates_and_of_shard(tmp_path: Path) -> None:
    planning = planned(HOST)
    assert {each.candidate.offload for each in planning.outcomes} == {HOST}
    assert planning.best["offload"] == HOST
    own = planning.arguments(given={"offload": fe.Offload()})
    assert own["offload"] == fe.Offload()
    disk = fe.Offload(optimizer_state="disk", folder=tmp_path)
    planning = planned(disk, machine=replace(MACHINE, host_runs_ahead=False))
    assert planning.best["offload"] == disk
    planning.save(tmp_path / "plan.json")
    loaded = fe.StrategyPlan.load(tmp_path / "plan.json").best["offload"]
    assert (loaded.optimizer_state, loaded.folder) == ("disk", str(tmp_path))
    with pytest.raises(TypeError, match=r"offload: expected an fe\.Offload, 'auto' or None"):
        planned("host")
    with pytest.raises(ValueError, match=r"optimizer_state: expected 'host' for state of an acc"):
        planned(disk)


def shard_by_plan(path: str) -> str:
    with_plan = {"strategy": "auto", "plan": fe.StrategyPlan.load(path), "min_unit_size": 0}
    engine = fe.shard(build(), initial_values="rank0", **with_plan)
    assert dist.get_world_size() == WORLD
    return engine.offload.optimizer_state


def test_shard_takes_it_from_a_plan(ranks: Ranks, tmp_path: Path) -> None:
    planned_tightly().save(tmp_path / "plan.json")
    places = ranks.run(shard_by_plan, str(tmp_path / "plan.json"), world_size=WORLD)
    assert places == ["host"] * WORLD


def test_formulas_try_it_too() -> None:
    # Formulas know no activations: what they lack is what they know.
    without = planned(None, formulas=True)
    least = min(each.peak_bytes for each in without.outcomes)
    planning = planned("auto", 0.9 * least, formulas=True)
    first = planning.outcomes[0]
    assert first.candidate.offload == HOST
    assert first.fits is None
    assert first.elsewhere["host"] >= STATE / WORLD


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_an_estimate_holds_two_units_of_state_on_the_device(level: str) -> None:
    options: dict[str, Any] = {"world_size": 8, "num_units": 32, "strategy": level}
    kept = estimate(8e9, **options)
    found = estimate(8e9, offload=HOST, **options)
    assert found.elsewhere == {"host": kept.optimizer_bytes}
    assert found.optimizer_bytes == kept.optimizer_bytes / 16
    assert kept.peak_bytes - found.peak_bytes == kept.optimizer_bytes * 15 / 16
    assert kept.elsewhere == {}


def test_an_estimate_is_at_most_the_simulation_of_chunks() -> None:
    found = estimate(build(), world_size=WORLD, offload=HOST, min_unit_size=0)
    assert found.optimizer_bytes == 2 * STATE / BLOCKS / WORLD
    simulated = fe.simulate(build, WORLD, batch=batch(), offload=HOST, min_unit_size=0)
    assert simulated.elsewhere == found.elsewhere
    assert simulated.memory["optimizer"] <= found.optimizer_bytes + 64
