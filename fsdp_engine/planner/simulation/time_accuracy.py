"""The accuracy of simulated times by machine, from measured steps that were compared with plans.

``time_factors.json`` has the ratios of measured to planned step times in ascending order.
``tools/time_factors.py`` writes it from ``benchmarks/results``:

    A100, H100      jobs with published speeds (``planner_published.json``)
    calibrated CPU  pairs of levels of two models on two gloo ranks (``planner_time.json``)
    calibrated GPU  jobs on one H100 and one H200 (``planner_gpu.json``)

Planned times are never scaled by these ratios. The accuracy is printed beside the times.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from fsdp_engine import terminal
from fsdp_engine.planner.simulation.machine import Machine

# The fraction of compared steps within the stated range.
COVERED = 0.9
# Planned times are reported as too short if the median of the ratios is at least this number.
_TOO_FAST = 1.1


@dataclass(frozen=True)
class TimeAccuracy:
    """Ratios of measured to planned step times.

    Attributes:
        steps: The compared steps as text.
        where: The machine of the compared steps as text.
        factors: The ratios in ascending order. Empty: no steps were compared.
    """

    steps: str
    where: str
    factors: tuple[float, ...]

    @property
    def is_too_fast(self) -> bool:
        """Whether compared steps took clearly longer than planned."""
        return bool(self.factors) and statistics.median(self.factors) >= _TOO_FAST

    @property
    def factor(self) -> float:
        """The expected ratio of measured to planned step time: the median if planned times are too
        short, otherwise 1."""
        return statistics.median(self.factors) if self.is_too_fast else 1.0

    @property
    def spread(self) -> float:
        """The relative deviation from the expected time that is not exceeded by a fraction
        ``COVERED`` of the compared steps."""
        distances = sorted(abs(each / self.factor - 1) for each in self.factors)
        return distances[math.ceil(COVERED * len(distances)) - 1]

    @property
    def mark(self) -> str:
        """Text to print after a planned time: "+-11 %", "(x 1.35, +-9 %)", "(accuracy unknown)"."""
        if not self.factors:
            return "(accuracy unknown)"
        spread = f"+-{100 * self.spread:.0f} %"
        return f"(x {self.factor:.2f}, {spread})" if self.is_too_fast else spread

    def sentence(self, seconds: float) -> str:
        """Returns the accuracy of a planned step time as a sentence."""
        if not self.factors:
            return (
                f"The accuracy of times on {self.where} is unknown: no steps there were compared "
                "with plans."
            )
        low, high = self.factors[0], self.factors[-1]
        took = f"{self.steps} took {low:.2f} to {high:.2f} times the planned time"
        if not self.is_too_fast:
            within = math.ceil(COVERED * len(self.factors))
            return (
                f"Times on {self.where} are accurate to +-{100 * self.spread:.0f} % for {within} "
                f"of {len(self.factors)} compared steps: {took}."
            )
        return (
            f"Planned times are too short on {self.where}: {took}, {self.factor:.2f} in the "
            "median. Times are not scaled: expect "
            f"{terminal.format_seconds(self.factor * seconds)} +-{100 * self.spread:.0f} % instead "
            f"of {terminal.format_seconds(seconds)}, and rates lower by the same factor."
        )


# For each family of machines: the machine of the compared steps, their description, and the
# family's name in texts.
_COMPARED = {
    "A100": ("A100", "published jobs", "A100"),
    "H100": ("H100", "published jobs", "H100"),
    "H200": ("H100", "published jobs on H100, the same chip,", "H200"),
    "calibrated CPU": ("calibrated CPU", "measured steps on two gloo ranks", "calibrated CPUs"),
    "calibrated GPU": (
        "calibrated GPU",
        "measured steps on one H100 and one H200",
        "calibrated GPUs",
    ),
}


def _accuracies() -> dict[str, TimeAccuracy]:
    text = Path(__file__).with_name("time_factors.json").read_text(encoding="utf-8")
    factors = json.loads(text)
    return {
        family: TimeAccuracy(f"{len(factors[source])} {steps}", where, tuple(factors[source]))
        for family, (source, steps, where) in _COMPARED.items()
    }


ACCURACIES = _accuracies()


def family_of(machine: Machine) -> str:
    """Returns the family of a machine in ``ACCURACIES``; otherwise its chip, or "" if unknown.

    A calibrated machine is recognized by its name and by achievable fractions of 1.
    """
    processor = machine.processor
    is_measured = processor.achievable_flops == processor.achievable_bandwidth == 1
    if is_measured and not machine.host_runs_ahead and "gloo ranks" in machine.name:
        return "calibrated CPU"
    if is_measured and machine.host_runs_ahead and "NVIDIA" in machine.name:
        return "calibrated GPU"
    found = re.search(r"\b[AHB]\d00\b", machine.name)
    return found[0] if found and not is_measured else ""


def accuracy_of(family: str) -> TimeAccuracy:
    """Returns the accuracy of times for a family of machines; see :func:`family_of`."""
    return ACCURACIES.get(family) or TimeAccuracy("", family or "this machine", ())
