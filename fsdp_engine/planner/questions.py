"""Answers about a planned job: duration and cost of a training run, interval of checkpoints.

Formulas, with units in their docstrings:

    training   steps = items / items of a step; GPU hours = steps x step time x ranks
    MFU        time of the model's flops at the machine's peak over the time of the step,
               [Note: Model flops] in ``simulation/operations.py``
    interval   Young, "A first order approximation to the optimum checkpoint interval",
               Communications of the ACM 17 (9), 1974; Daly, "A higher order estimate of the optimum
               checkpoint interval for restart dumps", Future Generation Computer Systems 22 (3),
               2006
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fsdp_engine.planner.outcome import Outcome, Setting
from fsdp_engine.simulation.simulation_error import check_positive
from fsdp_engine.simulation.time_accuracy import TimeAccuracy, accuracy_of
from fsdp_engine.terminal import COUNT_UNITS, format_bytes, format_count, format_seconds

GPU, NODE = "gpu", "node"
HOUR = 3600.0
# Units of durations, with their names.
DURATIONS = {24 * HOUR: "days", HOUR: "hours", 60.0: "minutes"}
# Beyond those of other counts.
_TRILLION = 1e12
LARGE_UNITS = (*COUNT_UNITS, "T")


@dataclass(frozen=True)
class TrainingRun:
    """A training run with a planned step, without saves, failures and evaluation.

    Attributes:
        items: tokens or samples of the run.
        item: their unit.
        num_ranks: data-parallel ranks, one GPU each.
        steps: of the optimizer.
        seconds: duration of the run.
        mfu: model flops utilization, a fraction.
        model_flops: of the run, on all ranks, without recomputation.
        price: dollars per GPU hour. None: unknown.
        accuracy: of the planned times, by which they are not scaled.
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
        """The run of ``items`` tokens or samples.

        Raises:
            ValueError: a number is not positive.
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
        """Hours of all GPUs together."""
        return self.seconds * self.num_ranks / HOUR

    @property
    def cost(self) -> float | None:
        """Dollars; None if the price is unknown."""
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


def young_interval(save_seconds: float, mtbf: float) -> float:
    """Returns the interval of computation between checkpoints in seconds, by Young: sqrt(2 d M).

    Args:
        save_seconds: d, the time that training waits for a save.
        mtbf: M, mean seconds between failures of the job.
    """
    return math.sqrt(2 * save_seconds * mtbf)


def daly_interval(save_seconds: float, mtbf: float) -> float:
    """Returns the same interval by Daly, in seconds:

        sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d    if d < 2M, else M

    Args:
        save_seconds, mtbf: d and M, as for :func:`young_interval`.
    """
    if save_seconds >= 2 * mtbf:
        return mtbf
    ratio = save_seconds / (2 * mtbf)
    return (
        young_interval(save_seconds, mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds
    )


def slowdown(interval: float, save_seconds: float, restart_seconds: float, mtbf: float) -> float:
    """Returns the expected duration over that without saves and failures, by Daly's complete model:

        M e^(R / M) (e^((t + d) / M) - 1) / t

    Args:
        interval: t, seconds of computation between saves.
        save_seconds, restart_seconds: d and R.
        mtbf: M, mean seconds between failures, which have an exponential distribution.
    """
    try:
        repeated = math.exp(restart_seconds / mtbf) * math.expm1((interval + save_seconds) / mtbf)
    except OverflowError:  # a job that hardly ever saves
        return math.inf
    return mtbf * repeated / interval


def num_failing(setting: Setting, of: str) -> int:
    """Returns the number of GPUs or nodes of a job, each of which may fail.

    Args:
        of: "gpu" or "node".
    """
    per_part = setting.ranks_per_node if of == NODE else 1
    return math.ceil(setting.world_size / per_part)


@dataclass(frozen=True)
class CheckpointInterval:
    """How often to save a planned job.

    Attributes:
        num_bytes: of a checkpoint: parameters and optimizer state.
        save_seconds: the time of a save, during which training waits.
        restart_seconds: from a failure until training continues from the last checkpoint.
        mtbf: mean seconds between failures of the job.
        seconds: of training between saves, by Daly.
        young: the same by Young.
        steps: whole steps between saves.
        source: the failure rate in words.
    """

    num_bytes: int
    save_seconds: float
    restart_seconds: float
    mtbf: float
    seconds: float
    young: float
    steps: int
    source: str

    @classmethod
    def of(
        cls,
        setting: Setting,
        chosen: Outcome,
        bandwidth: float,
        mtbf_hours: float,
        of: str,
        restart_seconds: float | None,
    ) -> CheckpointInterval:
        """See :meth:`~.strategy_plan.StrategyPlan.checkpoints`.

        Raises:
            ValueError: a number is not positive, ``of`` is unknown, or the plan has no size of a
                checkpoint.
        """
        check_positive("bandwidth", bandwidth, "bytes per second of all ranks together")
        check_positive("mtbf", mtbf_hours, "mean hours between failures")
        if of not in (GPU, NODE):
            raise ValueError(f"of: expected {GPU!r} or {NODE!r}; found {of!r}")
        if not chosen.checkpoint_bytes:
            raise ValueError(
                "plan: expected the size of a checkpoint; found a plan of an earlier version"
            )
        count = num_failing(setting, of)
        saving = chosen.checkpoint_bytes / bandwidth
        if restart_seconds is None:
            restart_seconds = saving
        else:
            check_positive("restart_seconds", restart_seconds, "seconds")
        mtbf = mtbf_hours * HOUR / count
        interval = daly_interval(saving, mtbf)
        assert chosen.times is not None
        unit = "GPU" if of == GPU else of
        return cls(
            chosen.checkpoint_bytes,
            saving,
            restart_seconds,
            mtbf,
            interval,
            young_interval(saving, mtbf),
            max(1, round(interval / chosen.times.step)),
            f"{count:,} {unit}{'s' * (count > 1)}, each fails once in {mtbf_hours:,.0f} hours",
        )

    @property
    def overhead(self) -> float:
        """Expected fraction of the time that saves, repeated work and restarts take."""
        return 1 - 1 / slowdown(self.seconds, self.save_seconds, self.restart_seconds, self.mtbf)

    def __str__(self) -> str:
        return (
            f"A checkpoint has {format_bytes(self.num_bytes)}; saving it takes "
            f"{format_duration(self.save_seconds)}. With a failure every "
            f"{format_duration(self.mtbf)} ({self.source}), save every "
            f"{format_duration(self.seconds)} (Daly; Young: {format_duration(self.young)}), "
            f"{self.steps:,} step{'s' * (self.steps > 1)}: saves, repeated work and restarts take "
            f"{self.overhead:.1%} of the time."
        )


def parsed_count(text: str) -> float:
    """Returns the number of a text such as "4M": k is 2^10, M is 2^20.

    Raises:
        ValueError: it is none.
    """
    factor = {"k": 2**10, "m": 2**20}.get(text[-1:].lower())
    try:
        return float(text) if factor is None else factor * float(text[:-1])
    except ValueError:
        raise ValueError(
            f"--global-batch: expected a number such as 4M or 4194304; found {text!r}"
        ) from None


def format_large(count: float) -> str:
    """Format a count with three significant digits, also of trillions: 15T."""
    if count < 0.9995 * _TRILLION:
        return format_count(count)
    return f"{count / _TRILLION:,.3g}{LARGE_UNITS[-1]}"


def format_duration(seconds: float) -> str:
    """Format a duration: 54.2 days, 3.1 hours, 12 minutes, 9.5 s."""
    for unit, name in DURATIONS.items():
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return format_seconds(seconds)
