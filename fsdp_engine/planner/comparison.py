"""A job planned for several machines, changes of a machine, or numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_engine.planner.outcome import Outcome, Setting
from fsdp_engine.planner.questions import TrainingRun
from fsdp_engine.terminal import table_text


@dataclass(frozen=True)
class ComparedRow:
    """One plan.

    Attributes:
        label: the machine, the change, or the number of ranks.
        setting: the job.
        chosen: the fastest candidate that fits. None: none fits.
    """

    label: str
    setting: Setting
    chosen: Outcome | None

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
    """

    heading: str
    rows: tuple[ComparedRow, ...]

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

    def __str__(self) -> str:
        from fsdp_engine.planner.comparison_table import comparison_table  # needs rich

        return table_text(comparison_table(self))
