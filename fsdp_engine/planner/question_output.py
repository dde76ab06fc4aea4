"""Answers to the questions of a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdp_engine.extras import naming_extra
from fsdp_engine.planner.comparison import Comparison, comparison_table
from fsdp_engine.planner.questions import GPU, format_duration
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
        changes: of the machine's figures, one mapping for each row.
        scales: plan for other numbers of ranks.
        scaling_figure: file for a figure of these.
        bandwidth: bytes per second to storage, of all ranks together.
        mtbf_hours, mtbf_of: mean hours between failures of one GPU or node.
    """

    tokens: float | None = None
    prices: tuple[float | None, ...] = (None,)
    machines: tuple[str, ...] = ()
    changes: tuple[Mapping[str, str], ...] = ()
    scales: bool = False
    scaling_figure: Path | None = None
    bandwidth: float | None = None
    mtbf_hours: float | None = None
    mtbf_of: str = GPU

    def answer(self, planning: StrategyPlan) -> None:
        """Print the answers for a plan of which a candidate fits."""
        if self.tokens is not None:
            price = self.prices[0] if len(self.prices) == 1 else None
            print(planning.training(self.tokens, price))
        self._answer_checkpoints(planning)
        if self.machines:
            self._print(planning.compare(self.machines), self.prices)
        if self.changes:
            self._print(planning.what_if(*self.changes), self.prices[:1])
        if self.scales:
            scaling = planning.scaling()
            self._print(scaling, self.prices[:1])
            if self.scaling_figure is not None:
                save_scaling_figure(scaling, self.scaling_figure)

    def _answer_checkpoints(self, planning: StrategyPlan) -> None:
        if self.bandwidth is None:
            return
        if self.mtbf_hours is not None:
            print(planning.checkpoints(self.bandwidth, self.mtbf_hours, self.mtbf_of))
            return
        assert planning.chosen is not None
        num_bytes = planning.chosen.checkpoint_bytes
        print(
            f"A checkpoint has {format_bytes(num_bytes)}; saving it takes "
            f"{format_duration(num_bytes / self.bandwidth)}."
        )

    def _print(self, found: Comparison, prices: tuple[float | None, ...]) -> None:
        print()
        Console().print(comparison_table(found, self.tokens, prices))
