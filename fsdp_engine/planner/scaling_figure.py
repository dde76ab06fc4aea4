"""Figure of a job on various numbers of ranks: step time, and rate of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_engine import terminal
from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.comparison import ComparedRow, Comparison
from fsdp_engine.planner.plan_view import TIME_COLOURS, row_label, time_label
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def save_scaling_figure(found: Comparison, path: str | Path) -> None:
    """Save the figure of ``StrategyPlan.scaling``. The suffix of ``path`` selects the format.

    Numbers of ranks for which no candidate fits have no bar and no point.

    Raises:
        ImportError: Matplotlib is not installed.
        ValueError: No candidate fits on any number of ranks.
    """
    with naming_extra():
        from matplotlib.figure import Figure

    base = found.base
    if base is None:
        raise ValueError("plan: expected a candidate that fits on some number of ranks; found none")
    figure = Figure(figsize=(max(9, 3 + 0.8 * len(found.rows)), 7), layout="constrained")
    setting = base.setting
    batch = "the same global batch" if setting.global_batch else "the same batch of a rank"
    figure.suptitle(f"{setting.model} on {setting.machine}: {batch}", fontsize=11)
    times, rates = figure.subplots(2, 1, sharex=True)
    _draw_times(times, found.rows)
    mark = accuracy_of(setting.machine_family).mark
    times.set_ylabel(f"step time (ms) {mark}")
    _draw_rates(rates, found)
    rates.set_ylabel(f"{setting.item}/s per rank, relative to {base.label} ranks")
    rates.set_xlabel("ranks")
    rates.set_xticks(range(len(found.rows)), [row.label for row in found.rows])
    figure.savefig(str(path), dpi=150)


def _draw_times(axes: Axes, rows: Sequence[ComparedRow]) -> None:
    """Draw a bar for each row, with the parts of the step time and the name of the strategy."""
    ends = [0.0] * len(rows)
    times = [None if each.chosen is None else each.chosen.times for each in rows]
    parts = [{} if each is None else each.parts() for each in times]
    for name, colour in TIME_COLOURS.items():
        spent = [1e3 * each.get(name, 0.0) for each in parts]
        if any(spent):
            axes.bar(range(len(rows)), spent, bottom=ends, color=colour, label=time_label(name))
            ends = [end + time for end, time in zip(ends, spent, strict=True)]
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        within = "nothing fits" if row.chosen is None else row_label(row.chosen)
        axes.text(place, 0, f"  {within}", fontsize=7, rotation=90, ha="center", va="bottom")
        if row.chosen is not None:
            axes.text(place, end, f"{end:,.0f}", fontsize=8, ha="center", va="bottom")
    axes.set_ylim(0, 1.1 * max(ends))
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False)


def _draw_rates(axes: Axes, found: Comparison) -> None:
    """Draw a point for each row that fits: its efficiency, labelled with the rate of all ranks."""
    points = [
        (place, efficiency, row.chosen.rate)
        for place, row in enumerate(found.rows)
        if (efficiency := found.efficiency(row)) is not None and row.chosen is not None
    ]
    places, efficiencies, rates = zip(*points, strict=True)
    axes.plot(places, efficiencies, color="black", marker="o", linewidth=1)
    item = found.rows[0].setting.item
    for place, efficiency, rate in zip(places, efficiencies, rates, strict=True):
        text = f"{efficiency:.2f}\n{terminal.format_count(rate)} {item}/s"
        axes.annotate(
            text, (place, efficiency), (0, 6), textcoords="offset points", fontsize=7, ha="center"
        )
    axes.set_ylim(0, 1.3 * max(efficiencies))
