"""Answers to questions about a planned job: duration and cost of a training run.

Formulas (docstrings state the units):

    training   steps = items / items of a step; GPU hours = steps x step time x ranks
    MFU        time of the model's flops at the machine's peak over the time of the step,
               [Note: Model flops] in ``simulation/operations.py``
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_engine import terminal
from fsdp_engine.planner.outcome import Outcome, Setting
from fsdp_engine.planner.simulation.simulation_error import check_positive
from fsdp_engine.planner.simulation.time_accuracy import TimeAccuracy, accuracy_of

HOUR = 3600.0
# Names of the units of durations, by seconds.
_DURATIONS = {24 * HOUR: "days", HOUR: "hours", 60.0: "minutes"}
_TRILLION = 1e12


@dataclass(frozen=True)
class TrainingRun:
    """A training run of planned steps, without time for saves, failures and evaluation.

    Attributes:
        items: Tokens or samples of the run.
        item: Unit of ``items``: "tokens" or "samples".
        num_ranks: Number of ranks of the job, one GPU each.
        steps: Number of optimizer steps.
        seconds: Duration of the run.
        mfu: Model flops utilization, a fraction.
        model_flops: The FLOPs of the run, on all ranks, without recomputation.
        price: Dollars per GPU hour. None: unknown.
        accuracy: The accuracy of planned times. ``seconds`` is not scaled by it.
    """

    items: float
    item: str
    num_ranks: int
    steps: int
    seconds: float
    mfu: float
    model_flops: float
    price: float | None = None
    accuracy: TimeAccuracy = field(default_factory=lambda: accuracy_of(""))

    @classmethod
    def of(
        cls, setting: Setting, chosen: Outcome, items: float, price: float | None
    ) -> TrainingRun:
        """Returns the training run of ``items`` tokens or samples.

        Raises:
            ValueError: A number is not positive.
        """
        check_positive("tokens", items, "tokens or samples")
        if price is not None:
            check_positive("price", price, "dollars per GPU hour")
        assert chosen.times is not None
        steps = math.ceil(items / chosen.items)
        return cls(
            items,
            setting.item,
            setting.world_size,
            steps,
            steps * chosen.times.step,
            chosen.times.mfu,
            steps * chosen.model_flops * setting.world_size,
            price,
            accuracy_of(setting.machine_family),
        )

    @property
    def days(self) -> float:
        """Duration in days."""
        return self.seconds / (24 * HOUR)

    @property
    def gpu_hours(self) -> float:
        """GPU hours of all ranks together."""
        return self.seconds * self.num_ranks / HOUR

    @property
    def cost(self) -> float | None:
        """Cost in dollars; None if the price is unknown."""
        return None if self.price is None else self.price * self.gpu_hours

    def __str__(self) -> str:
        text = (
            f"Training on {format_large(self.items)} {self.item} takes {self.steps:,} steps, "
            f"{format_duration(self.seconds)} {self.accuracy.mark}, "
            f"{format_large(self.gpu_hours)} GPU hours on "
            f"{self.num_ranks:,} ranks; {self.model_flops:.2e} model flops, MFU {self.mfu:.1%}"
        )
        if self.price is None or self.cost is None:
            return f"{text}."
        return f"{text}. Cost: ${format_large(self.cost)} at ${self.price:,.2f} per GPU hour."


def format_large(count: float) -> str:
    """Format a count with three significant digits. Supports trillions: 15T."""
    if count < 0.9995 * _TRILLION:
        return terminal.format_count(count)
    return f"{count / _TRILLION:,.3g}T"


def format_duration(seconds: float) -> str:
    """Format a duration: 54.2 days, 3.1 hours, 12.0 minutes, 9.50 s."""
    for unit, name in _DURATIONS.items():
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return terminal.format_seconds(seconds)
