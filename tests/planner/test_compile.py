"""Plans of compiled blocks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from tests.models import Transformer, token_batch
from tests.planner.made_plans import quick_plan

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


def test_rows_of_compiled_blocks_are_faster_and_hold_less(tmp_path: Path) -> None:
    eager, compiled = planned(), planned(compile=True)
    before = {each.candidate: each for each in eager.outcomes}
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
