"""The selected row in the page of a plan: its answers are those of Python."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import fsdp_engine as fe
from fsdp_engine.planner.comparison import (
    WHAT_IF,
    Answers,
    ComparedRow,
    Comparison,
    comparison_texts,
)
from fsdp_engine.planner.outcome import Outcome, Setting, sorted_outcomes
from fsdp_engine.planner.page import page_of
from fsdp_engine.planner.plan_view import KIND_COLOURS, TIME_COLOURS, time_label
from fsdp_engine.planner.question_output import Questions
from fsdp_engine.planner.questions import (
    GPU,
    NODE,
    CheckpointInterval,
    TrainingRun,
    format_duration,
    format_large,
)
from fsdp_engine.simulation.time_accuracy import accuracy_of
from fsdp_engine.terminal import format_bytes, format_count
from tests.browser import needs_chromium, seen
from tests.planner.made_plans import SETTING, made_plan, rows

PROBE = """
const byId = (id) => document.getElementById(id);
const row = (order) => document.querySelector(`#plan tr[data-order="${order}"]`);
const answers = () => Object.fromEntries(Array.from(document.querySelectorAll("dd[id]")).map(
  (place) => [place.id, { value: place.dataset.value, text: place.textContent }]));
const parts = (id) => Array.from(byId(id).rows).map(
  (part) => Array.from(part.cells).map((cell) => cell.textContent));
const write = (id, value) => {
  byId(id).value = value;
  byId(id).dispatchEvent(new Event("input"));
};
const state = () => ({
  answers: answers(),
  label: byId("selected-label").textContent,
  memory: parts("selected-memory"),
  times: parts("selected-times"),
  whatIfs: parts("selected-what-ifs"),
  isShown: !byId("selected-what-ifs-panel").hidden,
  elsewhere: byId("selected-elsewhere").textContent,
  pressed: Array.from(document.querySelectorAll('#plan [aria-pressed="true"]'))
    .map((button) => button.closest("tr").dataset.order),
  invalid: Array.from(document.querySelectorAll("[aria-invalid]")).map((field) => field.id),
});
seen.first = { fields: Object.fromEntries(Array.from(document.querySelectorAll(
  ".fields input, .fields select")).map((field) => [field.id, field.value])), ...state() };
seen.hidden = byId("selection").hidden;
seen.cases = CASES.map((each) => {
  row(each.order).cells[0].querySelector("button").click();
  Object.entries(each.fields).forEach(([id, value]) => write(id, value));
  return state();
});
row(1).cells[3].click();
seen.byCell = state().pressed;
seen.unlabelled = Array.from(document.querySelectorAll("input, select"))
  .filter((field) => field.labels.length !== 1).map((field) => field.id);
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
"""


def selected(
    planning: fe.StrategyPlan,
    folder: Path,
    cases: list[dict[str, Any]],
    *options: str,
    **given: Any,
) -> Any:
    """What the page shows of selected rows."""
    probe = PROBE.replace("CASES", json.dumps(cases))
    return seen(page_of(planning, **given), probe, folder, *options)


def case(order: int, **fields: object) -> dict[str, Any]:
    """A row to select, and texts to write into fields."""
    return {
        "order": order,
        "fields": {name.replace("_", "-"): str(value) for name, value in fields.items()},
    }


def run_answers(run: TrainingRun) -> dict[str, tuple[float | None, str]]:
    """Numbers and texts of a training run, by the page's ids."""
    return {
        "run-items": (run.items, f"{format_large(run.items)} {run.item}"),
        "run-steps": (run.steps, f"{run.steps:,}"),
        "run-time": (run.seconds, f"{format_duration(run.seconds)} {run.accuracy.mark}"),
        "run-gpu-hours": (run.gpu_hours, format_large(run.gpu_hours)),
        "run-mfu": (run.mfu, f"{run.mfu:.1%}"),
        "run-flops": (run.model_flops, f"{run.model_flops:.2e}"),
        "run-cost": (run.cost, "" if run.cost is None else f"${format_large(run.cost)}"),
    }


def interval_answers(found: CheckpointInterval) -> dict[str, tuple[float | None, str]]:
    """The same of an interval of checkpoints."""
    return {
        "checkpoint-size": (found.num_bytes, format_bytes(found.num_bytes)),
        "checkpoint-save": (found.save_seconds, format_duration(found.save_seconds)),
        "checkpoint-mtbf": (found.mtbf, format_duration(found.mtbf)),
        "checkpoint-interval": (found.seconds, format_duration(found.seconds)),
        "checkpoint-young": (found.young, format_duration(found.young)),
        "checkpoint-steps": (found.steps, f"{found.steps:,}"),
        "checkpoint-overhead": (found.overhead, f"{found.overhead:.1%}"),
    }


def assert_answers(found: Any, expected: dict[str, tuple[float | None, str]]) -> None:
    """Compare answers of the page with those of Python."""
    for name, (number, text) in expected.items():
        if number is None:
            assert found["answers"][name] == {"value": "", "text": "-"}, name
        else:
            assert float(found["answers"][name]["value"]) == pytest.approx(number, rel=1e-12), name
            assert found["answers"][name]["text"] == text, name


@needs_chromium
def test_training_runs_and_checkpoints_of_any_row_are_those_of_python(tmp_path: Path) -> None:
    planning = made_plan(world_size=1021)  # nodes are not full
    numbers = [
        # order, tokens, price, GB/s, hours, of, seconds of a restart
        (0, 1e12, None, 100.0, 50_000.0, GPU, None),
        (3, 15e12, 2.5, 12.5, 3e6, NODE, 600.0),
        (len(planning.outcomes) - 1, 1e7 + 1, 0.3, 1000.0, 777.0, GPU, 0.5),
        # Saves take longer than failures are apart: three times, and 1,900 times.
        (1, 1.0, None, 0.25, 300.0, GPU, None),
        (2, 3.3e14, 1e4, 0.25, 0.5, GPU, None),
    ]
    cases = [
        case(
            order,
            tokens=tokens,
            price="" if price is None else price,
            bandwidth=bandwidth,
            mtbf=hours,
            mtbf_of=of,
            restart="" if restart is None else restart,
        )
        for order, tokens, price, bandwidth, hours, of, restart in numbers
    ]
    found = selected(planning, tmp_path, cases)
    for state, (order, tokens, price, bandwidth, hours, of, restart) in zip(
        found["cases"], numbers, strict=True
    ):
        outcome = planning.outcomes[order]
        assert state["label"] == f"{outcome.candidate}{': does not fit' * bool(outcome.lacking)}"
        assert state["pressed"] == [str(order)]
        assert state["invalid"] == []
        assert_answers(state, run_answers(TrainingRun.of(planning.setting, outcome, tokens, price)))
        interval = CheckpointInterval.of(
            planning.setting, outcome, 1e9 * bandwidth, hours, of, restart
        )
        assert_answers(state, interval_answers(interval))
    lost = found["cases"][-1]["answers"]
    assert lost["checkpoint-interval"] == lost["checkpoint-mtbf"]
    assert lost["checkpoint-overhead"]["text"] == "100.0%"
    assert found["byCell"] == ["1"]
    assert found["unlabelled"] == []
    assert found["hidden"] is False


@needs_chromium
def test_fields_begin_with_the_numbers_that_were_asked(tmp_path: Path) -> None:
    planning = made_plan()
    questions = Questions(
        tokens=15.5e12, prices=(2.25,), bandwidth=1.5e11, mtbf_hours=1234.5, mtbf_of=NODE
    )
    found = selected(planning, tmp_path, [], questions=questions)["first"]
    assert found["label"] == str(planning.outcomes[0].candidate)
    fields = {name: float(found["fields"][name]) for name in ("tokens", "bandwidth", "mtbf")}
    assert fields == {"tokens": 15.5e12, "bandwidth": 150.0, "mtbf": 1234.5}
    assert found["fields"]["mtbf-of"] == NODE
    assert_answers(found, run_answers(planning.training(15.5e12, 2.25)))
    assert_answers(found, interval_answers(planning.checkpoints(1.5e11, 1234.5, NODE)))


@needs_chromium
def test_numbers_that_cannot_be_are_marked_and_have_no_answer(tmp_path: Path) -> None:
    cases = [
        case(0, tokens=-1, price=0, restart=-5),
        case(0, tokens="", price="", bandwidth="", restart=""),
        case(0, tokens=1e9, bandwidth=1),
    ]
    first, second, third = selected(made_plan(), tmp_path, cases)["cases"]
    assert first["invalid"] == ["tokens", "price", "restart"]
    for name in ("run-time", "run-cost", "run-steps", "checkpoint-overhead"):
        assert first["answers"][name] == {"value": "", "text": "-"}
    assert first["answers"]["run-mfu"]["text"] != "-"
    assert first["answers"]["checkpoint-interval"]["text"] != "-"
    assert second["invalid"] == ["tokens", "bandwidth"]
    assert third["invalid"] == []
    assert third["answers"]["run-cost"]["text"] == "-"
    assert third["answers"]["checkpoint-overhead"]["text"] != "-"


@needs_chromium
def test_a_selected_row_has_its_memory_and_times(tmp_path: Path) -> None:
    outcomes = sorted_outcomes(rows(is_offloaded=True))
    planning = fe.StrategyPlan(SETTING, outcomes)
    order = next(number for number, each in enumerate(outcomes) if each.elsewhere)
    cases = [case(0), case(order)]
    found = selected(planning, tmp_path, cases)["cases"]
    for state, outcome in zip(found, (outcomes[0], outcomes[order]), strict=True):
        assert outcome.times is not None
        peak, step = outcome.peak_bytes, outcome.times.step
        memory = [
            [kind, f"{format_bytes(outcome.memory[kind])}, {outcome.memory[kind] / peak:.0%}", ""]
            for kind in KIND_COLOURS
        ]
        assert state["memory"] == memory
        shares = outcome.times.shares()
        times = [
            [time_label(name), f"{1e3 * shares[name] * step:,.1f} ms, {shares[name]:.0%}", ""]
            for name in TIME_COLOURS
            if shares.get(name)
        ]
        assert state["times"] == times
        assert not state["isShown"]
    assert found[0]["elsewhere"] == ""
    assert found[1]["elsewhere"] == f"On the host: {format_bytes(2**36)}."


def slower(outcome: Outcome, factor: float) -> Outcome:
    """The outcome with a longer step."""
    assert outcome.times is not None
    times = replace(outcome.times, step=factor * outcome.times.step)
    return replace(outcome, times=times)


@needs_chromium
def test_a_selected_row_has_its_times_on_other_machines(tmp_path: Path) -> None:
    planning = made_plan()
    first, second = planning.outcomes[:2]
    here = (slower(second, 1.5), slower(first, 4.0))
    compared = [ComparedRow("as planned", planning.setting, first, planning.outcomes)]
    compared += [ComparedRow("outer_bandwidth=0.5x", planning.setting, here[0], here)]
    texts = comparison_texts(Comparison(WHAT_IF, tuple(compared)))
    found = selected(
        planning, tmp_path, [case(0), case(1), case(2)], answers=Answers((), (texts,))
    )["cases"]

    def shown(label: str, outcome: Outcome, *, is_fastest: bool = False) -> list[str]:
        assert outcome.times is not None
        mark = " ✔" * is_fastest
        step = f"{1e3 * outcome.times.step:,.1f} ms"
        return [f"{label}{mark}", step, format_count(outcome.rate)]

    assert found[0]["whatIfs"] == [
        shown("as planned", first, is_fastest=True),
        shown("outer_bandwidth=0.5x", here[1]),
    ]
    assert found[1]["whatIfs"] == [
        shown("as planned", second),
        shown("outer_bandwidth=0.5x", here[0], is_fastest=True),
    ]
    assert found[2]["whatIfs"] == [shown("as planned", planning.outcomes[2])]
    assert all(state["isShown"] for state in found)


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_not_wider_than_the_window(tmp_path: Path, width: int) -> None:
    found = selected(made_plan(), tmp_path, [], f"--window-size={width},800")
    assert found["wide"] == 0


def test_numbers_of_the_script_are_those_of_the_plan() -> None:
    planning = made_plan()
    numbers = script_numbers_of(page_of(planning))
    assert numbers["numRanks"] == planning.setting.world_size
    assert numbers["failing"] == {GPU: 1024, NODE: 128}
    assert numbers["mark"] == accuracy_of("H100").mark
    assert numbers["limit"] == planning.setting.memory
    for found, outcome in zip(numbers["rows"], planning.outcomes, strict=True):
        assert outcome.times is not None
        assert found["step"] == outcome.times.step
        assert found["mfu"] == outcome.times.mfu
        assert found["peak"] == sum(part["value"] for part in found["memory"])
        assert sum(part["value"] for part in found["times"]) == pytest.approx(found["step"])
        assert found["modelFlops"] == outcome.model_flops
        assert found["checkpointBytes"] == outcome.checkpoint_bytes


def script_numbers_of(text: str) -> Any:
    """The numbers of a page for its script."""
    (found,) = re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', text)
    return json.loads(found)


def test_a_plan_without_times_or_checkpoints_has_no_fields_for_them() -> None:
    planning = made_plan()
    old = replace(
        planning,
        outcomes=tuple(replace(each, checkpoint_bytes=0) for each in planning.outcomes),
    )
    assert 'id="tokens"' in page_of(old)
    assert 'id="bandwidth"' not in page_of(old)
    unknown = Setting(**{**asdict(SETTING), "why_unknown": "the model reads values."})
    timeless = [
        replace(each, times=None, memory={**each.memory, "activations": 0})
        for each in planning.outcomes
    ]
    text = page_of(fe.StrategyPlan(unknown, tuple(timeless)))
    assert 'id="tokens"' not in text
    assert 'id="selected-times"' not in text
    assert 'id="selected-memory"' in text
