"""Results of candidates: memory by kind, times and bytes sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fsdp_engine.kernel_interface import Strategy, find_module, lanes
from fsdp_engine.planner.candidates import Candidate, check_checkpointing
from fsdp_engine.planner.estimates import Estimate
from fsdp_engine.planner.simulation.clock import StepPart, axis_of
from fsdp_engine.planner.simulation.memory_tracker import KINDS
from fsdp_engine.planner.simulation.records import combined
from fsdp_engine.planner.simulation.simulate import Simulation
from fsdp_engine.planner.simulation.stage_messages import is_stage_lane
from fsdp_engine.planner.state_places import make_offload

if TYPE_CHECKING:  # this import loads torch's compiler
    from fsdp_engine.planner.simulation.pipeline import PipelineSimulation

# Default memory limit as a fraction of the machine's memory. The rest is for the driver's context,
# buffers of NCCL and kernels, and fragmentation of the allocator (docs/internals/planner.md).
USABLE = 0.9


ACTIVATIONS = KINDS[-1]
AXES = ("inner", "outer")
# Name of the axis of the ranks that share the model's matrices.
TENSOR = "tensor"
# Name of the axis of the ranks that share sequences.
CONTEXT = "context"
# Keys of exposed times besides axes: waits for copies of offloaded state, and for other stages of a
# pipeline. Waits for copies of activations have the key ACTIVATIONS.
STATE = "state"
PIPELINE = "pipeline"
# Names of the waits that are not for a link, in the breakdown of a step's time.
_OTHER_WAITS = {STATE: "state copies", ACTIVATIONS: "activation copies", PIPELINE: "other stages"}


def part_waiting_for(lane: str, candidate: Candidate) -> str:
    """Returns the name of the part of a step's time in which compute waits for a lane, as in
    :meth:`Times.parts`: "inner link", "state copies", ..."""
    what = _waits_for(lane, candidate)
    return _OTHER_WAITS.get(what, f"{what} link")


def _exposed_by_axis(candidate: Candidate, by_lane: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds that compute waits for each axis and each kind of copy."""
    exposed = dict.fromkeys(AXES[: len(candidate.mesh)], 0.0)
    for lane, seconds in by_lane.items():
        what = _waits_for(lane, candidate)
        exposed[what] = exposed.get(what, 0.0) + seconds
    return exposed


def _waits_for(lane: str, candidate: Candidate) -> str:
    """Returns the axis of a lane, or the kind of its copies."""
    brings_weights = "main_weights" in candidate.places
    if is_stage_lane(lane):
        return PIPELINE
    if lane == lanes.COPY_IN and brings_weights:
        return STATE
    return axis_of(lane)  # for a lane of copies: "state" or "activations"


@dataclass(frozen=True)
class Setting:
    """The planned job.

    Attributes:
        model: Name of the model's class.
        num_elements: Number of parameter elements in the model.
        machine: Name of the machine.
        world_size: Number of ranks of the job.
        ranks_per_node: Number of consecutive ranks that share a node.
        memory: Memory limit of a rank in bytes.
        item: Unit of batch sizes: "tokens" or "samples".
        microbatches: Number of microbatches per step.
        why_unknown: The reason why activations and times, and therefore whether a candidate fits,
            are unknown. Empty: they are known.
        machine_memory: Memory of a rank's device in bytes; 0: unknown.
        machine_family: The family of machines whose time accuracy is stated
            (:func:`~fsdp_engine.planner.simulation.time_accuracy.accuracy_of`); empty: unknown.
        global_batch: Tokens or samples of a step on all ranks, if microbatch sizes were searched
            for this batch; otherwise 0.
        is_quick: Whether only the candidates of a quick plan were tried.
        is_compiled: Whether blocks are compiled by ``block.compile()``, which the user must call,
            since ``fe.shard`` does not.
        more_degrees: Whether tensor parallelism was not tried, although the model has a plan for
            it.
        more_contexts: Whether context parallelism was not tried, although the machine can run it.
        dtype: The dtype in which most elements compute, such as "bfloat16"; empty: unknown.
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
    machine_memory: float = 0.0
    machine_family: str = ""
    global_batch: int = 0
    is_quick: bool = False
    is_compiled: bool = False
    more_degrees: bool = False
    more_contexts: bool = False
    dtype: str = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            kinds: dict[str, Any] = {"int": int, "float": int | float, "bool": bool}
            kind = kinds.get(str(each.type), str)
            value = getattr(self, each.name)
            if not isinstance(value, kind):
                raise TypeError(f"{each.name}: expected {each.type}; found {value!r}")


@dataclass(frozen=True)
class Times:
    """Breakdown of one rank's step time in seconds.

    Attributes:
        step: Seconds from the end of the previous step to the end of this one.
        compute: Busy time of the compute lane.
        exposed: Time in which compute waited, by cause: communication along an axis ("inner",
            "outer", "context", "tensor"), copies of offloaded state ("state") and of activations
            ("activations"), and other stages of a pipeline ("pipeline").
        at_peak: Time that the model's flops, without recomputation, take at the machine's peak.
    """

    step: float
    compute: float
    exposed: Mapping[str, float]
    at_peak: float = 0.0

    @property
    def mfu(self) -> float:
        """Model flops utilization: see [Note: Model flops] in ``simulation/operations.py``."""
        return self.at_peak / self.step

    @property
    def host(self) -> float:
        """Time in which compute was idle because the host had not issued the work yet: the step
        without compute and without ``exposed``."""
        return max(self.step - self.compute - sum(self.exposed.values()), 0.0)

    @property
    def exposed_sum(self) -> float:
        """Total time in which compute waited: the sum of ``exposed``."""
        return sum(self.exposed.values())

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the step: "compute", "inner link", "outer link", "context link",
        "tensor link", "state copies", "activation copies", "other stages", "host"."""
        waits = {
            _OTHER_WAITS.get(what, f"{what} link"): seconds
            for what, seconds in self.exposed.items()
        }
        return {"compute": self.compute, **waits, "host": self.host}

    def shares(self) -> dict[str, float]:
        """Returns the parts as fractions of the step time."""
        return {name: seconds / self.step for name, seconds in self.parts().items()}


@dataclass(frozen=True)
class Outcome:
    """The result of one candidate.

    Attributes:
        candidate: The candidate.
        memory: Bytes by kind (``KINDS``) at the peak; without "activations" if they are unknown.
            For a pipeline this is the memory of the rank with the highest peak; times, bytes sent
            and flops are means over its ranks.
        sent: Bytes that a rank sends per step, by axis.
        lacking: Bytes by which the known memory exceeds the limit; 0 if it does not.
        items: Tokens or samples per step on all ranks.
        times: Breakdown of the step time; None if it is unknown.
        elsewhere: Bytes of offloaded state and activations by place ("host", "disk"). ``memory``
            does not include them.
        model_flops: Floating-point operations per step on one rank, without recomputation.
        checkpoint_bytes: Bytes of all parameters and their optimizer state.
    """

    candidate: Candidate
    memory: Mapping[str, int]
    sent: Mapping[str, float]
    lacking: float
    items: int = 0
    times: Times | None = None
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    model_flops: float = 0.0
    checkpoint_bytes: int = 0

    @classmethod
    def of_simulation(
        cls, candidate: Candidate, found: Simulation, items: int, memory: float, more: int = 0
    ) -> Outcome:
        """Returns the outcome of a simulation, without the timeline.

        Args:
            candidate: The candidate.
            found: The simulation.
            items: Tokens or samples of a step on all ranks.
            memory: The memory limit in bytes.
            more: Number of microbatches of a step beyond the three that were simulated.
        """
        part = found.part
        if found.further is not None:
            part = combined(lambda simulated, each: simulated + more * each, part, found.further)
        return cls._of_part(candidate, part, found, items, memory, found.checkpoint_bytes)

    @classmethod
    def of_pipeline(
        cls, candidate: Candidate, found: PipelineSimulation, items: int, memory: float
    ) -> Outcome:
        """Returns the outcome of a simulated pipeline; see :meth:`of_simulation`."""
        mean = combined(lambda *ranks: fmean(ranks), *(rank.part for rank in found.ranks))
        part = replace(mean, seconds=found.seconds)
        fullest = max(found.ranks, key=lambda rank: rank.peak_bytes)
        num_bytes = sum(rank.checkpoint_bytes for rank in found.ranks)
        return cls._of_part(candidate, part, fullest, items, memory, num_bytes)

    @classmethod
    def _of_part(
        cls,
        candidate: Candidate,
        part: StepPart,
        fullest: Simulation,
        items: int,
        memory: float,
        checkpoint_bytes: int,
    ) -> Outcome:
        """Returns the outcome of a step, with the memory of the rank that has the highest peak."""
        exposed = _exposed_by_axis(candidate, part.exposed_by_lane)
        return cls(
            candidate,
            fullest.memory,
            part.sent_bytes,
            max(fullest.peak_bytes - memory, 0.0),
            items,
            Times(part.seconds, part.compute_seconds, exposed, part.seconds_at_peak),
            fullest.elsewhere,
            part.model_flops,
            checkpoint_bytes,
        )

    @classmethod
    def of_estimate(cls, candidate: Candidate, found: Estimate, memory: float) -> Outcome:
        """Returns the outcome of formulas, without activations and times."""
        held = {
            "weights": found.weight_bytes,
            "gradients": found.grad_bytes,
            "optimizer": found.optimizer_bytes,
            "transient": found.full_bytes + found.staging_bytes,
        }
        sent = {"inner": found.inner_traffic_bytes, "outer": found.outer_traffic_bytes}
        lacking = max(sum(held.values()) - memory, 0.0)
        sent = {axis: n for axis, n in sent.items() if n}
        return cls(candidate, held, sent, lacking, elsewhere=found.elsewhere)

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Outcome:
        """Returns the outcome from a dict that ``dataclasses.asdict`` made of an outcome.

        Raises:
            KeyError, TypeError, ValueError: The dict does not describe an outcome.
        """
        values = dict(content)
        candidate = dict(values.pop("candidate"))
        candidate["mesh"] = tuple(candidate["mesh"])
        if candidate.get("offload") is not None:
            candidate["offload"] = make_offload(**candidate["offload"])
        if isinstance(candidate.get("checkpointing"), dict):
            candidate["checkpointing"] = find_module("activations").Recompute(
                **candidate["checkpointing"]
            )
        times = values.pop("times")
        times = None if times is None else Times(**times)
        found = cls(Candidate(**candidate), **values, times=times)
        found.check()
        return found

    def check(self) -> None:
        """Check values that were read from a file.

        Raises:
            TypeError: A value has a wrong type.
            ValueError: The strategy is unknown.
        """
        candidate = self.candidate
        check_checkpointing(candidate.checkpointing)
        Strategy.from_names(candidate.strategy, candidate.outer_strategy)
        numbers = [self.lacking, self.items, *candidate.mesh, *self.memory.values()]
        numbers += [candidate.tensor_parallel, candidate.context_parallel, candidate.pipeline]
        numbers += [*self.sent.values(), *self.elsewhere.values()]
        numbers += [self.model_flops, self.checkpoint_bytes]
        sizes = (candidate.microbatches, candidate.microbatch_size, candidate.sequence)
        numbers += [each for each in sizes if each is not None]
        if self.times is not None:
            numbers += [self.times.step, self.times.compute, *self.times.exposed.values()]
            numbers.append(self.times.at_peak)
        if wrong := [each for each in numbers if not isinstance(each, int | float)]:
            raise TypeError(f"expected numbers; found {wrong}")

    @property
    def fits(self) -> bool | None:
        """Whether the candidate is within the memory limit. None: unknown, because activations are
        unknown and the other memory fits."""
        if self.lacking:
            return False
        return True if ACTIVATIONS in self.memory else None

    @property
    def peak_bytes(self) -> int:
        """Peak of the known memory in bytes."""
        return sum(self.memory.values())

    @property
    def largest_kind(self) -> str:
        """The kind of memory with the most bytes at the peak."""
        return max(self.memory, key=lambda kind: self.memory[kind])

    @property
    def rate(self) -> float:
        """Tokens or samples per second on all ranks. If times are unknown, this is minus the bytes
        sent per step, so that candidates that send fewer bytes are sorted first."""
        if self.times is None:
            return -sum(self.sent.values())
        return self.items / self.times.step


@dataclass(frozen=True)
class Trial:
    """A variation of the chosen candidate.

    Attributes:
        change: Text that describes the change.
        speedup: Ratio of the variation's rate to the chosen candidate's rate.
        lacking: Bytes by which the variation's memory exceeds the limit.
    """

    change: str
    speedup: float
    lacking: float

    def check(self) -> None:
        """Check values that were read from a file.

        Raises:
            TypeError: A value is not a number.
        """
        for each in (self.speedup, self.lacking):
            if not isinstance(each, int | float):
                raise TypeError(f"expected a number in a trial; found {each!r}")


# Rates are rounded before they are compared, to multiples of the fastest rate / `_RATE_STEPS`.
_RATE_STEPS = 1000
# `is_faster` ignores differences up to this fraction, twice the rounding of the fastest rate.
TOLERANCE = 2 / _RATE_STEPS


def sorted_outcomes(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Sort outcomes. Candidates whose known memory is within the limit are first, ordered by rate
    and then by peak memory. The others follow, ordered by the bytes that exceed the limit."""
    found = list(outcomes)
    fastest = max(found, key=lambda each: each.rate)
    step = abs(fastest.rate) / _RATE_STEPS or 1.0
    return tuple(
        sorted(found, key=lambda each: (each.lacking, -round(each.rate / step), each.peak_bytes))
    )


def is_faster(outcome: Outcome, other: Outcome) -> bool:
    """Returns whether the rate of ``outcome`` is higher by more than the tolerance of
    :func:`sorted_outcomes`."""
    return outcome.rate - other.rate > TOLERANCE * abs(other.rate)
