"""``fe.plan``: outcomes, the choice, the recommendation, and ``fe.shard`` with a plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.planner.candidates import fitting_meshes
from fsdp_engine.planner.estimates import estimate
from fsdp_engine.planner.figure import save_figure
from fsdp_engine.planner.outcome import KINDS, Outcome, is_faster
from fsdp_engine.planner.plan_options import PlanOptions
from fsdp_engine.planner.plan_view import row_label
from fsdp_engine.planner.simulation.simulate import Simulation
from fsdp_engine.planner.simulation.step_options import StepOptions
from fsdp_engine.strategies import ALL_STRATEGIES
from fsdp_engine.terminal import format_count
from tests.planner.made_plans import (
    LENGTH,
    SETTING,
    Words,
    assert_outcome_of,
    quick_plan,
    rows,
    simulated_as,
    times_of,
    words,
)
from tests.pool import Ranks

WORLD, ROWS = 4, 8
MACHINE = replace(fe.H100, ranks_per_node=2)
POLICY = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
OPTIONS = {"mp_policy": POLICY, "options": fe.Options(min_unit_size=0)}


def batch(size: int = ROWS) -> Tensor:
    return words(size)


@cache
def planned() -> fe.StrategyPlan:
    """A plan with a unit for each block, and memory for all candidates."""
    given = {"memory": 2.0**30, "checkpointing": (False,), **OPTIONS}
    return fe.plan(Words, batch, world_size=WORLD, machine=MACHINE, **given)


@cache
def planned_tightly() -> fe.StrategyPlan:
    """The same plan with a memory limit that excludes the fastest candidate."""
    return planned().within(a_limit())


def at_most() -> dict[tuple[object, ...], int]:
    """Peaks of all candidates."""
    return {_key(each): each.peak_bytes for each in planned().outcomes}


def _key(outcome: Outcome) -> tuple[object, ...]:
    each = outcome.candidate
    return (each.mesh, each.strategy, each.outer_strategy, each.checkpointing)


def a_limit() -> float:
    """A memory limit that the smallest candidate fits, but the fastest does not."""
    peaks = sorted(at_most().values())
    assert peaks[0] < planned().outcomes[0].peak_bytes
    return (peaks[0] + planned().outcomes[0].peak_bytes) / 2


def test_rows_are_every_strategy_of_both_meshes_with_and_without_checkpointing(
    simulated: list[Any],
) -> None:
    expected = {
        (mesh, pair.inner.name, pair.outer.name, recompute)
        for mesh in ((4,), (2, 2))
        for pair in ALL_STRATEGIES
        for recompute in (False, True)
        if len(mesh) == 2 or pair.outer.name == "no_shard"
    }
    options = {"checkpointing": (False, True), **OPTIONS}
    outcomes = fe.plan(Words, batch, world_size=WORLD, machine=MACHINE, **options).outcomes
    assert {_key(each) for each in outcomes} == expected
    assert len(outcomes) == len(expected) == 28 <= len(simulated)


def test_meshes_that_fit() -> None:
    for world, node, expected in (
        (1024, 8, [(1024,), (128, 8)]),
        (8, 8, [(8,)]),
        (12, 8, [(12,)]),  # no whole nodes
        (4, 1, [(4,)]),
        (1, 8, [(1,)]),
    ):
        assert fitting_meshes(world, node) == expected


def test_an_outcome_equals_its_simulation() -> None:
    planning = planned()
    for outcome in planning.outcomes[::11]:
        found = simulated_as(outcome.candidate, Words, batch(), machine=MACHINE, **OPTIONS)
        assert_outcome_of(found, outcome)
        assert outcome.items == WORLD * ROWS * LENGTH
        assert outcome.rate == outcome.items / found.seconds
    assert planning.simulate is not None
    chosen = planning.outcomes[0]
    again = planning.simulate(chosen.candidate)
    assert isinstance(again, Simulation)
    assert again.spans
    assert again.seconds == times_of(chosen).step
    trials = {each.change: each for each in planning.trials}
    twice = simulated_as(chosen.candidate, Words, batch(2 * ROWS), machine=MACHINE, **OPTIONS)
    rate = 2 * chosen.items / twice.seconds
    assert trials["a microbatch twice as large"].speedup == pytest.approx(rate / chosen.rate)
    assert trials["4 microbatches a step"].speedup > 1


def test_bytes_sent_are_those_of_the_formulas() -> None:
    for outcome in planned().outcomes:
        candidate = outcome.candidate
        formula = estimate(
            Words(),
            world_size=WORLD,
            outer_size=candidate.mesh[0] if len(candidate.mesh) == 2 else 1,
            strategy=candidate.strategy,
            outer_strategy=candidate.outer_strategy,
            **OPTIONS,
        )
        assert outcome.sent.get("inner", 0) == formula.inner_traffic_bytes, candidate
        assert outcome.sent.get("outer", 0) == formula.outer_traffic_bytes, candidate


def test_outcomes_that_fit_are_first_and_the_fastest_is_chosen() -> None:
    limit = a_limit()
    outcomes = planned_tightly().outcomes
    fits = [each.fits for each in outcomes]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    assert {_key(each): each.peak_bytes for each in outcomes} == at_most()
    assert all(each.fits == (each.peak_bytes <= limit) for each in outcomes)
    assert all(each.lacking == max(each.peak_bytes - limit, 0) for each in outcomes)
    chosen = planned_tightly().chosen
    assert chosen is outcomes[0]
    assert chosen.rate >= 0.998 * max(each.rate for each in outcomes if each.fits)


def test_the_recommendation_contains_choice_reason_and_changes() -> None:
    text = str(planned_tightly())
    chosen, *_ = planned_tightly().outcomes
    assert f"Use {chosen.candidate}: " in text
    lacking = [each for each in planned_tightly().outcomes if not each.fits]
    nearest = min((e for e in lacking if is_faster(e, chosen)), key=lambda each: each.lacking)
    assert f"which do not fit, {nearest.candidate} lacks the least memory: it is " in text
    assert f"the largest part of its memory is {nearest.largest_kind}" in text
    assert "Bottleneck: the host; compute takes" in text  # the model is too small for this machine
    for row in (line for line in text.splitlines() if ", " in line and "│" in line):
        assert re.search(rf"│ -[\d,]+, ({'|'.join(KINDS)}) │", row), row
    assert text.count(f", {lacking[0].largest_kind} │") > 0
    loose = str(planned())
    assert "No candidate above the memory limit would be faster." in loose
    assert "With a microbatch twice as large: " in loose
    assert "With 4 microbatches a step: " in loose


class Searching(nn.Linear):
    """Its forward depends on a value of a tensor, so it cannot be simulated."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.sum() > 0:
            x = x * 2
        return x.sum()


def test_a_model_that_reads_values_is_planned_by_formulas(tmp_path: Path) -> None:
    build = partial(Searching, 8, 8)
    planning = fe.plan(build, torch.ones(2, 8), world_size=WORLD, machine=MACHINE)
    assert "test_plan.py" in planning.setting.why_unknown
    assert "if x.sum() > 0:" in planning.setting.why_unknown
    assert len(planning.outcomes) == 14
    for each in planning.outcomes:
        assert each.times is None
        assert "activations" not in each.memory
        assert each.fits is None
    assert planning.simulate is None
    assert planning.chosen is None
    text = str(planning)
    assert "Activations and times are unknown" in text
    assert "Whether any candidate fits is therefore unknown" in text
    assert "AdamW" not in text
    batch = torch.ones(2, 8)
    for optimizer, is_other in ((torch.optim.AdamW, False), (torch.optim.SGD, True)):
        planning = fe.plan(build, batch, world_size=WORLD, machine=MACHINE, optimizer=optimizer)
        assert ("Formulas count the optimizer state of AdamW" in str(planning)) is is_other
    planning = fe.plan(build, batch, world_size=1, checkpointing=(True, False, True))
    assert len(set(map(str, planning.outcomes))) == len(planning.outcomes)
    assert "Use " not in text
    with pytest.raises(ValueError, match="none that is known to fit, since activations"):
        _ = planning.best
    small = planning.within(1.0)
    assert [each.fits for each in small.outcomes] == [False] * len(small.outcomes)
    assert "No candidate fits 1 B. The nearest is" in str(small)
    save_figure(planning, tmp_path / "unknown.png")
    assert (tmp_path / "unknown.png").stat().st_size > 1000


def test_candidates_have_the_activations_of_given_extensions(simulated: list[Any]) -> None:
    given: dict[str, Any] = {"world_size": 2, "meshes": [(2,)]}
    for extension, recomputed, offloaded in (
        (fe.Recompute(), "blocks", ""),
        (fe.Recompute(policy="selective", every=2), "selective, every 2nd", ""),
        (fe.OffloadActivations(), "no", "activations on the host"),
    ):
        found = fe.plan(Words, words, extensions=[extension], **given)
        candidates = [each.candidate for each in found.outcomes]
        assert {each.recomputed for each in candidates} == {recomputed}
        assert {each.offloaded for each in candidates} == {offloaded}
        assert found.arguments()["extensions"] == [extension]
        with pytest.raises(ValueError, match="checkpointing: expected None with extensions that"):
            fe.plan(Words, words, extensions=[extension], checkpointing=(True,), **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_formulas_count_adamw_in_the_dtype_of_main_weights(dtype: torch.dtype) -> None:
    """A quick plan leaves out candidates whose weights and state do not fit by these formulas."""
    names = ("param_dtype", "main_params_dtype", "main_grads_dtype")
    given = {"world_size": 8, "loss": torch.mean, "checkpointing": (False,)}
    given |= {"mp_policy": fe.MixedPrecisionPolicy(**dict.fromkeys(names, dtype))}
    arguments = partial(nn.Linear, 512, 512, bias=False), torch.zeros(4, 512)
    full = fe.plan(*arguments, **given)
    held = {each.candidate.strategy: each.memory["optimizer"] for each in full.outcomes}
    for each in fe.plan(*arguments, **given, formulas=True).outcomes:
        assert held[each.candidate.strategy] == pytest.approx(each.memory["optimizer"], rel=1e-3)
    largest = max(full.outcomes, key=lambda each: each.peak_bytes)
    assert largest.candidate.strategy == "no_shard"
    quick = fe.plan(*arguments, **given, quick=True, memory=largest.peak_bytes)
    assert largest.candidate in [each.candidate for each in quick.outcomes]


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned_tightly().save(path)
    assert str(fe.StrategyPlan.load(path)) == str(planned_tightly())
    best = planned().best
    assert (best["mp_policy"], best["options"]) == (POLICY, fe.Options(min_unit_size=0))
    assert best["mesh"] == planned().outcomes[0].candidate.mesh
    given = planned().arguments((2, 2), WORLD, {"mp_policy": fe.MixedPrecisionPolicy()})
    assert given["mp_policy"] != POLICY
    assert "mesh" not in given  # the job has one
    path.write_text(json.dumps({"setting": {}}))
    with pytest.raises(ValueError, match=r"plan\.json: expected a plan as written by `save`"):
        fe.StrategyPlan.load(path)


def test_its_picture_shows_every_row_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpl: Any = pytest.importorskip("matplotlib")
    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    planning = fe.StrategyPlan(SETTING, rows()).within(SETTING.memory)
    save_figure(planning, tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    for word in (*KINDS, "compute", "waits for the inner link", "limit ", "step time ("):
        assert word in drawn
    # The chosen row is marked, and bars have their values.
    chosen = planning.chosen
    assert chosen is not None
    assert drawn.count("\u25b6") == 1
    assert f">\u25b6 {row_label(chosen)}<" in drawn
    assert f"chosen: {chosen.candidate}" in drawn
    assert "faded: does not fit" in drawn
    for outcome in planning.outcomes:
        assert outcome.candidate.levels in drawn
        assert f"{outcome.peak_bytes / 2**30:,.1f}" in drawn
        assert f"{format_count(outcome.rate)} tokens/s" in drawn


MESHES = (None, (4,), (2, 2))


def _shard_by_plan(path: str) -> list[tuple[object, ...]]:
    """Shard by the plan on each of ``MESHES``; returns the strategies and sizes."""
    found: list[tuple[object, ...]] = []
    for sizes in MESHES:
        mesh = None if sizes is None else init_device_mesh("cpu", sizes)
        engine = fe.shard(Words(), mesh, fe.StrategyPlan.load(path), initial_values="rank0")
        axes = (engine.mesh.outer.size, engine.mesh.inner.size)
        found.append((str(engine.strategy), axes))
    return found


def test_auto_uses_the_best_candidate_of_a_plan(ranks: Ranks, tmp_path: Path) -> None:
    planned_tightly().save(tmp_path / "plan.json")
    expected: list[tuple[object, ...]] = []
    for mesh in MESHES:
        every = (each.candidate for each in planned_tightly().outcomes)
        chosen = next(each for each in every if mesh in (None, each.mesh))
        sizes = chosen.mesh if len(chosen.mesh) == 2 else (1, *chosen.mesh)
        expected.append((f"({chosen.strategy}, {chosen.outer_strategy})", sizes))
    found = ranks.run(_shard_by_plan, str(tmp_path / "plan.json"), world_size=WORLD)
    assert found == [expected] * WORLD


def _refusals(*paths: str) -> list[str]:
    planning, nothing, of_four = map(fe.StrategyPlan.load, paths)
    told = []
    for arguments in (
        {"strategy": "auto"},
        {"strategy": "optim", "plan": planning},
        {"strategy": "auto", "plan": planning, "outer_strategy": "optim"},
        {"strategy": "auto", "plan": nothing},
        # One rank has another plan.
        {"strategy": "auto", "plan": nothing if dist.get_rank() == 1 else planning},
        {"strategy": "auto", "plan": of_four},
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            fe.shard(Words(), initial_values="rank0", **arguments)
        told.append(str(caught.value))
    return told


REFUSALS = [
    'or the result of fe.plan(); found "auto"',
    'strategy: expected "auto" beside plan=',
    "outer_strategy: expected None with",
    "No candidate fits 1.0 KiB",
    "expected a candidate that fits; found none",
    "plan: expected a plan for 2 ranks; found one for 4",
]


def test_auto_refuses_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    planning = quick_plan(Words, batch, world_size=2, meshes=[(2,)], fitting=1)
    paths = [str(tmp_path / f"{number}.json") for number in range(3)]
    for each, path in zip((planning, planning.within(2.0**10), planned()), paths, strict=True):
        each.save(path)
    for told in ranks.run(_refusals, *paths, world_size=2):
        for text, expected in zip(told, REFUSALS, strict=True):
            assert expected in text


def test_the_previous_name_of_the_class_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match=r"use fsdp_engine\.StrategyPlan"):
        assert fe.Planning is fe.StrategyPlan
    with pytest.raises(AttributeError, match="has no attribute 'Plannings'"):
        _ = fe.Plannings


def test_options_are_keyword_arguments_or_one_object() -> None:
    given = {"world_size": 4, "formulas": True, "checkpointing": (False,)}
    options = PlanOptions(**given, shard={"mp_policy": POLICY})
    planning = fe.plan(Words, words, options)
    assert planning.outcomes == fe.plan(Words, words, **given, mp_policy=POLICY).outcomes
    assert planning.options == {"mp_policy": POLICY}
    with pytest.raises(TypeError, match="no keyword arguments beside a PlanOptions; found"):
        fe.plan(Words, words, options, world_size=4)
    with pytest.raises(TypeError, match="options: expected a PlanOptions, or None"):
        fe.plan(Words, words, {"world_size": 4})
    step = StepOptions(machine=fe.A100, microbatches=2, shard={"mp_policy": POLICY})
    found = fe.simulate(Words, 4, batch=words(), options=step)
    same = {"machine": fe.A100, "microbatches": 2, "mp_policy": POLICY}
    assert found.seconds == fe.simulate(Words, 4, batch=words(), **same).seconds
