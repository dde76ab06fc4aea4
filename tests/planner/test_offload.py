"""Plans with offloaded state: when it is tried, its bytes and seconds, and what users see of it."""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.comm.copy_lanes import names_of_copies
from fsdp_engine.comm.lanes import COPY_IN
from fsdp_engine.extensions.offload import disk_staging
from fsdp_engine.extensions.offload.places import ROLES
from fsdp_engine.planner.estimates import Estimate, compare, estimate
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.state_places import offloads_to_host
from fsdp_engine.strategies import Axis, Role
from fsdp_engine.terminal import format_bytes
from tests.models import Transformer, token_batch
from tests.planner.made_plans import simulated
from tests.pool import Ranks

_, EVERYTHING = offloads_to_host()
STATE_LANES = names_of_copies("state")
WORLD, WIDTH, BLOCKS = 4, 256, 6
HOST = fe.Offload(optimizer_state="host")
# A host that is fast enough to keep the device busy with small models.
MACHINE = replace(fe.H100, ranks_per_node=2, host_seconds=0.0)
PLENTY = 2.0**40
LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STATE = 8 * BLOCKS * WIDTH * WIDTH


def build() -> nn.Module:
    """Most of its memory is optimizer state."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(BLOCKS))
    )


def batch() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def plan(
    offload: Any, memory: float = PLENTY, machine: fe.Machine = MACHINE, **options: Any
) -> fe.StrategyPlan:
    """On one axis."""
    given = {"checkpointing": (False,), "min_unit_size": 0, "meshes": ((WORLD,),), **options}
    return fe.plan(
        build, batch, world_size=WORLD, machine=machine, memory=memory, offload=offload, **given
    )


planned = functools.cache(plan)


@functools.cache
def limit() -> float:
    """Bytes that some candidate needs at most with its state on the host, and none without."""
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
    without = planned(None).within(limit())
    assert without.chosen is None
    assert "Optimizer state on the host (`offload`) may be enough." in str(without)
    assert "Offloaded optimizer state is not enough." in str(planned_tightly().within(1024.0))
    # The text names it and the memory of a node.
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


@pytest.mark.thorough
def test_candidates_that_cannot_fit_with_it_are_not_tried() -> None:
    tried = [each.candidate for each in planned_tightly().outcomes if each.candidate.offload]
    without = [each for each in planned_tightly().outcomes if not each.candidate.offload]
    might = [each for each in without if each.lacking <= each.memory["optimizer"]]
    assert len(without) > len(might) == len(tried)
    assert not any(each.candidate.offload for each in planned("auto", 1024.0).outcomes)
    # A host that computes has no other memory.
    on_host = replace(MACHINE, host_runs_ahead=False)
    assert plan("auto", limit(), machine=on_host).chosen is None
    unknown = replace(MACHINE, host_link=None)
    assert plan("auto", limit(), machine=unknown).chosen is None


def test_an_offloaded_outcome_equals_its_simulation() -> None:
    chosen = chosen_of(planned_tightly())
    found = simulated(build, chosen.candidate, batch(), machine=MACHINE, min_unit_size=0)
    assert (chosen.memory, chosen.elsewhere) == (found.memory, found.elsewhere)
    assert chosen.times is not None
    assert chosen.times.step == found.seconds
    assert chosen.times.exposed_sum == pytest.approx(found.exposed_seconds)
    waited = sum(found.exposed_by_lane.get(lane, 0.0) for lane in STATE_LANES)
    assert waited > 0
    assert chosen.times.exposed["state"] == pytest.approx(waited)
    assert chosen.times.shares()["state copies"] == pytest.approx(waited / found.seconds)
    assert sum(chosen.times.shares().values()) == pytest.approx(1.0)


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
    assert "With steps beside forward (`overlap_forward=True`): " in str(planning)
    assert "optimizer state on the host, stepped beside forward: " in str(beside)
    assert not any("overlap_forward" in each.change for each in beside.trials)


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


@pytest.mark.thorough
def test_a_given_offload_is_that_of_all_candidates_and_of_shard(tmp_path: Path) -> None:
    planning = planned(HOST)
    assert {each.candidate.offload for each in planning.outcomes} == {HOST}
    assert planning.best["extensions"] == [HOST]
    own = planning.arguments(given={"extensions": [fe.Offload()]})
    assert own["extensions"] == [fe.Offload()]
    disk = fe.Offload(optimizer_state="disk", folder=tmp_path)
    planning = plan(disk, machine=replace(MACHINE, host_runs_ahead=False))
    assert planning.best["extensions"] == [disk]
    planning.save(tmp_path / "plan.json")
    loaded = fe.StrategyPlan.load(tmp_path / "plan.json").best["extensions"][0]
    assert (loaded.optimizer_state, loaded.folder) == ("disk", str(tmp_path))
    on_device = plan(disk, machine=replace(MACHINE, disk=MACHINE.host_link))
    assert on_device.best["extensions"] == [disk]
    assert on_device.outcomes[0].elsewhere["host"] == disk_staging.NUM_BYTES
    everything = fe.Offload(folder=tmp_path, **dict.fromkeys(ROLES, "disk"))
    on_device = planned(everything)
    assert {each.candidate.strategy for each in on_device.outcomes} == {LEVELS[-1]}
    assert on_device.best["extensions"] == [everything]


def shard_by_plan(path: str) -> str:
    with_plan = {"strategy": fe.StrategyPlan.load(path), "options": fe.Options(min_unit_size=0)}
    engine = fe.shard(build(), initial_values="rank0", **with_plan)
    assert dist.get_world_size() == WORLD
    return engine.offload.optimizer_state


def test_shard_takes_it_from_a_plan(ranks: Ranks, tmp_path: Path) -> None:
    planned_tightly().save(tmp_path / "plan.json")
    places = ranks.run(shard_by_plan, str(tmp_path / "plan.json"), world_size=WORLD)
    assert places == ["host"] * WORLD


def test_formulas_try_it_too() -> None:
    # Formulas know no activations: what they lack is what they know.
    without = min(each.peak_bytes for each in plan(None, formulas=True).outcomes)
    planning = plan("auto", 0.9 * without, formulas=True)
    first = planning.outcomes[0]
    assert first.candidate.offload == HOST
    assert first.fits is None
    assert first.elsewhere["host"] >= STATE / WORLD


@pytest.mark.parametrize("level", LEVELS)
def test_an_estimate_holds_two_units_of_state_on_the_device(level: str) -> None:
    options: dict[str, Any] = {"world_size": 8, "num_units": 32, "strategy": level}
    kept, found = estimate(8e9, **options), estimate(8e9, offload=HOST, **options)
    assert found.elsewhere == {"host": kept.optimizer_bytes}
    assert found.optimizer_bytes == kept.optimizer_bytes / 16
    assert kept.peak_bytes - found.peak_bytes == kept.optimizer_bytes * 15 / 16
    assert kept.elsewhere == {}


POLICIES = {
    "fp32": fe.MixedPrecisionPolicy(),
    "bf16": fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
}


def shards_gradients(level: str) -> bool:
    return level in LEVELS[2:]


class Linears(nn.Sequential):
    """Blocks without padding."""

    def __init__(self) -> None:
        blocks = [nn.Sequential(nn.Linear(32, 32, bias=False)) for _ in range(3)]
        super().__init__(*blocks)


def compare_with_ledgers(roles: tuple[str, ...]) -> list[str]:
    """Every difference between an estimate and the ledger of an engine with these on a disk."""
    size = dist.get_world_size()
    meshes = [(1, 1)] if size == 1 else [(1, size), (size, 1)]
    levels = [each for each in LEVELS if "gradients" not in roles or shards_gradients(each)]
    # A model with padding and an optimizer without state, and the other way round.
    kinds = zip(POLICIES, (0, 8), strict=True)
    lines = []
    for mesh, (policy, num_bytes), level in itertools.product(meshes, kinds, levels):
        if mesh[0] == 1 or level != "no_shard":
            found = differences(mesh, policy, level, roles, num_bytes)
            lines += [f"{mesh}, {policy}, {level}: {each}" for each in found]
    return lines


def differences(
    mesh: tuple[int, int], policy: str, level: str, roles: tuple[str, ...], bytes_per_element: int
) -> list[str]:
    has_state, levels = bytes_per_element > 0, (level, "no_shard" if mesh[0] == 1 else "optim")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "mp_policy": POLICIES[policy],
            "offload": fe.Offload(**dict.fromkeys(roles, "disk"), folder=folder),
            "min_unit_size": 0,
        }
        model: nn.Module = Linears() if has_state else Transformer(2, tied=True)
        inputs = (torch.ones(2, 32),) if has_state else token_batch(2, 1)
        planned = estimate(
            model,
            world_size=math.prod(mesh),
            outer_size=mesh[0],
            strategy=levels[0],
            outer_strategy=levels[1],
            optimizer_bytes_per_element=bytes_per_element,
            on_cpu=True,
            **options,
        )
        axes = init_device_mesh("cpu", mesh, mesh_dim_names=("outer", "inner"))
        engine = fe.shard(model, axes, *levels, **options)
        kind = torch.optim.AdamW if has_state else torch.optim.SGD
        optimizer = fe.shard_optimizer(kind(model.parameters(), lr=0.1))
        for _ in range(2):
            engine.peak_memory_bytes(reset=True)
            model(*inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        held, peak = engine.memory_bytes(), engine.peak_memory_bytes()
        there = sum(engine.memory_bytes("disk").values())
    on_device = 0 if "optimizer_state" in roles else bytes_per_element * held_elements(planned)
    found = {
        "weight_bytes": held.get("main", 0) + held.get("model", 0),
        "grad_bytes": peak.get("grad", 0),
        "full_bytes": peak.get("full", 0),
        "staging_bytes": peak.get("staging", 0),
        "optimizer_bytes": peak.get("optimizer", 0) + on_device,  # torch makes that on the device
        "elsewhere": {"disk": there} if there else {},
    }
    expected = {key: getattr(planned, key) for key in found}
    return [
        f"{key} is {found[key]}, planned {expected[key]}"
        for key in found
        if found[key] != expected[key]
    ]


def held_elements(planned: Estimate) -> int:
    share = 1.0
    for axis, size in ((Axis.INNER, planned.inner_size), (Axis.OUTER, planned.outer_size)):
        share *= planned.strategy.level(axis).fraction(Role.OPTIM, size)
    return round(planned.num_elements * share)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("roles", [ROLES[1:2], ROLES[2:], ROLES], ids="+".join)
def test_an_estimate_is_the_ledger_of_an_engine_with_state_on_a_disk(
    ranks: Ranks, roles: tuple[str, ...], size: int
) -> None:
    results = ranks.run(compare_with_ledgers, roles, world_size=size)
    assert not any(results), "\n".join(results[0][:10])


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
        partial(estimate, Linears(), world_size=4, min_unit_size=0, **options),
        partial(fe.simulate, Linears, 4, batch=torch.ones(1, 32), min_unit_size=0, **options),
    ]
    refused = "" if shards_gradients(level) else r"offload\.gradients: expected 'device'"
    if (level, policy) == ("optim_grads", "fp32"):
        refused = r"offload\.main_weights: expected main weights .* no part of compute weights"
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
    assert chosen.times is not None
    assert chosen.times.exposed["state"] > 0
    # A machine without the figure of its host's memory.
    planning = plan("auto", limit, machine=replace(MACHINE, host_memory_bandwidth=None))
    assert {each.candidate.offload for each in planning.outcomes} == {None, HOST}
    assert "Offloaded optimizer state is not enough." in str(planning)
    kept = planned(None).within(least(EVERYTHING))
    assert "Main weights, gradients and optimizer state on the host may be enough." in str(kept)
    assert "Everything on the host is not enough." in str(planned(EVERYTHING).within(1024.0))


def test_waits_for_brought_weights_are_copies_of_state() -> None:
    slow = replace(MACHINE, host_link=fe.TwoWayLink(1e8, 1e8, 1e8))
    options: dict[str, Any] = {"mp_policy": POLICIES["bf16"]}
    planning = plan(EVERYTHING, machine=slow, **options)
    assert {each.candidate.strategy for each in planning.outcomes} == set(LEVELS[2:])
    chosen = chosen_of(planning)
    found = simulated(build, chosen.candidate, batch(), machine=slow, min_unit_size=0, **options)
    waits = sum(found.exposed_by_lane.get(lane, 0.0) for lane in (COPY_IN, *STATE_LANES))
    assert found.exposed_by_lane[COPY_IN] > 0
    assert chosen.times is not None
    assert chosen.times.exposed["state"] == pytest.approx(waits)
