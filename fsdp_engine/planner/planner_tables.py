"""Tables of plans and of estimates."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.estimates import NOT_INCLUDED, Estimate
from fsdp_engine.planner.outcome import Outcome, Setting
from fsdp_engine.simulation.memory_tracker import KINDS
from fsdp_engine.terminal import format_bytes, format_count

with naming_extra():
    from rich.table import Table


_UNKNOWN = "?"
_MIB, _GIB = 2**20, 2**30


def plan_table(setting: Setting, outcomes: Sequence[Outcome]) -> Table:
    """A row for each outcome; those that do not fit are dim."""
    has_outer = any(len(each.candidate.mesh) == 2 for each in outcomes)
    is_offloaded = any(each.candidate.offloaded for each in outcomes)
    has_lengths = len({each.candidate.sequence for each in outcomes}) > 1
    has_sizes = len({each.candidate.microbatch_size for each in outcomes}) > 1
    has_sizes |= bool(setting.global_batch)
    unit = _GIB if max(each.peak_bytes for each in outcomes) >= 4 * _GIB else _MIB
    name = "GiB" if unit == _GIB else "MiB"
    table = Table(
        title=(
            f"{setting.model}, {format_count(setting.num_elements)} parameters, on "
            f"{setting.world_size:,} ranks of {setting.machine}; {_step_text(setting)}"
        ),
        caption=(
            f"{name} of one rank: memory by kind at the peak; free of "
            f"{format_bytes(setting.memory)}, or the excess and the largest kind; bytes sent per "
            f"step. ms: step time, and exposed communication{' and copies' * is_offloaded}. Ranks: "
            "outer x inner. Recompute: "
            "activation checkpointing."
            + " Batch: microbatches x rows of one." * bool(setting.global_batch)
            + " Elsewhere: offloaded state and activations of one rank, which each step copies."
            * is_offloaded
        ),
        title_justify="left",
        caption_justify="left",
    )
    texts = ("strategy", *("outer", "ranks") * has_outer, "recompute")
    for column in (*texts, *("offloaded",) * is_offloaded):
        table.add_column(column, no_wrap=True)
    size = "batch" if setting.global_batch else "size"
    numbers = [*("sequence",) * has_lengths, *(size,) * has_sizes, *KINDS, "at most", "free"]
    numbers += ["elsewhere"] * is_offloaded
    numbers += ["step", "exposed", f"{setting.item}/s"]
    numbers += ["sent inner", "sent outer"] if has_outer else ["sent"]
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for each in outcomes:
        candidate = each.candidate
        cells = [candidate.strategy]
        if has_outer:
            cells += [candidate.outer_strategy if len(candidate.mesh) == 2 else "", candidate.ranks]
        cells.append("blocks" if candidate.recomputes else "no")
        if is_offloaded:
            cells.append(candidate.offloaded or "no")
        if has_lengths:
            cells.append(f"{candidate.sequence:,}")
        if has_sizes:
            count = f"{candidate.microbatches} x " if setting.global_batch else ""
            cells.append(f"{count}{candidate.microbatch_size}")
        counts = [*(each.memory.get(kind) for kind in KINDS), each.peak_bytes]
        cells += [_in_units(count, unit) for count in counts]
        free = _in_units(setting.memory - each.peak_bytes, unit)
        if each.fits is None:
            cells.append(_UNKNOWN)
        else:
            cells.append(free if each.fits else f"[red]{free}, {each.largest_kind}[/red]")
        if is_offloaded:
            cells.append(_in_units(sum(each.elsewhere.values()), unit))
        if each.times is None:
            cells += [_UNKNOWN] * 3
        else:
            cells += [f"{each.times.step * 1e3:,.1f}", f"{each.times.exposed_sum * 1e3:,.1f}"]
            cells.append(format_count(each.rate))
        axes = ("inner", "outer") if has_outer else ("inner",)
        cells += [_in_units(each.sent.get(axis, 0), unit) for axis in axes]
        table.add_row(*cells, style="dim" if each.lacking else "")
    return table


def _step_text(setting: Setting) -> str:
    if setting.global_batch:
        return f"{setting.global_batch:,} {setting.item} per step"
    return f"{setting.microbatches} microbatch{'es' * (setting.microbatches > 1)} per step"


def _in_units(count: float | None, unit: int) -> str:
    if count is None:
        return _UNKNOWN
    return f"{count / unit:,.2f}" if unit == _GIB else f"{count / unit:,.0f}"


def estimates_table(estimates: Sequence[Estimate], memory_gib: float | None = None) -> Table:
    """A row for each estimate.

    Args:
        estimates: of one model on one number of ranks.
        memory_gib: memory of a rank; adds a column with the rest.
    """
    first = estimates[0]
    padding = max(each.padding for each in estimates)
    table = Table(
        title=(
            f"{first.num_elements:,} elements (and at most {padding:,} of padding) on "
            f"{first.outer_size} x {first.inner_size} ranks (outer x inner); bytes of one rank"
        ),
        caption=f"+: temporary, at most. Sent: per step, at most. {NOT_INCLUDED}",
        title_justify="left",
        caption_justify="left",
    )
    has_outer = first.outer_size > 1
    table.add_column("strategy", no_wrap=True)
    if has_outer:
        table.add_column("outer", no_wrap=True)
    columns = ["weights", "gradients", "optimizer", "at rest", "+ full", "+ staging", "at most"]
    columns += ["sent inner", "sent outer"] if has_outer else ["sent"]
    places = list(dict.fromkeys(place for each in estimates for place in each.elsewhere))
    columns += [f"on the {place}" for place in places]
    if memory_gib is not None:
        columns.append("left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for each in estimates:
        cells = [each.strategy.inner.name]
        if has_outer:
            cells.append(each.strategy.outer.name)
        counts = [each.weight_bytes, each.grad_bytes, each.optimizer_bytes, each.rest_bytes]
        counts += [each.full_bytes, each.staging_bytes, each.peak_bytes, each.inner_traffic_bytes]
        if has_outer:
            counts.append(each.outer_traffic_bytes)
        counts += [each.elsewhere.get(place, 0) for place in places]
        cells += [format_bytes(count) for count in counts]
        if memory_gib is not None:
            left = memory_gib * 2**30 - each.peak_bytes
            cells.append(format_bytes(left) if left > 0 else f"[red]-{format_bytes(-left)}[/red]")
        table.add_row(*cells)
    return table
