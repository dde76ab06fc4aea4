"""Tables of plans and of estimates."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from fsdp_engine import terminal
from fsdp_engine.kernel_interface import Strategy
from fsdp_engine.planner.estimates import NOT_INCLUDED, Estimate
from fsdp_engine.planner.outcome import AXES, CONTEXT, TENSOR, Outcome, Setting
from fsdp_engine.planner.plan_view import in_units, table_unit
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of

# The numbers of levels, by name.
_NUMBERS = {each.inner.name: str(each.inner.value) for each in Strategy.all_on(1)}
_UNKNOWN = "?"
# Priorities of columns that narrow terminals omit first: bytes sent, and bytes by kind.
DETAILS = range(10, 30)


def plan_table(setting: Setting, outcomes: Sequence[Outcome], width: int | None = None) -> Table:
    """Returns a table with a row for each outcome. Rows that do not fit are dim.

    Args:
        setting: The job.
        outcomes: The sorted outcomes.
        width: Width of the terminal in characters. None: show all columns.
    """
    found = terminal.fitted(plan_columns(setting, outcomes), width)
    levels = ", ".join(f"{number} {level}" for level, number in _NUMBERS.items())
    table = Table(
        title=plan_title(setting),
        caption=plan_caption(setting, outcomes)
        + f" Levels: {levels}." * ("strategy" in found.folded)
        + terminal.not_shown(found, width),
        title_justify="left",
        caption_justify="left",
    )
    terminal.add_columns(table, found.columns, ["dim" if each.lacking else "" for each in outcomes])
    return table


def plan_title(setting: Setting) -> str:
    """Returns the title: model, ranks and machine."""
    return (
        f"{setting.model}, {terminal.format_count(setting.num_elements)} parameters"
        f"{' in ' * bool(setting.dtype)}{setting.dtype}, on "
        f"{setting.world_size:,} ranks of {setting.machine}; {_step_text(setting)}"
        + ", blocks compiled"
        * setting.is_compiled
    )


def _step_text(setting: Setting) -> str:
    if setting.global_batch:
        return f"{setting.global_batch:,} {setting.item} per step"
    return f"{setting.microbatches} microbatch{'es' * (setting.microbatches > 1)} per step"


def plan_caption(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    """Returns a caption with the units and meanings of the columns."""
    is_offloaded = any(each.candidate.offloaded for each in outcomes)
    _, name = table_unit(outcomes)
    text = (
        f"{name} of one rank: memory by kind at the peak; free: memory left of "
        f"{terminal.format_bytes(setting.memory)}, or the excess and the largest kind; sent: per "
        f"step. ms: step time {accuracy_of(setting.machine_family).mark}, and exposed "
        f"communication{' and copies' * is_offloaded}. Ranks: outer x inner. Recompute: "
        "activation checkpointing, of whole blocks or selective."
    )
    if any(each.candidate.context_parallel > 1 for each in outcomes):
        text += " CP: number of these ranks that share each sequence."
    if any(each.candidate.tensor_parallel > 1 for each in outcomes):
        text += " TP: number of tensor-parallel ranks per data-parallel rank."
    if any(each.candidate.pipeline > 1 for each in outcomes):
        text += " PP: number of ranks in a pipeline; times are their mean, memory is their maximum."
    if setting.global_batch:
        text += " Batch: microbatches x rows of one."
    if is_offloaded:
        text += " Elsewhere: offloaded state and activations of one rank, which each step copies."
    return text


def plan_columns(setting: Setting, outcomes: Sequence[Outcome]) -> list[terminal.Column]:
    """Returns the columns of a plan, with a cell for each outcome."""
    unit, _ = table_unit(outcomes)
    is_offloaded = any(each.candidate.offloaded for each in outcomes)
    candidates = [each.candidate for each in outcomes]
    has_outer = any(len(each.mesh) == 2 for each in candidates)
    shared = {
        CONTEXT: any(each.context_parallel > 1 for each in candidates),
        TENSOR: any(each.tensor_parallel > 1 for each in candidates),
    }
    outer = [each.outer_strategy if len(each.mesh) == 2 else "" for each in candidates]
    strategies = [each.strategy for each in candidates]
    columns = [_levels("strategy", "level", strategies)]
    if has_outer:
        columns.append(_levels("outer", "outer", outer))
    if has_outer or not all(each.is_data_parallel for each in candidates):
        columns.append(
            terminal.Column("ranks", [each.ranks for each in candidates], False, drop=110)
        )
    schedules = [each.schedule or "" for each in candidates]
    if len({each for each in schedules if each}) > 1:
        columns.append(terminal.Column("schedule", schedules, False))
    recompute = [each.recomputed for each in candidates]
    columns.append(
        terminal.Column("recompute", recompute, False, fold=80, folded=("redo", recompute))
    )
    if is_offloaded:
        texts = [each.offloaded or "no" for each in candidates]
        short = ("offload", list(map(_short_offload, texts)))
        columns.append(terminal.Column("offloaded", texts, False, fold=70, folded=short))
    if len({each.sequence for each in candidates}) > 1:
        columns.append(terminal.Column("sequence", [f"{each.sequence:,}" for each in candidates]))
    if setting.global_batch:
        batches = [f"{each.microbatches} x {each.microbatch_size}" for each in candidates]
        columns.append(terminal.Column("batch", batches))
    elif len({each.microbatch_size for each in candidates}) > 1:
        columns.append(terminal.Column("size", [str(each.microbatch_size) for each in candidates]))
    for number, kind in enumerate(KINDS):
        sizes = [in_units(each.memory.get(kind), unit) for each in outcomes]
        columns.append(terminal.Column(kind, sizes, drop=20 + number))
    columns.append(
        terminal.Column("at most", [in_units(each.peak_bytes, unit) for each in outcomes])
    )
    free = [_free(setting, each, unit) for each in outcomes]
    short_free = ("free", [_free(setting, each, unit, is_short=True) for each in outcomes])
    columns.append(terminal.Column("free", free, drop=90, fold=40, folded=short_free))
    if is_offloaded:
        held = [in_units(sum(each.elsewhere.values()), unit) for each in outcomes]
        columns.append(terminal.Column("elsewhere", held, drop=50))
    times = [each.times for each in outcomes]
    steps = [_UNKNOWN if each is None else f"{each.step * 1e3:,.1f}" for each in times]
    waits = [_UNKNOWN if each is None else f"{each.exposed_sum * 1e3:,.1f}" for each in times]
    rates = [
        _UNKNOWN if each.times is None else terminal.format_count(each.rate) for each in outcomes
    ]
    columns.append(terminal.Column("step", steps))
    columns.append(terminal.Column("exposed", waits, drop=30))
    columns.append(terminal.Column(f"{setting.item}/s", rates))
    axes = [*AXES[: 1 + has_outer], *(axis for axis, is_there in shared.items() if is_there)]
    for number, axis in enumerate(axes):
        sent = [in_units(each.sent.get(axis, 0), unit) for each in outcomes]
        name = f"sent {axis}" if len(axes) > 1 else "sent"
        columns.append(terminal.Column(name, sent, drop=12 - number))
    return columns


def _levels(name: str, short_name: str, strategies: Sequence[str]) -> terminal.Column:
    """Returns a column of levels, which narrow terminals show as numbers."""
    short = [_NUMBERS.get(each, each) for each in strategies]
    return terminal.Column(name, strategies, False, fold=60, folded=(short_name, short))


def _short_offload(text: str) -> str:
    """Returns a short text such as "state, acts" for "optimizer state on the host, activations on
    the host"."""
    for long, short in (
        *((", updated by the host", ""), (" on the host", ""), (" on the", "")),
        *(("optimizer state", "state"), ("everything", "all"), ("main weights", "weights")),
        *(("activations", "acts"), (" and ", "+")),
    ):
        text = text.replace(long, short)
    return text


def _free(setting: Setting, outcome: Outcome, unit: int, *, is_short: bool = False) -> str:
    """Returns the free memory as text, or the excess and the largest kind of memory."""
    if outcome.fits is None:
        return _UNKNOWN
    free = in_units(setting.memory - outcome.peak_bytes, unit)
    if outcome.fits:
        return free
    return f"[red]{free}[/red]" if is_short else f"[red]{free}, {outcome.largest_kind}[/red]"


def estimates_table(
    estimates: Sequence[Estimate], memory_gib: float | None = None, width: int | None = None
) -> Table:
    """Returns a table with a row for each estimate.

    Args:
        estimates: The estimates of one model on one number of ranks.
        memory_gib: Memory of a rank in GiB; adds a column with the memory that is left.
        width: Width of the terminal in characters. None: show all columns.
    """
    first = estimates[0]
    padding = max(each.padding for each in estimates)
    found = terminal.fitted(_estimate_columns(estimates, memory_gib), width)
    table = Table(
        title=(
            f"{first.num_elements:,} elements (and at most {padding:,} of padding) on "
            f"{first.outer_size} x {first.inner_size} ranks (outer x inner); bytes of one rank"
        ),
        caption=f"+: temporary bytes, at most. Sent: bytes per step, at most. {NOT_INCLUDED}"
        + terminal.not_shown(found, width),
        title_justify="left",
        caption_justify="left",
    )
    terminal.add_columns(table, found.columns)
    return table


def _estimate_columns(
    estimates: Sequence[Estimate], memory_gib: float | None
) -> list[terminal.Column]:
    def of_bytes(name: str, drop: int, counts: Sequence[float]) -> terminal.Column:
        return terminal.Column(name, list(map(terminal.format_bytes, counts)), drop=drop)

    has_outer = estimates[0].outer_size > 1
    columns = [terminal.Column("strategy", [each.strategy.inner.name for each in estimates], False)]
    if has_outer:
        columns.append(
            terminal.Column("outer", [each.strategy.outer.name for each in estimates], False)
        )
    columns += [
        of_bytes("weights", 7, [each.weight_bytes for each in estimates]),
        of_bytes("gradients", 6, [each.grad_bytes for each in estimates]),
        of_bytes("optimizer", 5, [each.optimizer_bytes for each in estimates]),
        of_bytes("at rest", 8, [each.rest_bytes for each in estimates]),
        of_bytes("+ full", 4, [each.full_bytes for each in estimates]),
        of_bytes("+ staging", 3, [each.staging_bytes for each in estimates]),
        of_bytes("at most", 0, [each.peak_bytes for each in estimates]),
    ]
    inner = [each.inner_traffic_bytes for each in estimates]
    columns.append(of_bytes("sent inner" if has_outer else "sent", 2, inner))
    if has_outer:
        columns.append(of_bytes("sent outer", 1, [each.outer_traffic_bytes for each in estimates]))
    places = dict.fromkeys(place for each in estimates for place in each.elsewhere)
    for place in places:
        held = [each.elsewhere.get(place, 0) for each in estimates]
        columns.append(of_bytes(f"on the {place}", 9, held))
    if memory_gib is not None:
        left = [memory_gib * 2**30 - each.peak_bytes for each in estimates]
        cells = [
            terminal.format_bytes(each)
            if each > 0
            else f"[red]-{terminal.format_bytes(-each)}[/red]"
            for each in left
        ]
        columns.append(terminal.Column("left", cells))
    return columns
