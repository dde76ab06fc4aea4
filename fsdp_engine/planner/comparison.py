"""A job planned for several machines, changes of a machine, or numbers of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.outcome import Outcome, Setting, is_faster
from fsdp_engine.planner.questions import TrainingRun, format_large
from fsdp_engine.simulation.time_accuracy import accuracy_of
from fsdp_engine.terminal import format_bytes, format_count, format_seconds, table_text

if TYPE_CHECKING:
    from rich.table import Table

_UNKNOWN = "-"
# The heading of plans for changes of a machine.
WHAT_IF = "what if"


@dataclass(frozen=True)
class ComparedRow:
    """One plan.

    Attributes:
        label: the machine, the change, or the number of ranks.
        setting: the job.
        chosen: the fastest candidate that fits. None: none fits.
        outcomes: of all candidates that were tried.
    """

    label: str
    setting: Setting
    chosen: Outcome | None
    outcomes: tuple[Outcome, ...] = ()

    def outcome_of(self, candidate: Candidate) -> Outcome | None:
        """The outcome of a candidate. None: it was not tried, or does not fit."""
        fitting = (each for each in self.outcomes if each.fits)
        return next((each for each in fitting if each.candidate == candidate), None)

    def run(self, items: float, price: float | None = None) -> TrainingRun:
        """A training run of ``items`` tokens or samples.

        Raises:
            ValueError: no candidate fits.
        """
        if self.chosen is None:
            raise ValueError(f"plan: expected a candidate that fits on {self.label}; found none")
        return TrainingRun.of(self.setting, self.chosen, items, price)


@dataclass(frozen=True)
class Comparison:
    """Plans of one job; ``print`` shows a table.

    Attributes:
        heading: heading of the labels: "machine", "what if" or "ranks".
        rows: the plans. Rates are compared with the first one that fits.
        note: a sentence about rows for captions, or empty.
    """

    heading: str
    rows: tuple[ComparedRow, ...]
    note: str = ""

    @property
    def base(self) -> ComparedRow | None:
        """The row that the others are compared with."""
        return next((each for each in self.rows if each.chosen is not None), None)

    def speedup(self, row: ComparedRow) -> float | None:
        """Tokens or samples per second over those of the base. None: no candidate fits."""
        if row.chosen is None or self.base is None or self.base.chosen is None:
            return None
        return row.chosen.rate / self.base.chosen.rate

    def efficiency(self, row: ComparedRow) -> float | None:
        """The same per rank: 1 if it grows as the number of ranks."""
        speedup = self.speedup(row)
        if speedup is None or self.base is None:
            return None
        return speedup * self.base.setting.world_size / row.setting.world_size

    def kept_speedup(self, row: ComparedRow) -> float | None:
        """As :meth:`speedup`, if the strategy of the base is kept. None: that was not tried, or
        does not fit."""
        kept = self._kept(row)
        if kept is None or self.base is None or self.base.chosen is None:
            return None
        return kept.rate / self.base.chosen.rate

    def is_changed(self, row: ComparedRow) -> bool:
        """Whether another strategy than that of the base is the fastest, by more than the
        tolerance of rates."""
        if row.chosen is None:
            return False
        kept = self._kept(row)
        return kept is None or is_faster(row.chosen, kept)

    def _kept(self, row: ComparedRow) -> Outcome | None:
        if self.base is None or self.base.chosen is None:
            return None
        return row.outcome_of(self.base.chosen.candidate)

    def __str__(self) -> str:
        return table_text(comparison_table(comparison_texts(self)))


class ComparisonTexts(NamedTuple):
    """A comparison as texts.

    Attributes:
        title: the model.
        columns: headings of the numbers, after that of the labels.
        labels: one for each row, and its strategy.
        cells: numbers of each row, or "-".
        caption: what the numbers are.
        found: the comparison.
    """

    title: str
    columns: list[str]
    labels: list[tuple[str, str]]
    cells: list[list[str]]
    caption: str
    found: Comparison


class Answers(NamedTuple):
    """Answers to questions about a plan: sentences, and tables that compare plans."""

    sentences: tuple[str, ...] = ()
    tables: tuple[ComparisonTexts, ...] = ()


def comparison_texts(
    found: Comparison, items: float | None = None, prices: Sequence[float | None] = (None,)
) -> ComparisonTexts:
    """A row for each plan.

    Args:
        found: the plans.
        items: tokens or samples of a training run, for columns with its days and GPU hours.
        prices: dollars per GPU hour, one for all rows or one for each, for a column with its cost.
    """
    setting = found.rows[0].setting
    scales = len({each.setting.world_size for each in found.rows}) > 1
    has_cost = items is not None and any(price is not None for price in prices)
    per_rank = "Efficiency: rate of one rank" if scales else "Speed: rate"
    has_kept = found.heading == WHAT_IF
    columns = [f"{setting.item}/s", "efficiency" if scales else "speed"]
    columns += ["if kept"] * has_kept + ["MFU"]
    if items is None:
        columns = ["step", *columns, "at most"]
        last = "at most: memory of one rank"
    else:
        columns += ["days", "GPU hours"] + ["cost"] * has_cost
        last = f"days, GPU hours{' and cost' * has_cost} of {format_large(items)} {setting.item}"
    each = [accuracy_of(row.setting.machine_family) for row in found.rows]
    accuracies = ", ".join(dict.fromkeys(f"{one.where} {one.mark}" for one in each))
    kept = "; if kept: the same, with the strategy of the first row" * has_kept
    every = list(prices) * len(found.rows) if len(prices) == 1 else list(prices)
    cells = [
        _cells(found, row, items, price, scales=scales, has_cost=has_cost)
        or [_UNKNOWN] * len(columns)
        for row, price in zip(found.rows, every, strict=True)
    ]
    return ComparisonTexts(
        f"{setting.model}, {format_count(setting.num_elements)} parameters",
        columns,
        [
            (row.label, _strategy(row) + ", another choice" * (has_kept and found.is_changed(row)))
            for row in found.rows
        ],
        cells,
        f"The fastest strategy that fits. {per_rank}, over that of the first row{kept}; "
        f"MFU: model flops utilization; {last}. {found.note}{' ' * bool(found.note)}"
        f"Accuracy of times: {accuracies}.",
        found,
    )


def comparison_table(texts: ComparisonTexts) -> Table:
    """The table for a terminal; labels and strategies wrap in a narrow one."""
    with naming_extra():
        from rich.table import Table

    table = Table(
        title=texts.title,
        caption=texts.caption,
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column(texts.found.heading, overflow="fold")
    for column in texts.columns:
        table.add_column(column, justify="right", no_wrap=True)
    for (label, strategy), cells in zip(texts.labels, texts.cells, strict=True):
        table.add_row(f"[bold]{label}[/bold]\n{strategy}", *cells)
    return table


def _cells(
    found: Comparison,
    row: ComparedRow,
    items: float | None,
    price: float | None,
    *,
    scales: bool,
    has_cost: bool,
) -> list[str]:
    """The numbers of a row; none if nothing fits."""
    chosen = row.chosen
    if chosen is None or chosen.times is None:
        return []
    ratio = found.efficiency(row) if scales else found.speedup(row)
    cells = [format_count(chosen.rate), f"{ratio:.2f}"]
    if found.heading == WHAT_IF:
        kept = found.kept_speedup(row)
        cells.append(_UNKNOWN if kept is None else f"{kept:.2f}")
    cells.append(f"{chosen.times.mfu:.1%}")
    if items is None:
        return [format_seconds(chosen.times.step), *cells, format_bytes(chosen.peak_bytes)]
    run = row.run(items, price)
    cells += [f"{run.days:,.1f}", format_large(run.gpu_hours)]
    if has_cost:
        cells.append(_UNKNOWN if run.cost is None else f"${format_large(run.cost)}")
    return cells


def _strategy(row: ComparedRow) -> str:
    if row.chosen is None:
        return "nothing fits"
    each = row.chosen.candidate
    text = f"{each.levels} on {each.ranks}"
    if each.microbatch_size is not None:
        count = each.microbatches or row.setting.microbatches
        text += f", {count} x {each.microbatch_size} row{'s' * (each.microbatch_size > 1)}"
    text += f", recompute {each.recomputed}" * each.recomputes
    return f"{text}, {each.offloaded}" if each.offloaded else text
