"""Answers to the questions of a command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.comparison import Comparison, comparison_table
from fsdp_engine.planner.questions import format_duration
from fsdp_engine.planner.scaling_figure import save_scaling_figure
from fsdp_engine.planner.strategy_plan import StrategyPlan
from fsdp_engine.terminal import format_bytes

with naming_extra():
    from rich.console import Console


@dataclass(frozen=True)
class Questions:
    """Questions about a plan.

    Attributes:
        tokens: of a training run.
        prices: dollars per GPU hour: one, or one for each of ``machines``.
        machines: to plan for.
        scales: plan for other numbers of ranks.
        scaling_figure: file for a figure of these.
        bandwidth: bytes per second to storage, of all ranks together.
    """

    tokens: float | None = None
    prices: tuple[float | None, ...] = (None,)
    machines: tuple[str, ...] = ()
    scales: bool = False
    scaling_figure: Path | None = None
    bandwidth: float | None = None

    def answer(self, planning: StrategyPlan) -> None:
        """Print the answers for a plan of which a candidate fits."""
        for sentence in self._sentences(planning):
            print(sentence)
        for found, prices in self._comparisons(planning):
            print()
            Console().print(comparison_table(found, self.tokens, prices))

    def _sentences(self, planning: StrategyPlan) -> Iterator[str]:
        if self.tokens is not None:
            price = self.prices[0] if len(self.prices) == 1 else None
            yield str(planning.training(self.tokens, price))
        if self.bandwidth is not None:
            assert planning.chosen is not None
            num_bytes = planning.chosen.checkpoint_bytes
            yield (
                f"A checkpoint has {format_bytes(num_bytes)}; saving it takes "
                f"{format_duration(num_bytes / self.bandwidth)}."
            )

    def _comparisons(
        self, planning: StrategyPlan
    ) -> Iterator[tuple[Comparison, tuple[float | None, ...]]]:
        """Comparisons, with prices of their rows."""
        if self.machines:
            yield planning.compare(self.machines), self.prices
        if self.scales:
            scaling = planning.scaling()
            yield scaling, self.prices[:1]
            if self.scaling_figure is not None:
                save_scaling_figure(scaling, self.scaling_figure)
