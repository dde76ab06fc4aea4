"""Colours, labels and units that the figure and the page of a plan share. Each colour has one
meaning."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.planner.outcome import Outcome
from fsdp_engine.planner.simulation.memory_tracker import KINDS

# Kinds of memory have the colours of Okabe and Ito's palette, for colour-blind readers. Parts of
# the step time have other colours.
KIND_COLOURS = dict(
    zip(KINDS, ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00"), strict=True)
)
TIME_COLOURS = {
    "compute": "#7A68C4",
    "inner link": "#CC79A7",
    "outer link": "#D55E00",
    "context link": "#2F4B7C",
    "tensor link": "#5D3A1A",
    "state copies": "#8F8B2E",
    "activation copies": "#A3445A",
    "other stages": "#1E5631",
    "host": "#999999",
}
CHOSEN_COLOUR = "#E8F1E4"
_MIB, _GIB = 2**20, 2**30


def time_label(name: str) -> str:
    """Returns the label of a part of the step time."""
    return name if name in ("compute", "host") else f"waits for the {name}"


def row_label(outcome: Outcome) -> str:
    """Returns a short text that describes a candidate."""
    candidate = outcome.candidate
    size = "" if candidate.microbatch_size is None else f", of {candidate.microbatch_size}"
    kind = "" if candidate.recomputed == "blocks" else f" {candidate.recomputed}"
    recompute = f", recompute{kind}" if candidate.recomputes else ""
    offloaded = ", offload" if candidate.offloaded else ""
    return f"{candidate.levels}, {candidate.ranks}{size}{recompute}{offloaded}"


def table_unit(outcomes: Sequence[Outcome]) -> tuple[int, str]:
    """Returns the unit in bytes for tables and figures of these outcomes, and the unit's name."""
    is_large = max(each.peak_bytes for each in outcomes) >= 4 * _GIB
    return (_GIB, "GiB") if is_large else (_MIB, "MiB")


def in_units(count: float | None, unit: int) -> str:
    """Returns a number of bytes in ``unit`` as text, without the unit's name; "?" if unknown."""
    if count is None:
        return "?"
    return f"{count / unit:,.2f}" if unit == _GIB else f"{count / unit:,.0f}"
