"""Tables of plannings and of estimates."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fsdp_engine.planner.estimates import NOT_INCLUDED, Estimate
from fsdp_engine.planner.outcome import KINDS, Outcome, Setting
from fsdp_engine.terminal import format_bytes, format_count, format_seconds

_UNKNOWN = "unknown"


def planning_table(setting: Setting, outcomes: Sequence[Outcome]) -> Table:
    """A row for each outcome."""
    table = Table(
        title=(
            f"{setting.model}, {format_count(setting.num_elements)} parameters, on "
            f"{setting.world_size:,} ranks of {setting.machine}; {setting.microbatches} "
            f"microbatch{'es' * (setting.microbatches > 1)} a step"
        ),
        caption=(
            f"Of one rank, at the moment when most is held; free: of {format_bytes(setting.memory)}"
            ". Exposed: what compute waits for messages. Ranks: outer x inner."
        ),
        title_justify="left",
        caption_justify="left",
    )
    has_outer = any(len(each.candidate.mesh) == 2 for each in outcomes)
    has_sizes = len({each.candidate.microbatch_size for each in outcomes}) > 1
    names = ["strategy"] + ["outer", "ranks"] * has_outer
    for name in names:
        table.add_column(name, no_wrap=True)
    numbers = ["recompute"] + ["microbatch"] * has_sizes
    numbers += [*KINDS, "at most", "free", "step", f"{setting.item}/s", "exposed"]
    numbers += ["sent inner", "sent outer"] if has_outer else ["sent"]
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for each in outcomes:
        candidate = each.candidate
        cells = [candidate.strategy]
        if has_outer:
            two = len(candidate.mesh) == 2
            cells += [candidate.outer_strategy if two else "", candidate.ranks]
        cells.append("units" if candidate.checkpointing else "no")
        if has_sizes:
            cells.append(str(candidate.microbatch_size))
        cells += [_bytes(each.memory.get(kind)) for kind in KINDS]
        cells += [format_bytes(each.peak_bytes), _free(setting, each), *_times(each)]
        cells.append(_bytes(each.sent.get("inner", 0)))
        if has_outer:
            cells.append(_bytes(each.sent.get("outer", 0)))
        table.add_row(*cells, style="" if each.fits else "dim")
    return table


def _bytes(count: float | None) -> str:
    return _UNKNOWN if count is None else format_bytes(count)


def _free(setting: Setting, outcome: Outcome) -> str:
    if outcome.fits:
        return format_bytes(setting.memory - outcome.peak_bytes)
    return f"[red]-{format_bytes(outcome.lacking)}[/red]"


def _times(outcome: Outcome) -> list[str]:
    if outcome.times is None:
        return [_UNKNOWN] * 3
    exposed = format_seconds(outcome.times.exposed_sum)
    return [format_seconds(outcome.times.step), format_count(outcome.rate), exposed]


def estimates_table(estimates: Sequence[Estimate], memory_gib: float | None = None) -> Table:
    """A row for each estimate.

    Args:
        estimates: of one model on one number of ranks.
        memory_gib: memory of a rank; adds what is left of it.
    """
    first = estimates[0]
    padding = max(each.padding for each in estimates)
    table = Table(
        title=(
            f"{first.num_elements:,} elements (and at most {padding:,} of padding) on "
            f"{first.outer_size} x {first.inner_size} ranks (outer x inner); bytes of one rank"
        ),
        caption=f"+: for a moment, at most. Sent: in a step, at most. {NOT_INCLUDED}",
        title_justify="left",
        caption_justify="left",
    )
    has_outer = first.outer_size > 1
    table.add_column("strategy", no_wrap=True)
    if has_outer:
        table.add_column("outer", no_wrap=True)
    columns = ["weights", "gradients", "optimizer", "at rest", "+ full", "+ staging", "at most"]
    columns += ["sent inner", "sent outer"] if has_outer else ["sent"]
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
        cells += [format_bytes(count) for count in counts]
        if memory_gib is not None:
            left = memory_gib * 2**30 - each.peak_bytes
            cells.append(format_bytes(left) if left > 0 else f"[red]-{format_bytes(-left)}[/red]")
        table.add_row(*cells)
    return table
