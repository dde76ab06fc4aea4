"""Computes and prints answers to questions that the user asks by options of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from fsdp_engine import terminal
from fsdp_engine.planner.command_fields import QuestionFields
from fsdp_engine.planner.comparison import Comparison, comparison_table, named_machines
from fsdp_engine.planner.questions import format_duration
from fsdp_engine.planner.scaling_figure import save_scaling_figure
from fsdp_engine.planner.strategy_plan import StrategyPlan


@dataclass(frozen=True, kw_only=True)
class Questions(QuestionFields):
    """Questions about a plan.

    Attributes:
        tokens: Number of tokens of a training run.
        price: Dollars per GPU hour: one price, or one for each machine of ``compare``.
        compare: Names of machines to plan for.
        scaling: Whether to plan for other numbers of ranks.
        scaling_figure: Path of a file for a figure of step time by number of ranks.
        checkpoint_bandwidth: GB/s to storage, of all ranks together.

    Raises:
        ValueError: There is no such machine, or the numbers of prices and machines differ.
    """

    def __post_init__(self) -> None:
        count = len([*named_machines(self.compare or ())])
        if len(self._prices) not in (1, count):
            more = f", or {count} for --compare" if count else " without --compare"
            raise ValueError(
                f"--price: expected one price{more}; found {','.join(map(str, self._prices))}"
            )

    @property
    def _prices(self) -> tuple[float | None, ...]:
        return self.price or (None,)

    def _price_of(self, planning: StrategyPlan) -> float | None:
        """Returns the price of the planned machine; None if it is unknown."""
        if len(self._prices) == 1:
            return self._prices[0]
        machines = [machine for _, machine in named_machines(self.compare or ())]
        prices = zip(machines, self._prices, strict=True)
        return next((price for machine, price in prices if machine == planning.machine), None)

    def answer(self, planning: StrategyPlan) -> None:
        """Print the answers for a plan with a candidate that fits."""
        for sentence in self._sentences(planning):
            print(sentence)
        for found, prices in self._comparisons(planning):
            print()
            Console().print(comparison_table(found, self.tokens, prices))

    def _sentences(self, planning: StrategyPlan) -> Iterator[str]:
        if self.tokens is not None:
            yield str(planning.training(self.tokens, self._price_of(planning)))
        if self.checkpoint_bandwidth is not None:
            assert planning.chosen is not None
            num_bytes = planning.chosen.checkpoint_bytes
            yield (
                f"A checkpoint has {terminal.format_bytes(num_bytes)}; saving it takes "
                f"{format_duration(num_bytes / (1e9 * self.checkpoint_bandwidth))}."
            )

    def _comparisons(
        self, planning: StrategyPlan
    ) -> Iterator[tuple[Comparison, tuple[float | None, ...]]]:
        """Yields comparisons, with the prices of their rows."""
        if self.compare:
            yield planning.compare(self.compare), self._prices
        if self.scaling:
            scaling = planning.scaling()
            yield scaling, (self._price_of(planning),)
            if self.scaling_figure is not None:
                save_scaling_figure(scaling, self.scaling_figure)
