"""Duration, cost and checkpoints of a training run; other machines and numbers of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner import strategy_plan
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.comparison import WHAT_IF, ComparedRow, Comparison, comparison_texts
from fsdp_engine.planner.machine_changes import (
    FIELDS,
    changed_machine,
    halved_and_doubled,
    parsed_changes,
)
from fsdp_engine.planner.outcome import Outcome, Setting, Times, fastest_outcomes
from fsdp_engine.planner.questions import daly_interval, parsed_count, slowdown, young_interval
from fsdp_engine.simulation.time_accuracy import accuracy_of
from tests.models import LENGTH, Transformer, token_batch
from tests.planner.made_plans import LENGTH as TOKENS
from tests.planner.made_plans import Words, words

HOUR, DAY = 3600.0, 86400.0
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
    return fe.plan(Words, words, machine=machine, **given)


def test_a_run_of_tokens_has_days_gpu_hours_cost_and_mfu() -> None:
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
    part = planned_by_hand().training(4_000_001)  # a part of a step is a step
    assert (part.steps, part.cost) == (2, None)


# Daly, 2006: the values that figures 3 to 5 of the paper state.
@pytest.mark.parametrize(
    ("mtbf_minutes", "expected_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)]
)
def test_the_interval_of_daly_is_that_of_his_paper(
    mtbf_minutes: float, expected_minutes: float
) -> None:
    found = daly_interval(5 * 60, 60 * mtbf_minutes) / 60
    assert found == pytest.approx(expected_minutes, abs=0.5 if expected_minutes > 10 else 0.05)


def test_intervals_of_simple_numbers() -> None:
    assert young_interval(50.0, 10_000.0) == 1000.0
    # Saves that take longer than failures are apart are as far apart as these.
    assert daly_interval(200.0, 100.0) == 100.0


@pytest.mark.parametrize("mtbf", [1800.0, 6 * HOUR, 5 * DAY])
def test_the_interval_loses_the_least_time_of_dalys_model(mtbf: float) -> None:
    best = daly_interval(60.0, mtbf)
    least = slowdown(best, 60.0, 120.0, mtbf)
    assert 1 < least < 2
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert slowdown(factor * best, 60.0, 120.0, mtbf) > least


def test_the_slowdown_of_rare_and_of_frequent_failures() -> None:
    # First order: d / t for saves, (t / 2 + R) / M for repeated work.
    found = slowdown(1000.0, 10.0, 50.0, 1e7)
    assert found - 1 == pytest.approx(10 / 1000 + (1010 / 2 + 50) / 1e7, rel=2e-2)
    # A job that cannot save between failures loses all of its time.
    assert slowdown(1.0, 1.0, 1000.0, 1.0) == math.inf
    assert planned_by_hand().checkpoints(1e9, 1.0).overhead == 1


def test_checkpoints_of_a_plan() -> None:
    found = planned_by_hand().checkpoints(100e9, mtbf_hours=51_200)
    assert found.save_seconds == found.restart_seconds == 40.0
    assert found.mtbf == 50 * HOUR
    assert found.seconds == daly_interval(40.0, 50 * HOUR)
    assert found.steps == round(found.seconds / 2.0)
    assert 0.02 < found.overhead < 0.03  # twice 40 s of each 63 minutes
    of_nodes = planned_by_hand().checkpoints(100e9, 51_200, of="node", restart_seconds=600)
    assert of_nodes.mtbf == 400 * HOUR
    assert of_nodes.restart_seconds == 600
    assert str(found) == (
        "A checkpoint has 3.6 TiB; saving it takes 40.00 s. With a failure every 2.1 days (1,024 "
        "GPUs, each fails once in 51,200 hours), save every 62.8 minutes (Daly; Young: 63.2 "
        "minutes), 1,884 steps: saves, repeated work and restarts take 2.1% of the time."
    )


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda plan: plan.training(0), "tokens: expected tokens or samples, more than 0"),
        (lambda plan: plan.training(1e12, price=-1), "price: expected dollars per GPU hour"),
        (lambda plan: plan.checkpoints(math.inf, 10), "bandwidth: expected bytes per second"),
        (lambda plan: plan.checkpoints(1e9, 0), "mtbf: expected mean hours"),
        (lambda plan: plan.checkpoints(1e9, 10, of="rack"), "of: expected 'gpu' or 'node'"),
        (lambda plan: plan.scaling(), "plan: expected one of this process"),
        (lambda plan: plan.what_if("outer_bandwidth=2x"), "plan: expected one of this process"),
        (lambda plan: plan.full(), "plan: expected one of this process"),
        (lambda plan: plan.within(1).training(1e12), "expected a candidate that fits; found none"),
    ],
)
def test_questions_without_an_answer_are_errors(
    ask: Callable[[fe.StrategyPlan], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(planned_by_hand())


def test_a_saved_plan_still_answers(tmp_path: Path) -> None:
    planned_by_hand().save(tmp_path / "plan.json")
    loaded = fe.StrategyPlan.load(tmp_path / "plan.json")
    assert str(loaded.training(1e12, 2)) == str(planned_by_hand().training(1e12, 2))
    assert loaded.checkpoints(1e9, 1e5) == planned_by_hand().checkpoints(1e9, 1e5)


@pytest.mark.parametrize(("checkpointing", "microbatches"), [(False, 3), (True, 1)])
def test_model_flops_are_those_of_palm_with_and_without_recomputation(
    checkpointing: bool, microbatches: int
) -> None:
    """6 flops for each token and element of a product, and 12 T^2 D for attention."""
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


def build() -> nn.Module:
    return Transformer(num_blocks=2, dim=DIM)


def test_flops_of_frozen_weights_are_not_in_their_backward() -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        model[0].weight.requires_grad_(False)
        return model

    found = fe.simulate(frozen, 2, batch=torch.zeros(3, 8), strategy="optim")
    # Both forwards; the second one's weight has a gradient, and no input of it needs one.
    assert found.model_flops == 2 * 3 * (8 * 16 + 16 * 4 + 16 * 4)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_checkpoint_has_parameters_and_state_of_all_ranks() -> None:
    sizes = [each.numel() for each in Words().parameters()]
    for strategy in ("no_shard", "optim_grads_params"):
        found = fe.simulate(Words, WORLD, batch=words(), strategy=strategy)
        assert found.checkpoint_bytes == 12 * sum(sizes) + 4 * len(sizes)  # AdamW counts steps
    found = fe.simulate(Words, 4, batch=words(), optimizer=sgd)
    assert found.checkpoint_bytes == 4 * sum(sizes)


def test_changes_of_a_machine_are_factors_or_values() -> None:
    found = changed_machine(
        fe.H100,
        {
            "outer_bandwidth": "0.5x",
            "within_node.latency": 1e-3,
            "memory_bytes": "141e9",
            "ranks_per_node": "2x",
            "matrix_flops": "2x",
            "disk.latency": "0.5x",
        },
    )
    assert found.between_nodes == replace(fe.H100.between_nodes, bandwidth=25e9)
    assert found.within_node == replace(fe.H100.within_node, latency=1e-3)
    assert found.processor.memory_bytes == 141e9
    assert found.ranks_per_node == 16
    peaks = fe.H100.processor.matrix_flops
    assert found.processor.matrix_flops == {dtype: 2 * peaks[dtype] for dtype in peaks}
    assert found.disk.latency == fe.H100.disk.latency / 2
    assert found.name == (
        f"{fe.H100.name}, outer_bandwidth=0.5x, within_node.latency=0.001, memory_bytes=141e9, "
        "ranks_per_node=2x, matrix_flops=2x, disk.latency=0.5x"
    )


def test_every_number_of_a_machine_has_a_name() -> None:
    processor = replace(fe.H100.processor, fused_function_seconds=1e-10)  # presets have none
    machine = replace(fe.H100, processor=processor)
    for name in FIELDS:
        if name != "processor.achievable_flops":
            assert changed_machine(machine, {name: "1x"}) == replace(
                machine, name=f"{machine.name}, {name}=1x"
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bandwidth=2x", "expected one of .*outer_bandwidth.*; found 'bandwidth'"),
        ("outer_bandwidth", "expected changes such as outer_bandwidth=0.5x"),
        ("outer_bandwidth=fast", "expected outer_bandwidth as a value or as a factor"),
        ("outer_bandwidth=-1x", "outer_bandwidth=-1x: bandwidth: expected a number larger than 0"),
        ("ranks_per_node=0.3x", "ranks_per_node: expected 1 rank or more"),
        ("host_link.both=9x", "host_link.both=9x: both: expected at most the sum"),
    ],
)
def test_changes_that_cannot_be_are_errors(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed_machine(fe.H100, parsed_changes(change))
    with pytest.raises(ValueError, match=r"expected a machine with disk\.into; found .* without"):
        changed_machine(replace(fe.H100, disk=None), {"disk.into": "2x"})


def test_machines_and_changes_have_the_plans_that_they_have_alone() -> None:
    planning = small_plan(meshes=[(WORLD,)])
    found = planning.compare(("h100", fe.A100))
    assert [row.label for row in found.rows] == ["h100", fe.A100.name]
    assert found.rows[0].chosen == planning.chosen
    assert found.rows[1].chosen == small_plan(fe.A100, meshes=[(WORLD,)]).chosen
    slower = planning.what_if("outer_bandwidth=0.001x,inner_bandwidth=0.001x")
    assert slower.rows[0].chosen == planning.chosen
    mark = accuracy_of("H100").mark
    assert f"Accuracy of times: H100 {mark}." in str(slower).replace("\n", " ")
    speedup = slower.speedup(slower.rows[1])
    assert speedup is not None
    assert speedup < 0.99
    assert "outer_bandwidth=0.001x" in str(slower)


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


@pytest.mark.thorough
def test_a_global_batch_is_that_of_all_numbers_of_ranks() -> None:
    planning = small_plan(global_batch=WORLD * 2 * TOKENS)
    found = planning.scaling((2, 3, 8))
    assert [row.label for row in found.rows] == ["2", "8"]  # 3 does not divide 32 rows
    assert {row.chosen.items for row in found.rows} == {WORLD * 2 * TOKENS}
    with pytest.raises(ValueError, match=r"expected numbers that divide the 32 rows"):
        planning.scaling((3,))


def test_numbers_of_tokens_as_text() -> None:
    assert parsed_count("4M") == 4 * 2**20
    assert parsed_count("512k") == 2**19
    assert parsed_count("1e6") == 1e6
    with pytest.raises(ValueError, match="expected a number such as 4M"):
        parsed_count("4G")


def test_half_and_twice_of_compute_and_links_are_simulated_for_the_fastest_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy_plan, "_NUM_FASTEST", 2)
    planning = small_plan(meshes=((WORLD,),))
    found = planning.what_if("auto")
    names = ("matrix_flops", "inner_bandwidth", "outer_bandwidth")
    changes = [f"{name}={factor}" for name in names for factor in ("0.5x", "2x")]
    assert [row.label for row in found.rows] == ["as planned", *changes]
    fastest = [each.candidate for each in fastest_outcomes(planning.outcomes, 2)]
    for row in found.rows[1:]:
        assert {each.candidate for each in row.outcomes} == {*fastest}
        assert row.chosen == row.outcomes[0]
    full = planning.what_if(changes[-2]).rows[1]
    assert len(full.outcomes) > len(fastest) == 2
    for each in fastest:
        assert found.rows[-2].outcome_of(each) == full.outcome_of(each)
    table = " ".join(str(found).split())
    assert f"By auto, the {len(fastest)} fastest of different rates were simulated." in table


def test_changes_are_of_the_links_that_a_job_has() -> None:
    def names(machine: fe.Machine, num_ranks: int) -> list[str]:
        return [*dict.fromkeys(name for c in halved_and_doubled(machine, num_ranks) for name in c)]

    assert names(fe.H100, 1) == ["matrix_flops"]
    assert names(fe.H100, 8) == ["matrix_flops", "inner_bandwidth"]
    assert names(fe.H100, 16) == ["matrix_flops", "inner_bandwidth", "outer_bandwidth"]
    assert names(replace(fe.H100, ranks_per_node=1), 2) == ["matrix_flops", "outer_bandwidth"]


def test_a_row_of_what_if_says_what_keeping_the_choice_would_give() -> None:
    first, other = planned_by_hand().outcomes[0], planned_by_hand().outcomes[0]
    other = replace(other, candidate=replace(other.candidate, strategy="optim"))
    slow = replace(first, times=replace(first.times, step=8.0))
    quick = replace(other, times=replace(other.times, step=4.0))
    setting = planned_by_hand().setting
    rows = [ComparedRow("as planned", setting, first, (first, other))]
    rows += [ComparedRow("slower", setting, quick, (quick, slow))]
    rows += [ComparedRow("only another", setting, quick, (quick,))]
    close = replace(first, times=replace(first.times, step=4.004))
    rows += [ComparedRow("as fast", setting, quick, (quick, close))]
    found = Comparison(WHAT_IF, tuple(rows))
    texts = comparison_texts(found)
    assert texts.columns[:4] == ["step", "tokens/s", "speed", "if kept"]
    speeds = [cells[2:4] for cells in texts.cells]
    assert speeds == [["1.00", "1.00"], ["0.50", "0.25"], ["0.50", "-"], ["0.50", "0.50"]]
    marks = [text.endswith(", another choice") for _, text in texts.labels]
    assert marks == [False, True, True, False]


def test_rows_with_equal_rates_are_simulated_once() -> None:
    first = planned_by_hand().outcomes[0]
    steps = (2.0, 2.001, 2.1, 2.2, 2.3)
    found = [replace(first, times=replace(first.times, step=step)) for step in steps]
    found[3] = replace(found[3], lacking=1.0)
    fastest = fastest_outcomes(found, 2)
    assert [each.times.step for each in fastest] == [2.0, 2.1]
    assert len(fastest_outcomes(found, 9)) == 3
