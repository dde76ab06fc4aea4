"""Plans of compiled blocks, and of selective checkpointing: rows of their own that can be run."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner.outcome import Outcome
from tests.models import Transformer, token_batch
from tests.planner.made_plans import quick_plan
from tests.pool import Ranks

ADVICE = "call block.compile() on each of them"


def build() -> nn.Module:
    return Transformer(num_blocks=1, dim=64)


def build_compiled() -> nn.Module:
    model = build()
    model.blocks[0].compile()
    return model


@functools.cache
def planned(make: Any = build, **options: Any) -> fe.StrategyPlan:
    given = {"world_size": 2, "min_unit_size": 0, "checkpointing": (False, True), **options}
    return quick_plan(make, token_batch(32, 0), **given)


@pytest.mark.parametrize("few", [{"fitting": 2}, pytest.param({}, marks=pytest.mark.thorough)])
def test_rows_of_compiled_blocks_are_faster_and_hold_less(tmp_path: Path, few: Any) -> None:
    eager, compiled = planned(**few), planned(compile=True, **few)
    before = {each.candidate: each for each in eager.outcomes}
    assert {each.checkpointing for each in before} == {False, True}
    assert before.keys() == {each.candidate for each in compiled.outcomes}
    for each in compiled.outcomes:
        other = before[each.candidate]
        assert each.times is not None
        assert other.times is not None
        assert each.times.step < other.times.step
        if each.candidate.checkpointing is False:
            assert each.peak_bytes < other.peak_bytes
    assert not eager.setting.is_compiled
    assert compiled.setting.is_compiled
    assert ADVICE in str(compiled)
    assert "blocks compiled" in str(compiled)
    assert "compile" not in str(eager).replace("(torch.compile)", "")
    assert "compile" not in compiled.best  # an argument of no engine
    compiled.save(tmp_path / "plan.json")
    loaded = fe.StrategyPlan.load(tmp_path / "plan.json")
    assert loaded.setting.is_compiled
    assert ADVICE in str(loaded)


@pytest.mark.thorough
def test_blocks_that_the_model_compiles_are_planned_alike() -> None:
    compiled = planned(compile=True)
    assert planned(build_compiled).outcomes == compiled.outcomes
    # Plans of one call do not share rows of compiled blocks.
    assert planned().replan is not None
    assert planned().replan(compile=True).outcomes[0].times == compiled.outcomes[0].times


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile: expected a model with blocks.*Linear"):
        fe.simulate(lambda: nn.Linear(4, 4), 2, batch=torch.zeros(2, 4), compile=True)


WORLD = 2
EVERY_SECOND = fe.Recompute(every=2)
# Whose host does not limit steps of a small model.
MACHINE = replace(
    fe.H100,
    processor=replace(fe.H100.processor, matrix_flops={torch.float32: 1e10}, memory_bandwidth=1e10),
    host_seconds=0.0,
)


def build_deep() -> nn.Module:
    return Transformer(num_blocks=4, dim=64)


def planned_deep(**options: Any) -> fe.StrategyPlan:
    """On one axis, as every plan of two ranks."""
    given = {"batch": token_batch(32, 0), "world_size": WORLD, "min_unit_size": 0, **options}
    return quick_plan(build_deep, memory=2.0**40, machine=MACHINE, **given)


@functools.cache
def by_default() -> fe.StrategyPlan:
    return planned_deep()


@functools.cache
def every_second() -> fe.StrategyPlan:
    return planned_deep(checkpointing=(EVERY_SECOND,))


@functools.cache
def limited() -> fe.StrategyPlan:
    """With memory for a candidate with selective checkpointing."""
    outcomes = [e for e in by_default().outcomes if e.candidate.checkpointing == "selective"]
    return by_default().within(min(each.peak_bytes for each in outcomes))


def of_level(level: str) -> dict[Any, Outcome]:
    """Outcomes by what becomes of activations."""
    outcomes = by_default().outcomes + every_second().outcomes
    return {e.candidate.checkpointing: e for e in outcomes if e.candidate.strategy == level}


def test_memory_and_times_are_between_those_of_all_and_of_nothing() -> None:
    found = of_level("optim_grads_params")
    assert found.keys() == {False, "selective", EVERY_SECOND, True}
    peaks = {way: each.peak_bytes for way, each in found.items()}
    steps = {way: each.times.step for way, each in found.items() if each.times is not None}
    for some in ("selective", EVERY_SECOND):
        assert peaks[True] < 0.95 * peaks[some] < 0.9 * peaks[False]
        assert steps[False] < 0.99 * steps[some] < 0.98 * steps[True]


def test_it_is_tried_and_chosen_where_nothing_faster_fits_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert "ranks, activation checkpointing (selective): " in str(limited())
    assert "activation checkpointing (blocks, every 2nd): " in str(every_second())
    for planning, given in ((limited(), fe.Recompute("selective")), (every_second(), EVERY_SECOND)):
        planning.save(path)
        loaded = fe.StrategyPlan.load(path)
        assert loaded.outcomes == planning.outcomes
        assert loaded.best["extensions"] == planning.best["extensions"] == [given]
    path.write_text(path.read_text().replace('"every": 2', '"every": 0'))
    with pytest.raises(ValueError, match="every: expected 1 or more; found 0"):
        fe.StrategyPlan.load(path)
    policy = fe.Recompute(policy=[torch.ops.aten.mm.default])
    planning = planned_deep(checkpointing=(policy,), fitting=1)
    assert planning.best["extensions"] == [policy]
    with pytest.raises(ValueError, match="checkpointing: expected a policy of None or 'selective'"):
        planning.save(path)


class Counting(nn.Linear):
    """Negates its input twice in every second run, which is a recomputation."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x if self.runs % 2 else x.neg().neg())


class Varying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_it_is_left_out_where_a_recomputation_has_other_operations() -> None:
    options: dict[str, Any] = {"batch": torch.zeros(4, 8), "world_size": 2, "min_unit_size": 0}
    with pytest.warns(UserWarning, match="left out .*selective.*not found in storage"):
        planning = quick_plan(Varying, **options)
    assert {each.candidate.checkpointing for each in planning.outcomes} == {False, True}
    with pytest.raises(fe.SimulationError, match="not found in storage"):
        fe.plan(Varying, checkpointing=("selective",), **options)


def _shard_by_plans(paths: list[str]) -> list[list[str]]:
    found = []
    for path in paths:
        torch.manual_seed(0)
        model = build_deep()
        fe.shard(model, strategy=fe.StrategyPlan.load(path), options=fe.Options(min_unit_size=0))
        found.append([type(block.forward).__name__ for block in model.blocks])
        model(*token_batch(4, 0)).backward()
    return found


def test_what_is_planned_can_be_run(ranks: Ranks, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.json") for number in range(2)]
    limited().save(paths[0])
    every_second().save(paths[1])
    checkpointed = "CheckpointedForward"
    expected = [4 * [checkpointed], 2 * ["method", checkpointed]]
    assert ranks.run(_shard_by_plans, paths, world_size=WORLD) == WORLD * [expected]
