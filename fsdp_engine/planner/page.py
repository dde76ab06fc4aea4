"""The page of a plan: one HTML file without network access.

The table, the recommendation, and the timeline and memory of one step are HTML and SVG that need no
script. A script (``page_files/page.js``) sorts the table and zooms the timeline. All texts are
escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from rich.text import Text

from fsdp_engine import terminal
from fsdp_engine.kernel_interface import lanes
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.outcome import Outcome, part_waiting_for
from fsdp_engine.planner.plan_view import KIND_COLOURS, TIME_COLOURS, table_unit, time_label
from fsdp_engine.planner.planner_tables import (
    DETAILS,
    plan_caption,
    plan_columns,
    plan_title,
)
from fsdp_engine.planner.simulation.clock import Span
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.module_names import parents_of
from fsdp_engine.planner.simulation.simulate import Simulation
from fsdp_engine.planner.strategy_plan import StrategyPlan, advice

# Heights in pixels of a row of the timeline, of the gap after it and of the memory chart, and the
# largest number of points in the chart.
_ROW, _GAP, _MEMORY_HEIGHT, _POINTS = 20, 4, 180, 600
# Largest number of intervals in a row, and the width of charts in SVG units.
_MAX_SPANS, _ACROSS = 1500, 1000.0
_WAITS = "compute waits for"
_FILES = Path(__file__).with_name("page_files")


def save_page(planning: StrategyPlan, path: str | Path, step: Simulation | None = None) -> None:
    """Write the plan as a page.

    Args:
        planning: The plan.
        path: The path of the HTML file.
        step: The simulation of the first outcome. None: the page has no timeline.
    """
    Path(path).write_text(page_of(planning, step), encoding="utf-8")


def page_of(planning: StrategyPlan, step: Simulation | None = None) -> str:
    """Returns the text of the page; see :func:`save_page`."""
    setting = planning.setting
    title = plan_title(setting)
    heading = f"Plan of {setting.model} on {setting.world_size:,} ranks"
    lines = advice(setting, planning.outcomes, planning.trials).splitlines()
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<title>{escape(heading)}</title>",
        f"<style>{_text_of('style.css')}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(heading)}</h1>",
        f'<p class="soft">{escape(title)}</p>',
        '<section class="advice">',
        "<h2>Recommendation</h2>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        "</section>",
        *_candidates(planning),
        *([] if step is None else _step(planning, step)),
        f"<script>{_text_of('page.js')}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _candidates(planning: StrategyPlan) -> Iterator[str]:
    """Yield the table of candidates, with bars of their memory."""
    setting, outcomes = planning.setting, planning.outcomes
    columns = _ordered(plan_columns(setting, outcomes))
    longest = max(each.peak_bytes for each in outcomes)
    yield "<section>\n<h2>Candidates</h2>"
    yield _legend(KIND_COLOURS)
    yield '<div class="scroll rows">\n<table id="plan" aria-describedby="units">'
    heads = [_head(each.name, is_number=each.is_number) for each in columns]
    heads.insert(_num_texts(columns), '<th scope="col" data-fixed>memory by kind</th>')
    yield f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"
    for number, each in enumerate(outcomes):
        cells = [(column.name, column.is_number, column.cells[number]) for column in columns]
        yield _row(planning, each, number, cells, longest)
    yield "</tbody>\n</table>\n</div>"
    yield f'<p class="soft" id="units">{escape(plan_caption(setting, outcomes))}</p>\n</section>'


def _text_of(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _ordered(columns: Sequence[terminal.Column]) -> list[terminal.Column]:
    """Returns text columns, then number columns. Number columns that narrow terminals omit are
    last."""
    texts = [each for each in columns if not each.is_number]
    numbers = [each for each in columns if each.is_number]
    return [*texts, *sorted(numbers, key=lambda each: each.drop in DETAILS)]


def _num_texts(columns: Sequence[terminal.Column]) -> int:
    return sum(not each.is_number for each in columns)


def _head(name: str, *, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    return f'<th scope="col"{kind}>{escape(name)}</th>'


def _row(
    planning: StrategyPlan,
    outcome: Outcome,
    number: int,
    cells: Sequence[tuple[str, bool, str]],
    longest: int,
) -> str:
    kinds = ["chosen"] * (outcome is planning.chosen) + ["lacking"] * bool(outcome.lacking)
    marks = {"class": " ".join(kinds), "data-order": str(number)}
    texts = [_cell(*each, is_first=not index) for index, each in enumerate(cells)]
    num_texts = sum(not is_number for _, is_number, _ in cells)
    texts.insert(num_texts, f"<td>{_bar(outcome, longest)}</td>")
    named = " ".join(f'{name}="{escape(value)}"' for name, value in marks.items() if value)
    return f"<tr {named}>{''.join(texts)}</tr>"


def _cell(name: str, is_number: bool, markup: str, *, is_first: bool) -> str:
    text = Text.from_markup(markup).plain
    value = str(_sort_value(text)) if is_number else text
    kinds = ["number"] * is_number + ["free"] * (name == "free")
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    tag, scope = ("th", ' scope="row"') if is_first else ("td", "")
    return f'<{tag}{scope}{kind} data-value="{escape(value)}">{escape(text)}</{tag}>'


def _sort_value(text: str) -> float:
    """Returns the number at the start of a cell; -1 if the number is unknown."""
    found = re.match(r"(-?[\d,]*\.?\d+)([kMB]?)", text)
    if found is None:
        return -1.0
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}[found[2]]
    return float(found[1].replace(",", "")) * scale


def _bar(outcome: Outcome, longest: int) -> str:
    parts = []
    for kind, colour in KIND_COLOURS.items():
        if size := outcome.memory.get(kind, 0):
            width = f"width:{100 * size / longest:.3g}%;background:{colour}"
            parts.append(f'<i style="{width}" title="{kind}: {_gib(size)}"></i>')
    return f'<div class="bar">{"".join(parts)}</div>'


def _gib(count: float) -> str:
    return f"{count / 2**30:,.3f} GiB"


def _legend(colours: Mapping[str, str]) -> str:
    items = [
        f'<li><i style="background:{colour}"></i>{escape(name)}</li>'
        for name, colour in colours.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _step(planning: StrategyPlan, step: Simulation) -> Iterator[str]:
    """Yield the timeline and the memory of a step, on one time axis."""
    what = "chosen candidate"
    if planning.chosen is None:
        what = "candidate that exceeds the memory limit the least"
    rows = _timeline_rows(step, planning.outcomes[0].candidate)
    unit, name = table_unit(planning.outcomes)
    used = {colour for spans in rows.values() for _, _, colour, _ in spans}
    times = {time_label(n): colour for n, colour in TIME_COLOURS.items() if colour in used}
    height = len(rows) * (_ROW + _GAP)
    yield f"<section>\n<h2>One step of the {what}</h2>"
    text = f"{planning.outcomes[0].candidate}: {1e3 * step.seconds:,.1f} ms"
    yield f'<p class="soft">{escape(text)}</p>'
    yield _legend({**times, "busy lanes": "var(--busy)"})
    yield (
        '<div class="zoom" id="zooming" hidden><label for="zoom">Zoom</label>'
        '<input type="range" id="zoom" min="1" max="40" step="0.5" value="1"></div>'
    )
    yield '<figure class="chart" id="step">\n<div class="names">'
    for text in rows:
        yield f'<div style="height:{_ROW + _GAP}px;line-height:{_ROW}px">{escape(text)}</div>'
    top = _top_of_memory(planning, step)
    scale = [
        f'<span style="top:{_MEMORY_HEIGHT * (1 - tick * unit / top):.1f}px">{tick:g}</span>'
        for tick in _ticks(top / unit)[1:]
    ]
    yield (
        f'<div class="scale" style="height:{_MEMORY_HEIGHT}px;padding-right:2.5rem">memory '
        f"({name}){''.join(scale)}</div>"
    )
    yield '</div>\n<div class="scroll"><div class="plot">'
    yield (
        f'<svg viewBox="0 0 {_ACROSS:g} {height}" height="{height}" preserveAspectRatio="none" '
        'role="img" aria-label="timeline of the step">'
    )
    for number, spans in enumerate(rows.values()):
        for start, end, colour, text in spans:
            yield _rectangle(step, number, start, end, colour, text)
    yield "</svg>"
    yield from _memory_chart(planning, step, unit, name)
    yield '<div class="ticks">'
    for tick in _ticks(1e3 * step.seconds):
        share = 100 * tick / (1e3 * step.seconds)
        mark = ' class="end"' if share > 96 else ""
        yield f'<span{mark} style="left:{share:.4g}%">{tick:g} ms</span>'
    yield "</div>\n</div></div>\n</figure>"
    yield _legend(KIND_COLOURS)
    yield "</section>"


_Interval = tuple[float, float, str, str]  # start, end, colour ("" if busy), text


def _timeline_rows(step: Simulation, candidate: Candidate) -> dict[str, list[_Interval]]:
    """Returns the intervals of each row of the timeline."""
    compute = [
        replace(each, label=_unit_of(each)) for each in step.spans if each.lane == lanes.COMPUTE
    ]
    rows = {
        lanes.COMPUTE: [
            (each.start, each.end, TIME_COLOURS["compute"], _text(each))
            for each in _merged(compute, step.seconds)
        ]
    }
    rows[_WAITS] = [
        (
            each.start,
            each.start + each.seconds,
            TIME_COLOURS[part_waiting_for(each.lane, candidate)],
            f"{lanes.name_of_wait(each.lane, each.unit)}, {each.phase}: "
            f"{1e3 * each.seconds:,.3f} ms",
        )
        for each in step.exposed
    ]
    for lane in step.message_seconds:
        spans = [each for each in step.spans if each.lane == lane]
        rows[lane] = [(s.start, s.end, "", _text(s)) for s in _merged(spans, step.seconds)]
    return rows


def _unit_of(span: Span) -> str:
    """Returns the outermost numbered module (a block) around a span, or else the outermost
    module."""
    names = parents_of(span.module)
    numbered = [each for each in names if re.search(r"\.\d+$", each)]
    return (numbered or names or ["the engine, loss and optimizer"])[0]


def _text(span: Span) -> str:
    return f"{span.label}, {span.phase}: {1e3 * (span.end - span.start):,.3f} ms"


def _merged(spans: Iterable[Span], seconds: float) -> list[Span]:
    """Merge successive intervals of one label and phase across short gaps. While too many intervals
    remain, also merge across longer gaps."""
    gap, found = seconds / 1e4, list(spans)
    while True:
        merged: list[Span] = []
        for each in found:
            last = merged[-1] if merged else None
            is_same = last is not None and (last.label, last.phase) == (each.label, each.phase)
            if last is not None and is_same and each.start - last.end <= gap:
                merged[-1] = replace(last, end=each.end)
            else:
                merged.append(each)
        if len(merged) <= _MAX_SPANS or gap > seconds:
            return merged
        found, gap = merged, 4 * gap


def _rectangle(step: Simulation, row: int, start: float, end: float, colour: str, text: str) -> str:
    left = _ACROSS * start / step.seconds
    width = max(_ACROSS * (end - start) / step.seconds, 0.05)
    paint = f'fill="{colour}"' if colour else 'class="busy"'
    return (
        f'<rect x="{left:.2f}" y="{row * (_ROW + _GAP)}" width="{width:.2f}" height="{_ROW}" '
        f"{paint}><title>{escape(text)}</title></rect>"
    )


def _memory_chart(planning: StrategyPlan, step: Simulation, unit: int, name: str) -> Iterator[str]:
    """Yield a stacked chart of memory by kind over time."""
    points = _thinned(step.memory_series, step.seconds)
    limit, top = planning.setting.memory, _top_of_memory(planning, step)

    def height(size: float) -> float:
        return _MEMORY_HEIGHT * (1 - size / top)

    yield (
        f'<svg viewBox="0 0 {_ACROSS:g} {_MEMORY_HEIGHT}" height="{_MEMORY_HEIGHT}" '
        'preserveAspectRatio="none" role="img" aria-label="memory by kind over time">'
    )
    below = [0] * len(points)
    for number, kind in enumerate(KINDS):
        above = [low + sizes[number] for low, (_, sizes) in zip(below, points, strict=True)]
        times = [_ACROSS * time / step.seconds for time, _ in points]
        upper = _staircase(times, [height(each) for each in above])
        lower = _staircase(times, [height(each) for each in below])
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
        yield (
            f'<polygon points="{corners}" fill="{KIND_COLOURS[kind]}"><title>{kind}: at the peak '
            f"{_gib(step.memory[kind])}</title></polygon>"
        )
        below = above
    for tick in _ticks(top / unit)[1:]:
        y = height(tick * unit)
        yield f'<line class="rule" x1="0" x2="{_ACROSS:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
    if limit <= top:
        y = height(limit)
        yield (
            f'<line class="limit" x1="0" x2="{_ACROSS:g}" y1="{y:.1f}" y2="{y:.1f}"><title>limit '
            f"{limit / unit:,.2f} {name}</title></line>"
        )
    yield "</svg>"


def _top_of_memory(planning: StrategyPlan, step: Simulation) -> float:
    """Returns the bytes at the upper edge of the memory chart. The chart includes the limit unless
    the limit is more than twice the peak."""
    limit, peak = planning.setting.memory, step.peak_bytes
    return 1.1 * max(peak, limit if limit <= 2 * peak else 1)


_Point = tuple[float, tuple[int, ...]]


def _thinned(series: Sequence[_Point], seconds: float) -> list[_Point]:
    """Returns the point with the most bytes in each of ``_POINTS`` intervals of time, and the first
    and last points."""
    largest: dict[int, _Point] = {}
    for point in series:
        number = int(_POINTS * point[0] / seconds)
        if number not in largest or sum(point[1]) > sum(largest[number][1]):
            largest[number] = point
    return [(0.0, series[0][1]), *(largest[number] for number in sorted(largest)), series[-1]]


def _staircase(times: Sequence[float], heights: Sequence[float]) -> list[tuple[float, float]]:
    """Returns the corners of a line that is constant from each time to the next."""
    corners = []
    for number, (time, height) in enumerate(zip(times, heights, strict=True)):
        if number:
            corners.append((time, heights[number - 1]))
        corners.append((time, height))
    return corners


def _ticks(most: float) -> list[float]:
    """Returns five to ten round numbers from 0 to ``most``."""
    scale = 10 ** math.floor(math.log10(most))
    step = next(each for each in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (each * scale) <= 10) * scale
    return [number * step for number in range(int(most / step) + 1)]
