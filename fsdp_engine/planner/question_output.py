"""Answers to the questions of a command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fsdp_engine.kernel_interface import terminal
from fsdp_engine.planner.command_options import Needs, option
from fsdp_engine.planner.comparison import Comparison, comparison_table, named_machines
from fsdp_engine.planner.questions import format_duration
from fsdp_engine.planner.scaling_figure import save_scaling_figure
from fsdp_engine.planner.simulation.simulation_error import check_positive
from fsdp_engine.planner.strategy_plan import StrategyPlan

with terminal.naming_extra():
    from rich.console import Console


def _positive(value: float, option: str) -> float:
    check_positive(option, value, "a number")
    return value


def _prices(text: str, option: str) -> tuple[float, ...]:
    prices = tuple(float(each) for each in text.split(","))
    for each in prices:
        check_positive(option, each, "dollars per GPU hour")
    return prices


def _machines(text: str, _option: str) -> tuple[str, ...]:
    return tuple(name for name, _ in named_machines(text.split(",")))


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions about a plan.

    Attributes:
        tokens: The tokens of a training run.
        price: dollars per GPU hour: one, or one for each machine of ``compare``.
        compare: machines to plan for.
        scaling: plan for other numbers of ranks.
        scaling_figure: file for a figure of these.
        checkpoint_bandwidth: GB/s to storage, of all ranks together.

    Raises:
        ValueError: there are other numbers of prices and machines.
    """

    tokens: float | None = option(
        "of a training run, such as 15e12: its days, GPU hours and MFU",
        None,
        parse=_positive,
        needs=Needs.simulation,
    )
    price: tuple[float, ...] | None = option(
        "with --tokens: dollars per GPU hour; one, or one for each of --compare, such as 2.5,3.2",
        None,
        type=str | None,
        parse=_prices,
        needs=Needs.simulation,
        requires="tokens",
    )
    compare: tuple[str, ...] | None = option(
        "machines to plan for, too, such as h100,h200",
        None,
        type=str | None,
        parse=_machines,
        needs=Needs.simulation,
    )
    scaling: bool = option(
        "how the time grows from 8 to 4,096 ranks", False, needs=Needs.simulation
    )
    scaling_figure: Path | None = option(
        "with --scaling: save a figure of it to this file",
        None,
        needs=Needs.simulation,
        requires="scaling",
    )
    checkpoint_bandwidth: float | None = option(
        "GB/s to storage of all ranks together: the time of a save",
        None,
        parse=_positive,
        needs=Needs.simulation,
    )

    def __post_init__(self) -> None:
        count = len(self.compare or ())
        if len(self._prices) not in (1, count):
            raise ValueError(
                f"--price: expected one price, or {count} for --compare; found "
                f"{','.join(map(str, self._prices))}"
            )

    @property
    def _prices(self) -> tuple[float | None, ...]:
        return self.price or (None,)

    def answer(self, planning: StrategyPlan) -> None:
        """Print the answers for a plan of which a candidate fits."""
        for sentence in self._sentences(planning):
            print(sentence)
        for found, prices in self._comparisons(planning):
            print()
            Console().print(comparison_table(found, self.tokens, prices))

    def _sentences(self, planning: StrategyPlan) -> Iterator[str]:
        if self.tokens is not None:
            price = self._prices[0] if len(self._prices) == 1 else None
            yield str(planning.training(self.tokens, price))
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
        """Comparisons, with prices of their rows."""
        if self.compare:
            yield planning.compare(self.compare), self._prices
        if self.scaling:
            scaling = planning.scaling()
            yield scaling, self._prices[:1]
            if self.scaling_figure is not None:
                save_scaling_figure(scaling, self.scaling_figure)
