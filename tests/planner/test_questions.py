"""Duration and cost of a training run; other machines and numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.option_values import parsed_count
from fsdp_engine.planner.outcome import Outcome, Setting, Times
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of
from tests.models import LENGTH, Transformer, token_batch
from tests.planner.made_plans import LENGTH as TOKENS
from tests.planner.made_plans import Words, quick_plan, words

WORLD, ROWS, DIM = 16, 4, 32


def planned_by_hand() -> fe.StrategyPlan:
    """1,024 ranks in nodes of eight; a step of 2 s has 4M tokens and 3e17 flops of a rank."""
    candidate = Candidate((1024,), "optim_grads_params", "no_shard", True)
    outcome = Outcome(
        candidate,
        {"weights": 10, "activations": 5},
        {"inner": 1.0},
        0.0,
        items=4_000_000,
        times=Times(2.0, 1.5, {"inner": 0.5}, at_peak=0.8),
        model_flops=3e17,
        checkpoint_bytes=4_000_000_000_000,
    )
    setting = Setting("Model", 400_000_000_000, "machine", 1024, 8, 1e9, "tokens", 1)
    return fe.StrategyPlan(setting, (outcome,))


def small_plan(machine: fe.Machine = fe.H100, **options: Any) -> fe.StrategyPlan:
    given = {"world_size": WORLD, "checkpointing": (False,), "min_unit_size": 0, **options}
    return quick_plan(Words, words, machine=machine, **given)


def test_a_run_of_tokens_has_days_gpu_hours_cost_and_mfu(tmp_path: Path) -> None:
    run = planned_by_hand().training(12e12, price=2.5)
    assert run.steps == 3_000_000
    assert run.seconds == 6e6
    assert run.days == pytest.approx(6e6 / 86400)  # 69.4
    assert run.gpu_hours == pytest.approx(6e6 * 1024 / 3600)
    assert run.cost == pytest.approx(2.5 * 6e6 * 1024 / 3600)
    assert run.mfu == pytest.approx(0.4)
    assert run.model_flops == pytest.approx(3_000_000 * 1024 * 3e17)
    assert str(run) == (
        "Training on 12T tokens takes 3,000,000 steps, 69.4 days (accuracy unknown), 1.71M "
        "GPU hours on 1,024 ranks; 9.22e+26 model flops, MFU 40.0%. Cost: $4.27M at $2.50 per GPU "
        "hour."
    )
    planned_by_hand().save(tmp_path / "plan.json")
    assert str(fe.StrategyPlan.load(tmp_path / "plan.json").training(12e12, 2.5)) == str(run)
    part = planned_by_hand().training(4_000_001)  # the last, partial step counts as a step
    assert (part.steps, part.cost) == (2, None)


def test_questions_without_an_answer_are_errors() -> None:
    planning = planned_by_hand()
    of_batch = replace(planning, setting=replace(planning.setting, global_batch=8))
    for ask, message in (
        (lambda: planning.training(0), "tokens: expected tokens or samples, more than 0"),
        (lambda: planning.training(1e12, price=-1), "price: expected dollars per GPU hour"),
        (planning.scaling, "plan: expected a plan that fe.plan made in this process"),
        (planning.full, "plan: expected a plan that fe.plan made in this process"),
        (lambda: planning.within(1).training(1e12), "expected a candidate that fits; found none"),
        (lambda: parsed_count("4G"), "expected a number such as 4M"),
        (lambda: planning.scaling(()), r"ranks: expected numbers of ranks; found \[\]"),
        (
            lambda: of_batch.scaling(iter([3, 5])),
            r"numbers that divide the 8 rows of the global batch; found \[3, 5\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ask()
    assert [parsed_count(each) for each in ("4M", "512k", "1e6")] == [4 * 2**20, 2**19, 1e6]


@pytest.mark.parametrize(("checkpointing", "microbatches"), [(False, 3), (True, 1)])
def test_model_flops_are_those_of_palm_with_and_without_recomputation(
    checkpointing: bool, microbatches: int
) -> None:
    """6 flops for each token and element of a product, and 12 T^2 D for attention."""
    build = partial(Transformer, num_blocks=2, dim=DIM)
    found = fe.simulate(
        build,
        WORLD,
        batch=token_batch(ROWS, 1),
        strategy="optim_grads_params",
        checkpointing=checkpointing,
        microbatches=microbatches,
    )
    products = [each for each in build().modules() if isinstance(each, nn.Linear)]
    elements = sum(each.weight.numel() for each in products)
    tokens = microbatches * ROWS * LENGTH
    attention = 12 * 2 * LENGTH * DIM  # two blocks
    assert found.model_flops == tokens * (6 * elements + attention)
    peak = fe.H100.processor.matrix_flops[torch.float32]
    assert found.seconds_at_peak == pytest.approx(found.model_flops / peak)
    assert found.mfu == pytest.approx(found.seconds_at_peak / found.seconds)


def test_flops_of_frozen_weights_are_not_in_their_backward() -> None:
    def frozen() -> nn.Module:
        first = nn.Linear(8, 16, bias=False).requires_grad_(False)
        return nn.Sequential(first, nn.Linear(16, 4, bias=False))

    found = fe.simulate(frozen, 2, batch=torch.zeros(3, 8), strategy="optim")
    # Two forwards, and the gradient of the second weight. No gradient of an input is needed.
    assert found.model_flops == 2 * 3 * (8 * 16 + 16 * 4 + 16 * 4)


def test_a_checkpoint_has_parameters_and_state_of_all_ranks() -> None:
    sizes = [each.numel() for each in Words().parameters()]
    for strategy in ("no_shard", "optim_grads_params"):
        found = fe.simulate(Words, WORLD, batch=words(), strategy=strategy)
        assert found.checkpoint_bytes == 12 * sum(sizes) + 4 * len(sizes)  # AdamW counts steps
    found = fe.simulate(Words, 4, batch=words(), optimizer=torch.optim.SGD)
    assert found.checkpoint_bytes == 4 * sum(sizes)


def test_machines_have_the_plans_that_they_have_alone() -> None:
    planning = small_plan(meshes=[(WORLD,)])
    found = planning.compare(("h100", fe.A100))
    assert [row.label for row in found.rows] == ["h100", fe.A100.name]
    assert found.rows[0].chosen == planning.chosen
    assert found.rows[1].chosen == small_plan(fe.A100, meshes=[(WORLD,)]).chosen
    link = replace(fe.H100.between_nodes, bandwidth=fe.H100.between_nodes.bandwidth / 1000)
    slower = planning.compare((fe.H100, replace(fe.H100, name="slow", between_nodes=link)))
    assert slower.rows[0].chosen == planning.chosen
    mark = accuracy_of("H100").mark
    assert f"Accuracy of times: H100 {mark}, " in str(slower).replace("\n", " ")
    speedup = slower.speedup(slower.rows[1])
    assert speedup is not None
    assert speedup < 0.99
    assert "slow" in str(slower)


def test_the_limit_of_within_is_that_of_further_plans(simulated: list[Any]) -> None:
    """Also in plans made from it: full ones, those for other machines and for other numbers of
    ranks."""
    planning = small_plan(meshes=[(WORLD,)])
    for limit in (1e6, planning.outcomes[0].peak_bytes - 1.0):
        tight = planning.within(2e6).within(limit)
        assert {each.memory for each in (tight.setting, tight.full().setting)} == {limit}
        assert bool(tight.full().chosen) == bool(tight.chosen)
        for each in (tight, tight.full()):
            rows = (*each.compare(("h100", "h200")).rows, *each.scaling((2, WORLD)).rows)
            assert {row.setting.memory for row in rows} == {limit}
    limits = [row.setting.memory for row in planning.full().compare(("h100", "h200")).rows]
    assert limits == [0.9 * machine.processor.memory_bytes for machine in (fe.H100, fe.H200)]


def test_numbers_of_ranks_have_a_row_each() -> None:
    found = small_plan(meshes=[(WORLD,)]).scaling((2, WORLD))
    assert [row.label for row in found.rows] == ["2", "16"]
    for row in found.rows:
        assert row.setting.world_size == int(row.label)
        assert row.chosen is not None
        assert row.chosen.items == int(row.label) * ROWS * TOKENS
    assert found.efficiency(found.rows[0]) == 1.0
    expected = found.rows[1].chosen.rate / found.rows[0].chosen.rate / 8
    assert found.efficiency(found.rows[1]) == pytest.approx(expected)
