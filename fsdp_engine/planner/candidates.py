"""Candidates of a plan: ranks, strategy, activations, microbatch size, offload."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_engine.kernel_interface import Strategy, allocator, find_module
from fsdp_engine.planner.option_values import OFFLOAD, SELECTIVE
from fsdp_engine.planner.simulation.simulation_error import check_sizes, listed
from fsdp_engine.planner.state_places import KIND_OF_OFFLOADED, StatePlaces

Mesh = tuple[int, ...]
# How blocks' activations are kept or recomputed: see :class:`Candidate`.
Activations = Any


@dataclass(frozen=True)
class Candidate:
    """One configuration of a job.

    Attributes:
        mesh: Number of ranks that parameters are sharded over on each axis, (inner,) or (outer,
            inner).
        strategy, outer_strategy: Names of the sharding levels of the inner and the outer axis.
        checkpointing: How blocks' activations are kept. False: on the device. True: recomputed in
            backward. "selective" or an ``fe.Recompute``: some of them are recomputed. "offload": on
            the host until backward.
        microbatch_size: The argument of the batch function; None: the batch has one size.
        offload: Places of state between its uses; None: all state is on the device.
        microbatches: Number of microbatches of a step; None: the number of the job.
        sequence: Sequence length, for the batch function; None: the batch has one length.
        tensor_parallel: Number of consecutive ranks that share the model's matrices. Each position
            in ``mesh`` is a group of this many ranks.
        context_parallel: Number of consecutive ranks of the inner axis that share each sequence.
        pipeline: Number of ranks in a pipeline. The ranks that hold the same stages form a
            ``mesh``.
        schedule: The schedule of the pipeline, by torch's name; None: there is no pipeline.
    """

    mesh: Mesh
    strategy: str
    outer_strategy: str
    checkpointing: Activations
    microbatch_size: int | None = None
    offload: StatePlaces | None = None
    microbatches: int | None = None
    sequence: int | None = None
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline: int = 1
    schedule: str | None = None

    @property
    def data_parallel(self) -> int:
        """Number of ranks of ``mesh``, including context-parallel ranks."""
        return math.prod(self.mesh)

    @property
    def num_batches(self) -> int:
        """Number of batches that run at the same time, one for each context-parallel group."""
        return self.data_parallel // self.context_parallel

    @property
    def is_data_parallel(self) -> bool:
        """Whether there is no tensor, context or pipeline parallelism."""
        return self.tensor_parallel == self.context_parallel == self.pipeline == 1

    @property
    def degrees(self) -> tuple[int, int, int, str | None]:
        """The degrees of tensor, context and pipeline parallelism, and the schedule."""
        return self.tensor_parallel, self.context_parallel, self.pipeline, self.schedule

    @property
    def places(self) -> Mapping[str, str]:
        """Places of state other than the device, by role."""
        return {} if self.offload is None else self.offload.places

    @property
    def offloaded(self) -> str:
        """Offloads as text, such as "optimizer state on the host, activations on the host"; empty
        if all state and activations are on the device."""
        offload, names = self.offload or StatePlaces(), dict[str, list[str]]()
        number = len(KIND_OF_OFFLOADED)
        for role, place in offload.places.items():
            names.setdefault(place, []).append(role.replace("_", " "))
        texts = [
            f"{'everything' if len(each) == number else ' and '.join(each)} on the {place}"
            for place, each in names.items()
        ]
        texts += ["updated by the host"] * (offload.step_on == allocator.HOST)
        texts += ["updated during the next forward"] * offload.overlap_forward
        return ", ".join([*texts, *["activations on the host"] * (self.checkpointing == OFFLOAD)])

    @property
    def recomputes(self) -> bool:
        """Whether the forward of blocks, or parts of it, runs again in backward."""
        return recomputed_by(self.checkpointing) is not None

    @property
    def recomputed(self) -> str:
        """Text for the recomputed forwards: "no", "blocks", "selective", "by a policy", or for
        example "blocks, every 2nd"."""
        found = recomputed_by(self.checkpointing)
        if found is None:
            return "no"
        names: dict[Any, str] = {None: "blocks", SELECTIVE: SELECTIVE}
        every = "" if found.every == 1 else f", every {ordinal(found.every)}"
        return names.get(found.policy, "by a policy") + every

    @property
    def has_own_policy(self) -> bool:
        """Whether a function or a list of operations, given by the user, selects the recomputed
        operations. Such a candidate cannot be saved to a file."""
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
        """The ranks as text: "1024", "128 x 8" (outer x inner), or "16 x 4, CP 4, TP 8, PP 2" with
        other parallelism."""
        context = "" if self.context_parallel == 1 else f", CP {self.context_parallel}"
        tensor = "" if self.tensor_parallel == 1 else f", TP {self.tensor_parallel}"
        pipeline = "" if self.pipeline == 1 else f", PP {self.pipeline}"
        return self._mesh_text + context + tensor + pipeline

    @property
    def _mesh_text(self) -> str:
        return " x ".join(map(str, self.mesh))

    def __str__(self) -> str:
        parts = [f"{self.levels} on {self._mesh_text} ranks"]
        if self.context_parallel > 1:
            parts[0] += f" in context-parallel groups of {self.context_parallel}"
        if self.tensor_parallel > 1:
            parts.append(f"tensor parallelism over {self.tensor_parallel} ranks")
        if self.pipeline > 1:
            parts.append(f"a pipeline of {self.pipeline} ranks ({self.schedule})")
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


def recomputed_by(checkpointing: Activations) -> Any:
    """Returns the ``fe.Recompute`` that the value selects; None if nothing is recomputed."""
    activations = find_module("activations")
    return activations and activations.Recompute.of(checkpointing)


def activations_of(given: Iterable[object] | None) -> Activations:
    """Returns the value of ``checkpointing`` that has the effect of the given extensions; None if
    no extension recomputes or offloads activations."""
    activations = find_module("activations")
    for each in given or () if activations is not None else ():
        if isinstance(each, activations.Recompute):
            return each
        if isinstance(each, activations.OffloadActivations):
            return OFFLOAD
    return None


def merged_extensions(candidate: Candidate, given: Iterable[object] | None) -> list[object]:
    """Returns the given extensions, and those of ``candidate`` whose kind is not given."""
    known = [*(given or ())]
    own: list[object] = [] if candidate.offload is None else [candidate.offload]
    if candidate.checkpointing and (activations := find_module("activations")) is not None:
        by_argument = (activations.OffloadActivations, activations.Recompute)
        if not any(isinstance(each, by_argument) for each in known):
            own += activations.from_argument(candidate.checkpointing)
    kinds = {type(each) for each in known}
    return [*known, *(each for each in own if type(each) not in kinds)]


def check_checkpointing(value: object) -> None:
    """Check a value of ``checkpointing``.

    Raises:
        TypeError: ``value`` is not a bool, "selective", "offload" or an ``fe.Recompute``.
        ValueError: The package lacks the extension ``activations``.
    """
    if value is not False:
        find_module("activations", needed_by="checkpointing")
    if not (isinstance(value, bool) or value == OFFLOAD or recomputed_by(value) is not None):
        raise TypeError(
            f"checkpointing: expected True, False, {SELECTIVE!r}, {OFFLOAD!r} or fe.Recompute, "
            f"or several of them in a tuple; found {value!r}"
        )


def ordinal(number: int) -> str:
    """Returns an ordinal number such as "2nd"."""
    endings = {1: "st", 2: "nd", 3: "rd"}
    is_teen = number % 100 // 10 == 1
    return f"{number}{'th' if is_teen else endings.get(number % 10, 'th')}"


def fitting_meshes(num_ranks: int, ranks_per_node: int) -> list[Mesh]:
    """Returns a mesh of one axis, and nodes x ranks per node if the ranks fill two or more
    nodes."""
    meshes: list[Mesh] = [(num_ranks,)]
    if 1 < ranks_per_node < num_ranks and num_ranks % ranks_per_node == 0:
        meshes.append((num_ranks // ranks_per_node, ranks_per_node))
    return meshes


def check_meshes(meshes: Iterable[Sequence[int]], allowed: Sequence[int]) -> list[Mesh]:
    """Returns the user's meshes as tuples, without duplicates.

    Args:
        meshes: The user's meshes.
        allowed: Allowed numbers of data-parallel ranks.

    Raises:
        ValueError: A mesh has a wrong number of ranks, or has neither one nor two axes.
    """
    expected = f"one or two sizes of {' or '.join(map(str, allowed))} ranks each"
    found = [tuple(listed("meshes", mesh, expected)) for mesh in listed("meshes", meshes, expected)]
    for mesh in found:
        check_sizes("meshes", mesh, expected)
        if len(mesh) not in (1, 2) or math.prod(mesh) not in allowed or min(mesh) < 1:
            raise ValueError(f"meshes: expected {expected}; found {mesh}")
    return list(dict.fromkeys(found))


def candidates(
    meshes: Iterable[Mesh],
    like: Candidate,
    checkpointing: Sequence[Activations],
    microbatch_sizes: Sequence[int | None],
    sequences: Sequence[int | None],
) -> Iterator[Candidate]:
    """Yields a candidate for each combination of the values and of the levels: four levels on one
    axis, ten pairs on two axes. The other fields are those of ``like``."""
    every = itertools.product(sequences, microbatch_sizes, checkpointing, meshes)
    for sequence, size, recompute, mesh in every:
        for pair in Strategy.all_on(len(mesh)):
            yield replace(
                like,
                mesh=mesh,
                strategy=pair.inner.name,
                outer_strategy=pair.outer.name,
                checkpointing=recompute,
                microbatch_size=size,
                sequence=sequence,
            )


# Pairs of levels that a quick plan tries, in this order: parameters sharded over all ranks, or over
# the ranks of a node (HSDP); the same with optimizer state sharded between nodes; ZeRO-1; DDP.
_QUICK = (
    ("optim_grads_params", "no_shard"),
    ("optim_grads_params", "optim"),
    ("optim", "no_shard"),
    ("no_shard", "no_shard"),
)


def quick_candidates(every: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates that a quick plan tries, in the order in which it tries them. Levels
    that save the most memory are first, since they fit most often. Each level is tried with all
    degrees of context, tensor and pipeline parallelism. ZeRO-1 and DDP are tried on one axis."""

    def rank(each: Candidate) -> tuple[int, ...]:
        pair = _QUICK.index((each.strategy, each.outer_strategy))
        kept = 2 if each.checkpointing is False else int(each.checkpointing is not True)
        degrees = each.pipeline, each.context_parallel, each.tensor_parallel
        return len(each.mesh) if pair < 2 else 2 + pair, pair, kept, *degrees

    return sorted(filter(is_quick, every), key=rank)


def is_quick(candidate: Candidate) -> bool:
    """Returns whether a quick plan tries the candidate."""
    is_one_axis = len(candidate.mesh) == 1
    is_known = (candidate.strategy, candidate.outer_strategy) in _QUICK
    return is_known and (is_one_axis or candidate.strategy == _QUICK[0][0])
