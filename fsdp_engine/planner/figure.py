"""Figure of a plan: memory by kind with the limit, and the breakdown of the step time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.simulation.memory_tracker import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette for colour-blind readers.
_KIND_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00")
_TIME_COLOURS = {
    "compute": "#0072B2",
    "inner link": "#CC79A7",
    "outer link": "#D55E00",
    "state copies": "#009E73",
    "activation copies": "#E69F00",
    "host": "#999999",
}
_ROW_INCHES, _FADED = 0.28, 0.35
_GIB = 2**30


def save_figure(planning: StrategyPlan, path: str | Path) -> None:
    """Save the figure in the format of the suffix of ``path``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with naming_extra():
        from matplotlib.figure import Figure

    outcomes = planning.outcomes[::-1]  # the y axis is upwards
    has_times = all(each.times is not None for each in outcomes)
    height = 1.8 + _ROW_INCHES * len(outcomes)
    figure = Figure(figsize=(13 if has_times else 9, height), layout="constrained")
    setting = planning.setting
    title = f"{setting.model} on {setting.world_size:,} ranks of {setting.machine}"
    figure.suptitle(title, fontsize=11)
    axes: Any = figure.subplots(1, 2 if has_times else 1, sharey=True, squeeze=False)
    _draw_memory(axes[0][0], planning, outcomes)
    if has_times:
        _draw_times(axes[0][1], outcomes)
    figure.savefig(str(path), dpi=150)


def _draw_memory(axes: Axes, planning: StrategyPlan, outcomes: Sequence[Outcome]) -> None:
    limit = planning.setting.memory / _GIB
    ends = [0.0] * len(outcomes)
    for kind, colour in zip(KINDS, _KIND_COLOURS, strict=True):
        sizes = [each.memory.get(kind, 0) / _GIB for each in outcomes]
        _draw_part(axes, outcomes, ends, sizes, colour, kind)
    if 2 * max(ends) < limit:  # the limit is outside the axes, to leave room for the bars
        label = f"limit {limit:,.0f} GiB \u2192"
        axes.set_xlim(0, 1.2 * max(ends))
        axes.text(1.19 * max(ends), len(outcomes) - 0.3, label, fontsize=8, ha="right")
    else:
        # Truncates bars far beyond the limit, so that the others are readable.
        axes.set_xlim(0, min(1.15 * max(*ends, limit), 2.5 * limit))
        axes.axvline(limit, color="black", linestyle="--", linewidth=1)
        axes.text(limit, len(outcomes) - 0.3, f"limit {limit:,.0f} GiB ", fontsize=8, ha="right")
    axes.set_yticks(range(len(outcomes)), [_label(each) for each in outcomes], fontsize=8)
    axes.set_ylim(-0.6, len(outcomes) + 0.4)
    axes.set_xlabel("peak memory of one rank (GiB)")
    _add_legend(axes)


def _draw_times(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    ends = [0.0] * len(outcomes)
    for name, colour in _TIME_COLOURS.items():
        spent = []
        for each in outcomes:
            assert each.times is not None
            spent.append(1e3 * each.times.shares().get(name, 0.0) * each.times.step)
        if name == "compute" or any(spent):
            label = name if name in ("compute", "host") else f"waits for the {name}"
            _draw_part(axes, outcomes, ends, spent, colour, label)
    axes.set_xlabel("step time (ms)")
    _add_legend(axes)


def _draw_part(
    axes: Axes,
    outcomes: Sequence[Outcome],
    ends: list[float],
    sizes: Sequence[float],
    colour: str,
    label: str,
) -> None:
    """Draw one segment of every bar and update ``ends``; candidates that do not fit are faded."""
    bars = axes.barh(range(len(outcomes)), sizes, left=ends, color=colour, label=label)
    for bar, outcome in zip(bars, outcomes, strict=True):
        bar.set_alpha(_FADED if outcome.lacking else 1.0)
    ends[:] = [end + size for end, size in zip(ends, sizes, strict=True)]


def _add_legend(axes: Axes) -> None:
    legend = axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, frameon=False
    )
    for handle in legend.legend_handles:
        if handle is not None:
            handle.set_alpha(1.0)


def _label(outcome: Outcome) -> str:
    candidate = outcome.candidate
    size = "" if candidate.microbatch_size is None else f", of {candidate.microbatch_size}"
    kind = "" if candidate.recomputed == "blocks" else f" {candidate.recomputed}"
    recompute = f", recompute{kind}" if candidate.recomputes else ""
    offloaded = ", offload" if candidate.offloaded else ""
    return f"{candidate.levels}, {candidate.ranks}{size}{recompute}{offloaded}"
