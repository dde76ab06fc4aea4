"""Plans of one job for several machines or numbers of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_engine import terminal
from fsdp_engine.planner.outcome import Outcome, Setting
from fsdp_engine.planner.questions import TrainingRun, format_large
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.simulation_error import listed
from fsdp_engine.planner.simulation.time_accuracy import accuracy_of

if TYPE_CHECKING:
    from rich.table import Table

_UNKNOWN = "-"


@dataclass(frozen=True)
class ComparedRow:
    """One plan of a comparison.

    Attributes:
        label: Name of the machine, or the number of ranks.
        setting: The job.
        chosen: The fastest candidate that fits. None: no candidate fits.
    """

    label: str
    setting: Setting
    chosen: Outcome | None

    def run(self, items: float, price: float | None = None) -> TrainingRun:
        """Returns a training run of ``items`` tokens or samples.

        Raises:
            ValueError: No candidate fits.
        """
        if self.chosen is None:
            raise ValueError(f"plan: expected a candidate that fits on {self.label}; found none")
        return TrainingRun.of(self.setting, self.chosen, items, price)


@dataclass(frozen=True)
class Comparison:
    """Plans of one job; ``print`` shows a table.

    Attributes:
        heading: Heading of the labels: "machine" or "ranks".
        rows: The plans. Rates are relative to the first plan with a candidate that fits.
    """

    heading: str
    rows: tuple[ComparedRow, ...]

    @property
    def base(self) -> ComparedRow | None:
        """The row that the others are compared with; None if no candidate fits in any row."""
        return next((each for each in self.rows if each.chosen is not None), None)

    def speedup(self, row: ComparedRow) -> float | None:
        """Returns the tokens or samples per second of a row, divided by those of the base. None: no
        candidate of the row fits."""
        if row.chosen is None or self.base is None or self.base.chosen is None:
            return None
        return row.chosen.rate / self.base.chosen.rate

    def efficiency(self, row: ComparedRow) -> float | None:
        """Returns the speedup per rank, which is 1 if the rate grows in proportion to the ranks.
        None: no candidate of the row fits."""
        speedup = self.speedup(row)
        if speedup is None or self.base is None:
            return None
        return speedup * self.base.setting.world_size / row.setting.world_size

    def __str__(self) -> str:
        return terminal.table_text(comparison_table(self))


def named_machines(machines: Any) -> Iterator[tuple[str, Machine]]:
    """Yields machines with short labels: names of presets and files as given, or machine names.

    Raises:
        TypeError, ValueError: See ``Machine.named``.
    """
    for each in listed("machines", machines, "machines, or names of presets, in a tuple"):
        if isinstance(each, Machine):
            yield each.name, each
        else:
            yield str(each), Machine.named(each)


def comparison_table(
    found: Comparison, items: float | None = None, prices: Sequence[float | None] = (None,)
) -> Table:
    """Returns a table for a terminal with a row for each plan. Labels and strategies wrap if the
    terminal is narrow.

    Args:
        found: The plans.
        items: Tokens or samples of a training run; adds columns with its days and GPU hours.
        prices: Dollars per GPU hour: one price for all rows, or one for each row. With ``items``,
            known prices add a column with the cost.
    """
    terminal.import_rich()
    from rich.table import Table

    setting = found.rows[0].setting
    scales = len({each.setting.world_size for each in found.rows}) > 1
    has_cost = items is not None and any(price is not None for price in prices)
    columns = [f"{setting.item}/s", "efficiency" if scales else "speed", "MFU"]
    if items is None:
        columns = ["step", *columns, "at most"]
        last = "at most: memory of one rank"
    else:
        columns += ["days", "GPU hours"] + ["cost"] * has_cost
        last = f"days, GPU hours{' and cost' * has_cost} of {format_large(items)} {setting.item}"
    each = [accuracy_of(row.setting.machine_family) for row in found.rows]
    accuracies = ", ".join(dict.fromkeys(f"{one.where} {one.mark}" for one in each))
    table = Table(
        title=f"{setting.model}, {terminal.format_count(setting.num_elements)} parameters",
        caption=f"The fastest strategy that fits. "
        f"{'Efficiency: rate of one rank' if scales else 'Speed: rate'}, over that of the first "
        f"row; MFU: model flops utilization; {last}. Accuracy of times: {accuracies}.",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column(found.heading, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    every = list(prices) * len(found.rows) if len(prices) == 1 else list(prices)
    for row, price in zip(found.rows, every, strict=True):
        cells = _cells(found, row, items, price, scales=scales, has_cost=has_cost)
        cells = cells or [_UNKNOWN] * len(columns)
        table.add_row(f"[bold]{row.label}[/bold]\n{_strategy(row)}", *cells)
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
    """Returns the numbers of a row, or an empty list if no candidate fits."""
    chosen = row.chosen
    if chosen is None or chosen.times is None:
        return []
    ratio = found.efficiency(row) if scales else found.speedup(row)
    cells = [terminal.format_count(chosen.rate), f"{ratio:.2f}", f"{chosen.times.mfu:.1%}"]
    if items is None:
        return [
            terminal.format_seconds(chosen.times.step),
            *cells,
            terminal.format_bytes(chosen.peak_bytes),
        ]
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
