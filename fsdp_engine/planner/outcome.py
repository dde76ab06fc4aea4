"""What one candidate would take: memory by kind, time, bytes on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.estimates import Estimate
from fsdp_engine.simulation.clock import axis_of
from fsdp_engine.simulation.memory_watch import KINDS
from fsdp_engine.simulation.result import Simulation
from fsdp_engine.strategies import Strategy

ACTIVATIONS = KINDS[-1]
AXES = ("inner", "outer")


@dataclass(frozen=True)
class Setting:
    """What was planned for.

    Attributes:
        model: what people call it.
        num_elements: parameter elements.
        machine: its name.
        world_size: data-parallel ranks.
        ranks_per_node: consecutive ranks that share a node.
        memory: bytes that a rank may hold.
        item: what a batch is counted in: "tokens" or "samples".
        microbatches: of a step.
        why_unknown: why activations and times, and so whether anything fits, are not known; empty:
            they are.
    """

    model: str
    num_elements: int
    machine: str
    world_size: int
    ranks_per_node: int
    memory: float
    item: str
    microbatches: int
    why_unknown: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            kinds: dict[str, Any] = {"int": int, "float": int | float}
            kind = kinds.get(str(each.type), str)
            value = getattr(self, each.name)
            if not isinstance(value, kind):
                raise TypeError(f"{each.name}: expected {each.type}; found {value!r}")


@dataclass(frozen=True)
class Times:
    """Where one rank's step goes. Seconds.

    Attributes:
        step: from the end of the step before to the end of this one.
        compute: what the compute lane was busy for.
        exposed: what it waited for messages along each axis.
    """

    step: float
    compute: float
    exposed: Mapping[str, float]

    @property
    def host(self) -> float:
        """When compute had neither work nor a message to wait for: the host issued it too late."""
        return max(self.step - self.compute - sum(self.exposed.values()), 0.0)

    @property
    def exposed_sum(self) -> float:
        """What compute waited for messages, in all."""
        return sum(self.exposed.values())

    def shares(self) -> dict[str, float]:
        """Fractions of the step, by what it was spent on."""
        waits = {f"{axis} link": seconds for axis, seconds in self.exposed.items()}
        parts = {"compute": self.compute, **waits, "host": self.host}
        return {name: seconds / self.step for name, seconds in parts.items()}


@dataclass(frozen=True)
class Outcome:
    """One candidate, tried.

    Attributes:
        candidate: which.
        memory: bytes by kind (``KINDS``) at the moment when most is held; without "activations"
            where they are unknown.
        sent: bytes that a rank sends in a step, by axis.
        lacking: bytes that it needs beyond what there is, of what is known.
        items: tokens, or samples, of a step on all ranks.
        times: None: unknown.
    """

    candidate: Candidate
    memory: Mapping[str, int]
    sent: Mapping[str, float]
    lacking: float
    items: int = 0
    times: Times | None = None

    @classmethod
    def of_simulation(
        cls, candidate: Candidate, found: Simulation, items: int, memory: float
    ) -> Outcome:
        """What a simulation found, without its timeline."""
        exposed = dict.fromkeys(AXES[: len(candidate.mesh)], 0.0)
        for each in found.exposed:
            exposed[axis_of(each.lane)] += each.seconds
        return cls(
            candidate,
            found.memory,
            found.sent_bytes,
            max(found.peak_bytes - memory, 0.0),
            items,
            Times(found.seconds, found.compute_seconds, exposed),
        )

    @classmethod
    def of_estimate(cls, candidate: Candidate, found: Estimate, memory: float) -> Outcome:
        """What formulas say: everything but activations and time."""
        held = {
            "weights": found.weight_bytes,
            "gradients": found.grad_bytes,
            "optimizer": found.optimizer_bytes,
            "transient": found.full_bytes + found.staging_bytes,
        }
        sent = {"inner": found.inner_traffic_bytes, "outer": found.outer_traffic_bytes}
        lacking = max(sum(held.values()) - memory, 0.0)
        return cls(candidate, held, {axis: n for axis, n in sent.items() if n}, lacking)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Outcome:
        """Of what ``dataclasses.asdict`` made."""
        values = dict(content)
        candidate = dict(values.pop("candidate"))
        candidate["mesh"] = tuple(candidate["mesh"])
        times = values.pop("times")
        times = None if times is None else Times(**times)
        found = cls(Candidate(**candidate), **values, times=times)
        found.check()
        return found

    def check(self) -> None:
        """Of what was read from a file.

        Raises:
            TypeError: a value of another type.
            ValueError: a strategy that is none.
        """
        candidate = self.candidate
        Strategy.from_names(candidate.strategy, candidate.outer_strategy)
        numbers = [self.lacking, self.items, *candidate.mesh, *self.memory.values()]
        numbers += self.sent.values()
        if self.times is not None:
            numbers += [self.times.step, self.times.compute, *self.times.exposed.values()]
        if not all(isinstance(each, int | float) for each in numbers):
            raise TypeError(f"expected numbers; found {numbers}")

    @property
    def fits(self) -> bool | None:
        """Whether it needs no more than there is. None: unknown, since activations are, and what
        else it holds fits."""
        if self.lacking:
            return False
        return True if ACTIVATIONS in self.memory else None

    @property
    def peak_bytes(self) -> int:
        """Most that is held at one moment, of what is known."""
        return sum(self.memory.values())

    @property
    def largest_kind(self) -> str:
        """What most of the memory is for."""
        return max(self.memory, key=lambda kind: self.memory[kind])

    @property
    def rate(self) -> float:
        """Tokens, or samples, a second on all ranks; where times are unknown, the fewer bytes are
        sent, the more."""
        if self.times is None:
            return -sum(self.sent.values())
        return self.items / self.times.step


@dataclass(frozen=True)
class Trial:
    """The chosen candidate with something changed.

    Attributes:
        change: what, in words.
        speedup: its rate over the chosen one's.
        lacking: bytes that it needs beyond what there is.
    """

    change: str
    speedup: float
    lacking: float


def sorted_outcomes(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Those that lack nothing, as far as is known, the fastest first, of equally fast ones the
    smallest; then the others, by what they lack."""
    found = list(outcomes)
    fastest = max(found, key=lambda each: each.rate)
    # Within a thousandth rates are equal.
    step = abs(fastest.rate) / 1000 or 1.0
    return tuple(
        sorted(found, key=lambda each: (each.lacking, -round(each.rate / step), each.peak_bytes))
    )


def is_faster(outcome: Outcome, other: Outcome) -> bool:
    """Whether it is, by more than what :func:`sorted_outcomes` takes for equal."""
    return outcome.rate - other.rate > 2 * abs(other.rate) / 1000
