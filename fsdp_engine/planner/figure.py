"""Figure of a plan: memory by kind with the limit, and the breakdown of the step time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_engine import terminal
from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.plan_view import (
    CHOSEN_COLOUR,
    KIND_COLOURS,
    TIME_COLOURS,
    in_units,
    row_label,
    table_unit,
    time_label,
)
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of
from fsdp_engine.planner.strategy_plan import StrategyPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES, _FADED = 0.28, 0.35
# Space for values at the ends of bars, as a fraction of the longest bar.
_ROOM = 0.3


def save_figure(planning: StrategyPlan, path: str | Path) -> None:
    """Save the figure of a plan. The suffix of ``path`` selects the format.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    with naming_extra():
        from matplotlib.figure import Figure

    outcomes = planning.outcomes[::-1]  # the y axis points upwards
    has_times = all(each.times is not None for each in outcomes)
    height = 2.2 + _ROW_INCHES * len(outcomes)
    figure = Figure(figsize=(14 if has_times else 9, height), layout="constrained")
    setting = planning.setting
    title = f"{setting.model} on {setting.world_size:,} ranks of {setting.machine}"
    if planning.chosen is not None:
        title += f"\nchosen: {planning.chosen.candidate}"
    figure.suptitle(title, fontsize=11)
    axes: Any = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)
    for each in axes[0]:
        _mark_chosen(each, planning, outcomes)
    _draw_memory(axes[0][0], planning, outcomes)
    if has_times:
        _draw_times(axes[0][1], planning, outcomes)
    figure.savefig(str(path), dpi=150)


def _mark_chosen(axes: Axes, planning: StrategyPlan, outcomes: Sequence[Outcome]) -> None:
    if planning.chosen is not None:
        row = len(outcomes) - 1 - planning.outcomes.index(planning.chosen)
        axes.axhspan(row - 0.5, row + 0.5, color=CHOSEN_COLOUR, zorder=0)


def _draw_memory(axes: Axes, planning: StrategyPlan, outcomes: Sequence[Outcome]) -> None:
    unit, name = table_unit(planning.outcomes)
    limit = planning.setting.memory / unit
    ends = [0.0] * len(outcomes)
    for kind, colour in KIND_COLOURS.items():
        sizes = [each.memory.get(kind, 0) / unit for each in outcomes]
        _draw_part(axes, outcomes, ends, sizes, colour, kind)
    text = f"limit {limit:,.1f} {name}"
    if 2 * max(ends) < limit:  # an arrow points to the limit, so that the bars have enough room
        axes.set_xlim(0, (1 + _ROOM) * max(ends))
        axes.text(
            1,
            len(outcomes) - 0.3,
            f"{text} \u2192",
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            ha="right",
        )
    else:
        # Bars far beyond the limit are truncated, so that the others stay readable.
        axes.set_xlim(0, min((1 + _ROOM) * max(*ends, limit), 2.5 * limit))
        axes.axvline(limit, color="black", linestyle="--", linewidth=1)
        axes.text(limit, len(outcomes) - 0.3, f"{text} ", fontsize=8, ha="right")
    values = [in_units(each.peak_bytes, unit) for each in outcomes]
    _write_values(axes, outcomes, ends, values)
    chosen = planning.chosen
    labels = [
        f"\u25b6 {row_label(each)}" if each is chosen else row_label(each) for each in outcomes
    ]
    axes.set_yticks(range(len(outcomes)), labels, fontsize=8)
    for label, each in zip(axes.get_yticklabels(), outcomes, strict=True):
        label.set_fontweight("bold" if each is chosen else "normal")
    axes.set_ylim(-0.6, len(outcomes) + 0.4)
    faded = "; faded: does not fit" if any(each.lacking for each in outcomes) else ""
    axes.set_xlabel(f"peak memory of one rank ({name}){faded}")
    _add_legend(axes)


def _draw_times(axes: Axes, planning: StrategyPlan, outcomes: Sequence[Outcome]) -> None:
    ends = [0.0] * len(outcomes)
    for name, colour in TIME_COLOURS.items():
        spent = []
        for each in outcomes:
            assert each.times is not None
            spent.append(1e3 * each.times.parts().get(name, 0.0))
        if name == "compute" or any(spent):
            _draw_part(axes, outcomes, ends, spent, colour, time_label(name))
    item = planning.setting.item
    values = [
        f"{end:,.1f}, {terminal.format_count(each.rate)} {item}/s"
        for end, each in zip(ends, outcomes, strict=True)
    ]
    axes.set_xlim(0, (1 + 1.4 * _ROOM) * max(ends))
    _write_values(axes, outcomes, ends, values)
    mark = accuracy_of(planning.setting.machine_family).mark
    axes.set_xlabel(f"step time (ms) {mark}, and {item}/s of all ranks")
    _add_legend(axes)


def _draw_part(
    axes: Axes,
    outcomes: Sequence[Outcome],
    ends: list[float],
    sizes: Sequence[float],
    colour: str,
    label: str,
) -> None:
    """Draw one segment of every bar, and update ``ends``. Candidates that do not fit are faded."""
    bars = axes.barh(range(len(outcomes)), sizes, left=ends, color=colour, label=label)
    for bar, outcome in zip(bars, outcomes, strict=True):
        bar.set_alpha(_FADED if outcome.lacking else 1.0)
    ends[:] = [end + size for end, size in zip(ends, sizes, strict=True)]


def _write_values(
    axes: Axes, outcomes: Sequence[Outcome], ends: Sequence[float], values: Sequence[str]
) -> None:
    """Write each bar's value at its end, or inside the bar if the bar reaches the edge."""
    _, edge = axes.get_xlim()
    for row, (end, value, outcome) in enumerate(zip(ends, values, outcomes, strict=True)):
        is_within = end > 0.9 * edge
        axes.text(
            min(end, edge),
            row,
            f"{value} \u2192" if end > edge else f"{value} " if is_within else f" {value}",
            fontsize=7,
            va="center",
            ha="right" if is_within else "left",
            color="#555555" if outcome.lacking else "black",
            # A background keeps the text readable where the line of the limit crosses it.
            bbox={"facecolor": "white", "alpha": 0.75, "pad": 0.5, "edgecolor": "none"},
        )


def _add_legend(axes: Axes) -> None:
    legend = axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)
