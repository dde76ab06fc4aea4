"""The selected row in the page of a plan: its memory and times, and questions about it.

This module writes fields, empty places for answers, and the numbers that the script
(``page_files``) computes answers from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from fsdp_engine.planner.comparison import WHAT_IF, Answers
from fsdp_engine.planner.outcome import RATE_STEPS, Outcome, is_faster
from fsdp_engine.planner.plan_view import KIND_COLOURS, TIME_COLOURS, table_unit, time_label
from fsdp_engine.planner.question_output import Questions
from fsdp_engine.planner.questions import DURATIONS, GPU, HOUR, LARGE_UNITS, NODE, num_failing
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.simulation.time_accuracy import accuracy_of
from fsdp_engine.terminal import BYTE_UNITS

# Values of fields for which the plan was not asked: tokens, samples; GB/s, and hours of a GPU.
_EXAMPLES = {"tokens": 1e12, "samples": 1e8}
_BANDWIDTH, _MTBF_HOURS = 100.0, 50_000.0
# Bytes per second in a unit of the field of the bandwidth.
_BANDWIDTH_UNIT = 1e9


class _Field(NamedTuple):
    """A field for a number.

    Attributes:
        name: its id.
        label: its label, with the unit.
        value: its first value. None: empty.
        hint: what an empty field means. Empty: it must have a value.
    """

    name: str
    label: str
    value: float | None
    hint: str = ""


def script_numbers(planning: StrategyPlan, answers: Answers) -> str:
    """The element with the numbers for the script."""
    setting, outcomes = planning.setting, planning.outcomes
    unit, name = table_unit(outcomes)
    content = {
        "item": setting.item,
        "numRanks": setting.world_size,
        "failing": {each: num_failing(setting, each) for each in (GPU, NODE)},
        "mark": accuracy_of(setting.machine_family).mark,
        "limit": setting.memory,
        "unit": {"bytes": unit, "name": name, "digits": 2 if name == "GiB" else 0},
        "rateSteps": RATE_STEPS,
        "hour": HOUR,
        "durations": [{"seconds": seconds, "name": name} for seconds, name in DURATIONS.items()],
        "byteUnits": BYTE_UNITS,
        "countUnits": LARGE_UNITS,
        "bandwidthUnit": _BANDWIDTH_UNIT,
        "rows": [_row(each, answers) for each in outcomes],
    }
    # No text ends the element.
    text = json.dumps(content).replace("<", "\\u003c")
    return f'<script type="application/json" id="numbers">{text}</script>'


def _row(outcome: Outcome, answers: Answers) -> dict[str, Any]:
    times = outcome.times
    shares = {} if times is None else times.shares()
    step = None if times is None else times.step
    return {
        "label": str(outcome.candidate),
        "peak": outcome.peak_bytes,
        "largest": outcome.largest_kind,
        "rate": float(outcome.rate),
        "memory": _parts(outcome.memory, KIND_COLOURS),
        "elsewhere": _parts(outcome.elsewhere),
        "step": step,
        "times": [
            {**each, "name": time_label(each["name"]), "value": each["value"] * (step or 0.0)}
            for each in _parts(shares, TIME_COLOURS)
        ],
        "items": outcome.items,
        "mfu": None if times is None else times.mfu,
        "modelFlops": outcome.model_flops,
        "checkpointBytes": outcome.checkpoint_bytes,
        "whatIfs": list(_what_ifs(outcome, answers)),
    }


def _parts(
    values: Mapping[str, float], colours: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    colours = {} if colours is None else colours
    order = [name for name in colours if name in values]
    order += [name for name in values if name not in colours]
    return [
        {"name": name, "colour": colours.get(name, ""), "value": values[name]} for name in order
    ]


def _what_ifs(outcome: Outcome, answers: Answers) -> Iterator[dict[str, Any]]:
    """Times of a row on machines with other figures, for which it was simulated."""
    for texts in answers.tables:
        if texts.found.heading == WHAT_IF:
            for row in texts.found.rows:
                found = row.outcome_of(outcome.candidate)
                if found is not None and found.times is not None:
                    yield {
                        "name": row.label,
                        "step": found.times.step,
                        "rate": found.rate,
                        "isFastest": row.chosen is not None and not is_faster(row.chosen, found),
                    }


def selection(planning: StrategyPlan, questions: Questions) -> Iterator[str]:
    """The section of the selected row; hidden until the script fills it.

    Args:
        planning: the plan.
        questions: that were asked; their numbers are the first values of fields.
    """
    has_times = all(each.times is not None for each in planning.outcomes)
    yield '<section id="selection" aria-labelledby="selection-title" hidden>'
    yield '<h2 id="selection-title">Selected candidate</h2>'
    yield '<p class="soft">A click on a row of the table selects it.</p>'
    yield '<p id="selected-label" aria-live="polite"></p>'
    yield '<div class="panels">\n<div class="stack">'
    yield from _parts_panel("Memory at the peak", "selected-memory")
    if has_times:
        yield from _parts_panel("Time of a step", "selected-times")
        yield from _what_ifs_panel(planning.setting.item)
    yield "</div>"
    if has_times:
        yield from _training(planning, questions)
        if any(each.checkpoint_bytes for each in planning.outcomes):
            yield from _checkpoints(questions)
    yield "</div>"
    if has_times:
        yield (
            '<p class="soft">Numbers in the fields are examples unless the plan was asked with '
            "them. Training: without saves, failures and evaluation. Checkpoints: training waits "
            "during a save; the interval is Daly\u2019s, the time lost that of saves, repeated "
            "work and restarts.</p>"
        )
    yield "</section>"


def _parts_panel(title: str, name: str) -> Iterator[str]:
    yield f'<div class="panel" id="{name}-panel"><h3>{title}</h3>'
    yield f'<table class="parts" aria-label="{title}"><tbody id="{name}"></tbody></table>'
    if name == "selected-memory":
        yield '<p id="selected-elsewhere"></p>'
    yield "</div>"


def _what_ifs_panel(item: str) -> Iterator[str]:
    title = "What if, for this candidate"
    yield f'<div class="panel" id="selected-what-ifs-panel"><h3>{title}</h3>'
    heads = '<th scope="col">machine</th>'
    for each in ("step", f"{item}/s"):
        heads += f'<th scope="col" class="number">{escape(each)}</th>'
    yield f'<table class="parts" aria-label="{title}"><thead><tr>{heads}</tr></thead>'
    yield '<tbody id="selected-what-ifs"></tbody></table>'
    yield '<p class="soft">\u2714: as fast as the fastest there.</p></div>'


def _training(planning: StrategyPlan, questions: Questions) -> Iterator[str]:
    item = planning.setting.item
    tokens = questions.tokens or _EXAMPLES.get(item, 1.0)
    price = questions.prices[0] if len(questions.prices) == 1 else None
    yield _group("Training run")
    yield from _fields(
        (
            _Field("tokens", f"{item} of the run", tokens),
            _Field("price", "dollars per GPU hour", price, "none"),
        )
    )
    yield from _answers(
        {
            "run-items": item,
            "run-time": "duration",
            "run-gpu-hours": "GPU hours",
            "run-cost": "cost",
            "run-mfu": "MFU",
            "run-steps": "steps",
            "run-flops": "model flops",
        }
    )
    yield "</div>"


def _checkpoints(questions: Questions) -> Iterator[str]:
    bandwidth = questions.bandwidth
    yield _group("Checkpoints")
    yield from _fields(
        (
            _Field(
                "bandwidth",
                "GB/s to storage, all ranks together",
                _BANDWIDTH if bandwidth is None else bandwidth / _BANDWIDTH_UNIT,
            ),
            _Field("mtbf", "hours between failures", questions.mtbf_hours or _MTBF_HOURS),
        )
    )
    names = {GPU: "GPU", NODE: "node"}
    options = [
        f'<option value="{each}"{" selected" * (each == questions.mtbf_of)}>{name}</option>'
        for each, name in names.items()
    ]
    yield '<label for="mtbf-of">of one</label>'
    yield f'<select id="mtbf-of">{"".join(options)}</select>'
    yield from _fields([_Field("restart", "seconds of a restart", None, "as a save")])
    yield from _answers(
        {
            "checkpoint-size": "size",
            "checkpoint-save": "time of a save",
            "checkpoint-mtbf": "a failure every",
            "checkpoint-interval": "save every",
            "checkpoint-steps": "in steps",
            "checkpoint-young": "by Young",
            "checkpoint-overhead": "time lost",
        }
    )
    yield "</div>"


def _group(title: str) -> str:
    """The start of a panel with fields."""
    return f'<div class="panel fields" role="group" aria-label="{title}"><h3>{title}</h3>'


def _fields(fields: Sequence[_Field]) -> Iterator[str]:
    for each in fields:
        value = "" if each.value is None else f' value="{_number_text(each.value)}"'
        hint = f' data-optional placeholder="{each.hint}"' if each.hint else ""
        yield f'<label for="{each.name}">{escape(each.label)}</label>'
        yield f'<input type="number" id="{each.name}" min="0" step="any"{value}{hint}>'


def _number_text(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _answers(names: Mapping[str, str]) -> Iterable[str]:
    """A list of answers: labels by id."""
    items = [f'<dt>{escape(text)}</dt><dd id="{name}"></dd>' for name, text in names.items()]
    return ['<dl aria-live="polite">', *items, "</dl>"]
