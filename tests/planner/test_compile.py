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
from tests.models import Chain, Transformer, token_batch, vector_batch
from tests.planner.made_plans import quick_plan, times_of
from tests.pool import Ranks

ADVICE = "call block.compile() on each of them"
EVERY_SECOND = fe.Recompute(every=2)
# The host of this machine does not limit steps of a small model.
MACHINE = replace(
    fe.H100,
    processor=replace(fe.H100.processor, matrix_flops={torch.float32: 1e10}, memory_bandwidth=1e10),
    host_seconds=0.0,
)


def build(num_blocks: int = 4) -> nn.Module:
    return Transformer(num_blocks, dim=64)


build_one = functools.partial(build, 1)


def build_compiled() -> nn.Module:
    model = build(1)
    model.blocks[0].compile()
    return model


def plan(make: Any, **options: Any) -> fe.StrategyPlan:
    """A quick plan for two ranks, which form one axis."""
    return quick_plan(make, token_batch(32, 0), world_size=2, min_unit_size=0, **options)


@functools.cache
def of_one_block(make: Any = build_one, **options: Any) -> fe.StrategyPlan:
    return plan(make, checkpointing=(False, True), **options)


@pytest.mark.parametrize("few", [{"fitting": 2}, pytest.param({}, marks=pytest.mark.thorough)])
def test_rows_of_compiled_blocks_are_faster_and_say_so(tmp_path: Path, few: Any) -> None:
    eager, compiled = of_one_block(**few), of_one_block(compile=True, **few)
    before = {each.candidate: times_of(each).step for each in eager.outcomes}
    assert {each.checkpointing for each in before} == {False, True}
    assert before.keys() == {each.candidate for each in compiled.outcomes}
    assert all(times_of(e).step < before[e.candidate] for e in compiled.outcomes)
    assert not eager.setting.is_compiled
    assert "compile" not in str(eager).replace("(torch.compile)", "")
    compiled.save(tmp_path / "plan.json")
    for each in (compiled, fe.StrategyPlan.load(tmp_path / "plan.json")):
        assert each.setting.is_compiled
        assert ADVICE in str(each)
        assert "blocks compiled" in str(each)
        assert "compile" not in each.best  # not an argument of fe.shard


@pytest.mark.thorough
def test_blocks_that_the_model_compiles_are_planned_alike() -> None:
    compiled = of_one_block(compile=True)
    assert of_one_block(build_compiled).outcomes == compiled.outcomes
    # A replan with compiled blocks does not reuse the rows of eager ones.
    replan = of_one_block().replan
    assert replan is not None
    rows = {each.candidate: each.times for each in compiled.outcomes}
    assert all(rows[each.candidate] == each.times for each in replan(compile=True).outcomes)


# Selective checkpointing.


@functools.cache
def deep(**options: Any) -> fe.StrategyPlan:
    return plan(build, memory=2.0**40, machine=MACHINE, **options)


def every_second() -> fe.StrategyPlan:
    return deep(checkpointing=(EVERY_SECOND,))


@functools.cache
def limited() -> fe.StrategyPlan:
    """A plan whose memory limit fits selective checkpointing."""
    outcomes = [each for each in deep().outcomes if each.candidate.checkpointing == "selective"]
    return deep().within(min(each.peak_bytes for each in outcomes))


def test_memory_and_times_are_between_those_of_all_and_of_nothing() -> None:
    outcomes = [*deep().outcomes, *every_second().outcomes]
    level_3 = [each for each in outcomes if each.candidate.strategy == "optim_grads_params"]
    peaks = {each.candidate.checkpointing: each.peak_bytes for each in level_3}
    steps = {each.candidate.checkpointing: times_of(each).step for each in level_3}
    assert peaks.keys() == {False, "selective", EVERY_SECOND, True}
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
    planning = plan(build, checkpointing=(policy,), fitting=1)
    assert planning.best["extensions"] == [policy]
    with pytest.raises(ValueError, match="checkpointing: expected a policy of None or 'selective'"):
        planning.save(path)


class Counting(nn.Linear):
    """Negates its input twice in every second run, which is a recomputation."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x if self.runs % 2 else x.neg().neg())


def test_it_is_left_out_where_a_recomputation_has_other_operations() -> None:
    options: dict[str, Any] = {"world_size": 2, "min_unit_size": 0}
    given = (lambda: Chain(Counting(8, 8), Counting(8, 8)), vector_batch(4, 0, 8))
    with pytest.warns(UserWarning, match="left out .*selective.*not found in storage"):
        planning = quick_plan(*given, **options)
    assert {each.candidate.checkpointing for each in planning.outcomes} == {False, True}
    with pytest.raises(fe.SimulationError, match="not found in storage"):
        fe.plan(*given, checkpointing=("selective",), **options)


def _shard_by_plan(path: str) -> list[str]:
    torch.manual_seed(0)
    model = build()
    fe.shard(model, strategy=fe.StrategyPlan.load(path), options=fe.Options(min_unit_size=0))
    model(*token_batch(4, 0)).backward()
    return [type(block.forward).__name__ for block in model.blocks]


def test_what_is_planned_can_be_run(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    checkpointed = "CheckpointedForward"
    for planning, forwards in (
        (limited(), 4 * [checkpointed]),
        (every_second(), 2 * ["method", checkpointed]),
    ):
        planning.save(path)
        assert ranks.run(_shard_by_plan, str(path), world_size=2) == 2 * [forwards]
