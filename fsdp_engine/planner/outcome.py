"""Candidates (mesh, strategy, activations, microbatch size, offload), and their
outcomes: memory by kind, time, bytes sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fsdp_engine.comm.lanes import ACTIVATION_LANES, COPY_IN, STATE_LANES
from fsdp_engine.offload import HOST, ROLES, Offload
from fsdp_engine.planner.estimates import Estimate
from fsdp_engine.runtime.activations import OFFLOAD, Activations
from fsdp_engine.simulation.clock import axis_of
from fsdp_engine.simulation.memory_tracker import KINDS
from fsdp_engine.simulation.simulate import Simulation
from fsdp_engine.simulation.simulation_error import check_sizes, listed
from fsdp_engine.strategies import ALL_STRATEGIES, Axis, Role, Strategy
from fsdp_engine.units.checkpointing import SELECTIVE, Checkpointing, recomputed_by

Mesh = tuple[int, ...]

# Kinds of memory that are taken off the device, by role of an offload.
KIND_OF_OFFLOADED = {
    "optimizer_state": "optimizer",
    "main_weights": "weights",
    "gradients": "gradients",
}


# Default memory limit as a fraction of the machine's memory. The driver's context, buffers of NCCL
# and kernels, and fragmentation of the allocator take the rest (docs/planner.md).
USABLE = 0.9


@dataclass(frozen=True)
class Candidate:
    """One configuration of a job.

    Attributes:
        mesh: ranks on each axis, (inner,) or (outer, inner).
        strategy, outer_strategy: names of the levels.
        checkpointing: blocks' activations are recomputed in backward; "selective" or a
            :class:`~fsdp_engine.Checkpointing`: some of them; "offload": they are on the host until
            then.
        microbatch_size: the argument of the batch function; None: the batch has one size.
        offload: where state lies between its uses; None: on the device.
        microbatches: of a step; None: those of the job.
        sequence: length of sequences, for the batch function; None: the batch has one.
    """

    mesh: Mesh
    strategy: str
    outer_strategy: str
    checkpointing: Activations
    microbatch_size: int | None = None
    offload: Offload | None = None
    microbatches: int | None = None
    sequence: int | None = None

    @property
    def offloaded(self) -> str:
        """Offloads as text: "optimizer state on the host", "everything on the host", "activations
        on the host"; empty if all is on the device."""
        offload, names = self.offload or Offload(), dict[str, list[str]]()
        for role, place in offload.places.items():
            names.setdefault(place, []).append(role.replace("_", " "))
        texts = [
            f"{'everything' if len(each) == len(ROLES) else ' and '.join(each)} on the {place}"
            for place, each in names.items()
        ]
        texts += ["stepped there"] * (offload.step_on == HOST)
        texts += ["stepped beside forward"] * offload.overlap_forward
        return ", ".join([*texts, *["activations on the host"] * (self.checkpointing == OFFLOAD)])

    @property
    def recomputes(self) -> bool:
        """Whether the forward of blocks, or parts of it, runs again in backward."""
        return recomputed_by(self.checkpointing) is not None

    @property
    def recomputed(self) -> str:
        """What backward runs again, as text: "no", "blocks", "selective", "blocks, every 2nd"."""
        found = recomputed_by(self.checkpointing)
        if found is None:
            return "no"
        names: dict[Any, str] = {None: "blocks", SELECTIVE: SELECTIVE}
        every = "" if found.every == 1 else f", every {ordinal(found.every)}"
        return names.get(found.policy, "by a policy") + every

    @property
    def has_own_policy(self) -> bool:
        """Whether a function or operations of the user decide which operations run again, so that a
        file cannot contain the candidate."""
        found = recomputed_by(self.checkpointing)
        return found is not None and found.policy not in (None, SELECTIVE)

    @property
    def levels(self) -> str:
        """The strategy as text: "optim", or "optim_grads_params + optim" on two axes."""
        if len(self.mesh) == 1:
            return self.strategy
        return f"{self.strategy} + {self.outer_strategy}"

    @property
    def ranks(self) -> str:
        """The mesh as text: "1024", or "128 x 8" (outer x inner)."""
        return " x ".join(map(str, self.mesh))

    def __str__(self) -> str:
        parts = [f"{self.levels} on {self.ranks} ranks"]
        if self.microbatch_size is not None:
            count = "" if self.microbatches is None else f"{self.microbatches} "
            parts.append(f"{count}microbatch{'es' * (count != '1 ')} of {self.microbatch_size}")
        if self.sequence is not None:
            parts.append(f"sequences of {self.sequence:,}")
        kind = self.recomputed
        kinds = {"no": "no checkpointing", "blocks": "activation checkpointing"}
        parts.append(kinds.get(kind, f"activation checkpointing ({kind})"))
        if self.offloaded:
            parts.append(self.offloaded)
        return ", ".join(parts)


def check_checkpointing(value: object) -> None:
    """Check how a candidate treats activations.

    Raises:
        TypeError: ``value`` is no bool, "selective", "offload" or :class:`Checkpointing`.
    """
    if not (isinstance(value, bool) or value == OFFLOAD or recomputed_by(value) is not None):
        raise TypeError(
            f"checkpointing: expected True, False, {SELECTIVE!r}, {OFFLOAD!r} or fe.Checkpointing, "
            f"or several of them in a tuple; found {value!r}"
        )


def ordinal(number: int) -> str:
    """ "2nd"."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 // 10 == 1
    return f"{number}{'th' if is_teen else endings.get(number % 10, 'th')}"


def fitting_meshes(world_size: int, ranks_per_node: int) -> list[Mesh]:
    """One axis; also nodes x ranks per node if the ranks fill two or more nodes."""
    meshes: list[Mesh] = [(world_size,)]
    if 1 < ranks_per_node < world_size and world_size % ranks_per_node == 0:
        meshes.append((world_size // ranks_per_node, ranks_per_node))
    return meshes


def check_meshes(meshes: Iterable[Sequence[int]], world_size: int) -> list[Mesh]:
    """Returns the user's meshes as tuples.

    Raises:
        ValueError: a mesh does not have ``world_size`` ranks, or has neither one nor two axes.
    """
    expected = f"one or two sizes of {world_size} ranks each"
    found = [tuple(listed("meshes", mesh, expected)) for mesh in listed("meshes", meshes, expected)]
    for mesh in found:
        check_sizes("meshes", mesh, expected)
        if len(mesh) not in (1, 2) or math.prod(mesh) != world_size or min(mesh) < 1:
            raise ValueError(f"meshes: expected {expected}; found {mesh}")
    return found


def candidates(
    meshes: Iterable[Mesh],
    checkpointing: Iterable[Activations],
    microbatch_sizes: Iterable[int | None],
    offload: Offload | None = None,
    sequences: Iterable[int | None] = (None,),
) -> Iterator[Candidate]:
    """Every combination: four levels on one axis, ten pairs on two."""
    every = itertools.product(sequences, microbatch_sizes, checkpointing, meshes)
    for sequence, size, recompute, mesh in every:
        for pair in _pairs(mesh):
            yield Candidate(
                mesh,
                pair.inner.name,
                pair.outer.name,
                recompute,
                size,
                offload,
                sequence=sequence,
            )


# Pairs of levels that a quick plan tries, in this order: parameters sharded over all ranks, or over
# the ranks of a node (HSDP), also with optimizer state sharded between nodes; and ZeRO-1 and DDP.
_QUICK = (
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
    ("optim", "no_shard"),
    ("no_shard", "no_shard"),
)


def quick_candidates(every: Iterable[Candidate]) -> list[Candidate]:
    """The candidates of a quick plan, in its order: those that save the most memory first, as they
    fit most often. ZeRO-1 and DDP are tried on one axis."""

    def rank(each: Candidate) -> tuple[int, int, int]:
        pair = _QUICK.index((each.strategy, each.outer_strategy))
        kept = 2 if each.checkpointing is False else int(each.checkpointing is not True)
        return len(each.mesh) if pair < 2 else 2 + pair, pair, kept

    quick = [
        each
        for each in every
        if (each.strategy, each.outer_strategy) in _QUICK
        and (each.strategy == _QUICK[0][0] or len(each.mesh) == 1)
    ]
    return sorted(quick, key=rank)


def _pairs(mesh: Mesh) -> list[Strategy]:
    return [s for s in ALL_STRATEGIES if len(mesh) == 2 or not s.shards(Role.OPTIM, Axis.OUTER)]


ACTIVATIONS = KINDS[-1]
AXES = ("inner", "outer")
# Among exposed times: compute waits for copies of offloaded state, or of activations.
STATE = "state"
# In which part of a step's time a wait is, if it is for no link.
_COPIES = {STATE: "state copies", ACTIVATIONS: "activation copies"}


def part_waiting_for(lane: str, candidate: Candidate) -> str:
    """The part of a step's time in which compute waits for a lane: "inner link", "state copies",
    ..., as in :meth:`Times.shares`."""
    what = _waits_for(lane, candidate)
    return _COPIES.get(what, f"{what} link")


def _waits_for(lane: str, candidate: Candidate) -> str:
    """The axis of a lane, or whose copies are on it."""
    offload = candidate.offload
    brings_weights = offload is not None and "main_weights" in offload.places
    if lane in ACTIVATION_LANES:
        return ACTIVATIONS
    if lane in STATE_LANES or (lane == COPY_IN and brings_weights):
        return STATE
    return axis_of(lane)


@dataclass(frozen=True)
class Setting:
    """The planned job.

    Attributes:
        model: name of the model's class.
        num_elements: parameter elements.
        machine: name of the machine.
        world_size: data-parallel ranks.
        ranks_per_node: consecutive ranks that share a node.
        memory: memory limit of a rank in bytes.
        item: unit of batch sizes: "tokens" or "samples".
        microbatches: per step.
        why_unknown: why activations and times, and therefore whether a candidate fits, are
            unknown. Empty: they are known.
        machine_memory: memory of a rank's device in bytes; 0: unknown.
        machine_family: whose accuracy of times is stated
            (:func:`~fsdp_engine.simulation.time_accuracy.accuracy_of`); empty: unknown.
        global_batch: tokens or samples of a step on all ranks, if microbatches were searched for
            it, else 0.
        is_quick: only the candidates of a quick plan were tried.
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
        step: from the end of the previous step to the end of this one.
        compute: busy time of the compute lane.
        exposed: time in which it waited for communication, by axis, and for copies of offloaded
            state ("state") and of activations ("activations").
        at_peak: the time that the model's flops, without recomputation, take at the machine's peak.
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
        """Time in which compute had no work and did not wait for communication, because the host
        had not issued the work yet."""
        return max(self.step - self.compute - sum(self.exposed.values()), 0.0)

    @property
    def exposed_sum(self) -> float:
        """Total time in which compute waited for communication and copies."""
        return sum(self.exposed.values())

    def shares(self) -> dict[str, float]:
        """Fractions of the step time: "compute", "inner link", "outer link", "state copies",
        "activation copies", "host"."""
        waits = {
            _COPIES.get(what, f"{what} link"): seconds for what, seconds in self.exposed.items()
        }
        parts = {"compute": self.compute, **waits, "host": self.host}
        return {name: seconds / self.step for name, seconds in parts.items()}


@dataclass(frozen=True)
class Outcome:
    """The result of one candidate.

    Attributes:
        candidate: the candidate.
        memory: bytes by kind (``KINDS``) at the peak; without "activations" if they are unknown.
        sent: bytes that a rank sends per step, by axis.
        lacking: bytes by which the known memory exceeds the limit; 0 if it does not.
        items: tokens or samples per step on all ranks.
        times: the step time; None if it is unknown.
        elsewhere: bytes of offloaded state and activations by place ("host", "disk"), beside
            ``memory``.
        model_flops: floating-point operations per step on one rank, without recomputation.
        checkpoint_bytes: bytes of all parameters and their optimizer state.
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
        cls, candidate: Candidate, found: Simulation, items: int, memory: float
    ) -> Outcome:
        """The result of a simulation, without its timeline."""
        exposed = dict.fromkeys(AXES[: len(candidate.mesh)], 0.0)
        for lane, seconds in found.exposed_by_lane.items():
            what = _waits_for(lane, candidate)
            exposed[what] = exposed.get(what, 0.0) + seconds
        return cls(
            candidate,
            found.memory,
            found.sent_bytes,
            max(found.peak_bytes - memory, 0.0),
            items,
            Times(found.seconds, found.compute_seconds, exposed, found.seconds_at_peak),
            found.elsewhere,
            found.model_flops,
            found.checkpoint_bytes,
        )

    @classmethod
    def of_estimate(cls, candidate: Candidate, found: Estimate, memory: float) -> Outcome:
        """The result of formulas, without activations and time."""
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
        """The inverse of ``dataclasses.asdict``."""
        values = dict(content)
        candidate = dict(values.pop("candidate"))
        candidate["mesh"] = tuple(candidate["mesh"])
        if candidate.get("offload") is not None:
            candidate["offload"] = Offload(**candidate["offload"])
        if isinstance(candidate.get("checkpointing"), dict):
            candidate["checkpointing"] = Checkpointing(**candidate["checkpointing"])
        times = values.pop("times")
        times = None if times is None else Times(**times)
        found = cls(Candidate(**candidate), **values, times=times)
        found.check()
        return found

    def check(self) -> None:
        """Check values that were read from a file.

        Raises:
            TypeError: a value has another type.
            ValueError: there is no such strategy.
        """
        candidate = self.candidate
        check_checkpointing(candidate.checkpointing)
        Strategy.from_names(candidate.strategy, candidate.outer_strategy)
        numbers = [self.lacking, self.items, *candidate.mesh, *self.memory.values()]
        numbers += [*self.sent.values(), *self.elsewhere.values()]
        numbers += [self.model_flops, self.checkpoint_bytes]
        numbers += [n for n in (candidate.microbatches, candidate.sequence) if n is not None]
        if self.times is not None:
            numbers += [self.times.step, self.times.compute, *self.times.exposed.values()]
            numbers.append(self.times.at_peak)
        if not all(isinstance(each, int | float) for each in numbers):
            raise TypeError(f"expected numbers; found {numbers}")

    @property
    def fits(self) -> bool | None:
        """Whether it is within the memory limit. None: unknown, because activations are unknown and
        the other memory fits."""
        if self.lacking:
            return False
        return True if ACTIVATIONS in self.memory else None

    @property
    def peak_bytes(self) -> int:
        """Peak of the known memory."""
        return sum(self.memory.values())

    @property
    def largest_kind(self) -> str:
        """The kind with the most bytes at the peak."""
        return max(self.memory, key=lambda kind: self.memory[kind])

    @property
    def rate(self) -> float:
        """Tokens or samples per second on all ranks. If times are unknown, minus the bytes sent."""
        if self.times is None:
            return -sum(self.sent.values())
        return self.items / self.times.step


@dataclass(frozen=True)
class Trial:
    """A variation of the chosen candidate.

    Attributes:
        change: the difference as text.
        speedup: ratio of its rate to the chosen candidate's.
        lacking: bytes by which its memory exceeds the limit.
    """

    change: str
    speedup: float
    lacking: float


def sorted_outcomes(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Sort outcomes: first those whose known memory is within the limit, by rate, then by peak
    memory; then the others by the bytes that exceed the limit."""
    found = list(outcomes)
    fastest = max(found, key=lambda each: each.rate)
    # Rates that differ by less than 0.1 % are considered equal.
    step = abs(fastest.rate) / 1000 or 1.0
    return tuple(
        sorted(found, key=lambda each: (each.lacking, -round(each.rate / step), each.peak_bytes))
    )


def is_faster(outcome: Outcome, other: Outcome) -> bool:
    """Whether the rate of ``outcome`` is higher by more than the tolerance of
    :func:`sorted_outcomes`."""
    return outcome.rate - other.rate > 2 * abs(other.rate) / 1000
