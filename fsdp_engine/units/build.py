"""Builds the buffers of units from a plan, after all ranks have agreed on the plan.

Units are built independently. They share :class:`Resources` (lanes, memory, numbers of
collectives), so they can be built one call at a time, and an engine can be created over them later.

Every rank checks its arguments, and all ranks agree, before anything is changed: an error on one
rank is raised on all ranks, and no rank waits for another.

Parameters have values on each rank, unless an extension gives them: :class:`InitialValues`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.buffers.param_and_grad_buffer import FIRST_TAG, ParamAndGradBuffer
from fsdp_engine.buffers.placement import Placement
from fsdp_engine.buffers.sharded_buffer import BufferContext, MeshCommunicators
from fsdp_engine.buffers.spec import BufferKind, BufferSpec
from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import broadcast_, gather_objects
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.options import Options
from fsdp_engine.strategies import Axis, Role
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.installing import install_where_complete, watch_reads
from fsdp_engine.units.plan import (
    AxisPlan,
    AxisPlans,
    Plan,
    PlannedUnit,
    PlanSettings,
    label_of,
)


@dataclass(frozen=True)
class EngineCommunicators:
    """Axis plans and communicators of an engine's buffers.

    Attributes:
        axis_plans: by kind of buffer.
        ranks: all ranks of the model, including those of other mesh dimensions, over which
            parameters can be DTensors.
        data: the communicators of all data-parallel ranks.
        expert: The communicators of experts' data-parallel ranks, if they are others.
    """

    axis_plans: AxisPlans
    ranks: Ranks
    data: MeshCommunicators
    expert: MeshCommunicators | None = None

    def of(self, kind: BufferKind) -> tuple[AxisPlan, MeshCommunicators]:
        """Those of parameters of ``kind``."""
        of_experts = self.expert if kind.is_expert else None
        return self.axis_plans.of(kind), of_experts or self.data

    @property
    def groups(self) -> Sequence[ProcessGroup]:
        """All groups over which the model's buffers communicate."""
        meshes = [each.mesh for each in (self.data, self.expert) if each is not None]
        control = self.ranks.control_group
        found = [group for mesh in meshes for group in mesh.groups]
        return found if control is None else list(dict.fromkeys((*found, control)))


@dataclass(frozen=True)
class EngineSetup:
    """The plan and the arguments of an engine, before its buffers are built.

    Attributes:
        model: The user's module, unsharded.
        units: The argument of :func:`~fsdp_engine.sharding.shard`.
        settings: The options, axes and extensions that the plan follows.
        plan: The units and buffers to build.
        data: All data-parallel ranks.
        experts: The data-parallel ranks of this rank's experts, if they are others.
        kept: Objects that extensions keep from one of their methods to the next.
    """

    model: nn.Module
    units: UnitSelector | Iterable[UnitSelector] | None
    settings: PlanSettings
    plan: Plan
    data: DataMesh
    experts: DataMesh | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def axis_plans(self) -> AxisPlans:
        """The mesh axes and levels of each kind of buffer."""
        return self.settings.axis_plans


# Modules whose parameters units have.
_OWNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# The buffer of each sharded parameter, and the number of the parameter in it.
_BUFFERS: MutableMapping[Tensor, tuple[weakref.ref[ParamAndGradBuffer], int]]
_BUFFERS = WeakIdKeyDictionary()


def buffer_of(param: Tensor) -> tuple[ParamAndGradBuffer, int] | None:
    """Returns the buffer of a sharded parameter, and the number of the parameter in it; None if the
    parameter is not one of an engine that exists."""
    reference, number = _BUFFERS.get(param, (None, 0))
    buffer = None if reference is None else reference()
    return None if buffer is None else (buffer, number)


def owned_within(model: nn.Module) -> str | None:
    """Name of a module of ``model`` with a parameter that a unit has; None if there is none."""
    owned = (name for name, module in model.named_modules() if module in _OWNED)
    name = next(owned, None)
    return None if name is None else label_of(name)


class Resources:
    """What units are built with and share. What modules of several units send, when one calls the
    other, stands in the same queues, under numbers that no other buffer has.

    Attributes:
        options: those that they are built with.
        lanes: queues of work.
        memory: where it comes from.
        placement: makes the shards of buffers.
        placements: placements that extensions have made, by what they made them for.
        next_tag: the first that no buffer's messages have.
    """

    def __init__(
        self,
        mesh: DataMesh,
        options: Options,
        memory: Memory | None = None,
    ) -> None:
        self.options = options
        self.memory = Memory(mesh.device) if memory is None else memory
        self.lanes = make_lanes(mesh.device, mesh.ranks)
        self.placement = Placement()
        self.placements: dict[Any, Placement] = {}
        self.next_tag = FIRST_TAG

    def on(self, device: torch.device) -> Resources:
        """The same with memory on ``device``: where there are no values yet, the meta device."""
        if device == self.memory.device:
            return self
        other = copy(self)
        other.memory, other.placement = Memory(device), Placement()
        return other

    def take_tag(self) -> int:
        """The number of a buffer's messages; the next one is its, too: a reduction may take two."""
        self.next_tag += 2
        return self.next_tag - 2


SAME = "same"
# Of other interfaces: parameters start from the first rank's values, which are not compared.
FIRST_PARAMETERS = "rank0 parameters"


class InitialValues:
    """A seam: the values that parameters and buffers of a model start with. Here each rank has
    them, and they are not compared.

    Args:
        setup: The setup of the engine.
        choice: ``initial_values`` of :func:`~fsdp_engine.sharding.shard`.
        from_first: parameters start from the first rank's values, whatever others have.

    Attributes:
        choices: legal values of ``choice``.
        from_first: the first rank's parameters are broadcast when their unit is built.
        note: sent to all ranks with the digest of the plan.

    Raises:
        ValueError: there is no such choice.
    """

    choices: Sequence[str] = (SAME,)

    def __init__(self, setup: EngineSetup, choice: str, *, from_first: bool = False) -> None:
        if choice not in self.choices:
            raise ValueError(f"initial_values: expected one of {self.choices}; found {choice!r}")
        self.from_first = from_first
        self.note: Any = setup.plan.on_meta

    def decide(
        self, notes: Sequence[Any], all_notes: Sequence[Any], ranks: Ranks, what: str
    ) -> InitialValues:
        """Returns what gives the model its values, when ranks have agreed on the plan. Collective.

        Args:
            notes: The notes of all data-parallel ranks.
            all_notes: The notes of all ranks of the model.
            ranks: these ranks.
            what: who asks, in messages.

        Raises:
            ValueError: these are no values to start with; on all data-parallel ranks.
        """
        if any(notes):
            raise ValueError(
                "model: expected values on all ranks, without the extension for initial values; "
                "found tensors on the meta device"
            )
        return self

    def give(self, index: int, planned: PlannedUnit, communicators: EngineCommunicators) -> None:
        """On return the parameters of unit ``index``, which is about to be built, have values."""

    def finish(self, model: nn.Module, communicators: EngineCommunicators, num_units: int) -> None:
        """All units are built: on return the buffers of the modules are on the device, with
        values."""
        device = communicators.data.mesh.device
        moved: dict[int, tuple[Tensor, Tensor]] = {}  # with the key's tensor
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    moved.setdefault(id(buffer), (buffer, buffer.to(device)))
                    module._buffers[name] = moved[id(buffer)][1]

    def started(self, engine: Any) -> None:
        """The engine of the model is made."""


def agree_on_plan(
    values: InitialValues | None,
    error: Exception | None,
    signature: list[str],
    mesh: DataMesh,
    ranks: Ranks,
    what: str,
    tag: int = FIRST_TAG,
) -> tuple[InitialValues, int]:
    """Compare plans over all ranks, and decide about initial values.

    Args:
        values: None where there is an ``error``.
        error: The error of this rank.
        signature: everything that must be the same, in lines.
        mesh: all data-parallel ranks.
        ranks: all ranks of the model.
        what: who asks, in messages.
        tag: the first that this rank has free for messages.

    Returns:
        What gives the model its values; the first tag that all data-parallel ranks have free.

    Raises:
        Exception: this rank's own error.
        ValueError: the first parameter that differs. Or another rank's error, of its kind; of a
            kind that is not known everywhere, RuntimeError.
    """
    digest = hashlib.sha256("\n".join(signature).encode()).hexdigest()
    note = None if values is None else values.note
    first = mesh.ranks[0]
    heads = agree(what, error, ranks.control_group, (first, digest, note, tag))
    mine = [head for head in heads if head[0] == first]  # others hold other shards of DTensors
    try:
        if any(head[1] != digest for head in mine):
            _raise_first_difference(signature, mesh)
        assert values is not None
        notes = [head[2] for head in mine]
        values = values.decide(notes, [head[2] for head in heads], ranks, what)
    except ValueError as caught:
        error = caught
    if len(mine) < len(heads):
        agree(what, error, ranks.control_group)
    if error is not None:
        raise error
    assert values is not None
    return values, max(head[3] for head in mine)


def build_units(
    plan: Plan,
    communicators: EngineCommunicators,
    resources: Resources,
    values: InitialValues,
) -> list[list[ParamAndGradBuffer]]:
    """Make the buffers and put sharded parameters into the model, unit by unit.

    Args:
        plan: The plan of the model.
        communicators: where buffers are built.
        resources: with which.
        values: what parameters begin with; where they are not the first rank's, each rank's
            slices are its own, and only those that several ranks hold are made the same.

    Returns:
        The buffers of each unit.
    """
    units: list[list[ParamAndGradBuffer]] = []
    built: dict[tuple[int, str], Tensor] = {}
    for index, planned in enumerate(plan.units):
        values.give(index, planned, communicators)
        units.append(build_unit(planned, communicators, resources, values.from_first))
        install_where_complete(units[-1], built)
    values.finish(plan.root, communicators, len(units))
    for planned, buffers in zip(plan.units, units, strict=True):
        if planned.loose:
            watch_reads(buffers)
    return units


def build_unit(
    planned: PlannedUnit,
    communicators: EngineCommunicators,
    resources: Resources,
    from_first: bool = False,
) -> list[ParamAndGradBuffer]:
    """Make one unit's buffers and put its sharded parameters into its modules.

    Args:
        planned: what it is to be; its parameters have values, or get the first rank's.
        communicators, resources: see :func:`build_units`.
        from_first: its parameters get the first rank's values.
    """
    resources.memory.begin_unit()
    buffers: list[ParamAndGradBuffer] = []
    for number, part in enumerate(planned.buffers):
        label = planned.label
        if len(planned.buffers) > 1:
            label += f" (buffer {number})"
        axes, mesh_communicators = communicators.of(part.kind)
        buffer = ParamAndGradBuffer(
            BufferSpec(label, part.layout, part.kind, axes.strategy, resources.take_tag()),
            BufferContext(
                mesh_communicators, resources.lanes, resources.memory, resources.placement
            ),
            part.records,
            part.make_codec(),
            resources.options,
            broadcast=from_first,
        )
        buffers.append(buffer)
        for index, param in enumerate(buffer.sharded_params):
            _BUFFERS[param] = weakref.ref(buffer), index
        if not (from_first or buffer.weights.main.tensor.is_meta):
            same_on_replicas(buffer)
    for buffer in buffers:
        for record in buffer.records:
            _OWNED.update(module for module, _ in record.holders)
            del record.param
    return buffers


def same_on_replicas(buffer: ParamAndGradBuffer) -> None:
    """Ranks that hold the same main weights get those of the first of them. Collective."""
    mesh = buffer.mesh
    for axis in Axis:
        if not buffer.strategy.shards(Role.OPTIM, axis):
            broadcast_(buffer.weights.main.tensor, mesh.axis(axis).reduce_group)


def _raise_first_difference(signature: list[str], mesh: DataMesh) -> None:
    all_signatures: list[Any] = gather_objects(signature, mesh.control_group)
    first = all_signatures[0]
    for rank, other in enumerate(all_signatures):
        if other == first:
            continue
        # What one rank has and the other has not; where only the order differs, its first place.
        known, known_there = set(first), set(other)
        mine = [line for line in first if line not in known_there]
        theirs = [line for line in other if line not in known]
        if not mine and not theirs:
            places = [i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b]
            mine, theirs = [first[places[0]]], [other[places[0]]]
        raise ValueError(
            "model: expected the same parameters and options, in one order, on all ranks; found "
            f"on data-parallel rank 0 [{(mine or ['nothing'])[0]}] and on rank {rank} "
            f"[{(theirs or ['nothing'])[0]}]"
        )
    raise AssertionError("digests differ but signatures do not")
