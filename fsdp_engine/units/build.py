"""Builds the buffers of units from a plan, after all ranks have agreed on the plan.

:func:`build_unit` builds one unit, so units can be built in separate calls before an engine is
created over all of them. They share :class:`Resources` (lanes, memory, tags of messages).

Every rank checks its arguments, and all ranks exchange errors, before anything is changed. An error
on one rank is raised on all ranks, so no rank waits for a rank that has stopped.

Parameters must have values on each rank, unless an extension sets them: see :class:`InitialValues`.
"""

from __future__ import annotations

import hashlib
import itertools
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
from fsdp_engine.units.installing import (
    install_where_complete,
    mark_as_replaced,
    watch_reads,
)
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
        axis_plans: Sizes and levels of the axes, by kind of buffer.
        ranks: All ranks of the model, including those of other mesh dimensions, over which
            parameters can be DTensors.
        data: Communicators of all data-parallel ranks.
        expert: Communicators of the data-parallel ranks that share the experts of this rank. None:
            there is no expert mesh.
    """

    axis_plans: AxisPlans
    ranks: Ranks
    data: MeshCommunicators
    expert: MeshCommunicators | None = None

    def of(self, kind: BufferKind) -> tuple[AxisPlan, MeshCommunicators]:
        """Returns the axis plan and the communicators of buffers of ``kind``."""
        of_experts = self.expert if kind.is_expert else None
        return self.axis_plans.of(kind), of_experts or self.data

    @property
    def groups(self) -> Sequence[ProcessGroup]:
        """All process groups over which the model's buffers communicate."""
        meshes = [each.mesh for each in (self.data, self.expert) if each is not None]
        control = self.ranks.control_group
        found = [group for mesh in meshes for group in mesh.groups]
        return found if control is None else list(dict.fromkeys((*found, control)))


@dataclass(frozen=True)
class EngineSetup:
    """The plan and the arguments of an engine, before its buffers are built.

    Attributes:
        model: The user's module, unsharded.
        units: The argument ``units`` of :func:`~fsdp_engine.sharding.shard`.
        settings: The options, axes and extensions that the plan follows.
        plan: The units and buffers to build.
        data: All data-parallel ranks.
        experts: The data-parallel ranks that share the experts of this rank. None: there is no
            expert mesh.
        kept: Objects that extensions store in one of their methods and read in a later one.
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


# Modules with a parameter that a unit owns, by ``id``, because modules may define ``==``.
_OWNED: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
# The buffer of each sharded parameter, and the index of the parameter in the buffer.
_BUFFERS: MutableMapping[Tensor, tuple[weakref.ref[ParamAndGradBuffer], int]]
_BUFFERS = WeakIdKeyDictionary()


def buffer_of(param: Tensor) -> tuple[ParamAndGradBuffer, int] | None:
    """Returns the buffer of a sharded parameter, and the index of the parameter in the buffer.

    Returns None if no live buffer has the parameter.
    """
    reference, number = _BUFFERS.get(param, (None, 0))
    buffer = None if reference is None else reference()
    return None if buffer is None else (buffer, number)


def owned_within(model: nn.Module) -> str | None:
    """Returns the name of the first module of ``model`` with a parameter that a unit owns.

    Returns None if there is no such module.
    """
    owned = (name for name, module in model.named_modules() if id(module) in _OWNED)
    name = next(owned, None)
    return None if name is None else label_of(name)


class Resources:
    """The options, lanes, memory and tags that units share.

    The lanes are shared because a module of one unit may call a module of another one. Each buffer
    has tags of its own, which distinguish its messages from those of other buffers.

    Attributes:
        options: The options with which units are built.
        lanes: The queues of computation and communication.
        memory: Allocates the memory of buffers.
        placement: Makes the shards of buffers.
        placements: Placements that extensions have made, by a key that the extension chooses.
        next_tag: The first tag that no buffer uses.
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
        """Returns these resources with memory on ``device``.

        This is the meta device for units whose parameters have no values yet.
        """
        if device == self.memory.device:
            return self
        other = copy(self)
        other.memory, other.placement = Memory(device), Placement()
        return other

    def take_tag(self) -> int:
        """Returns the tag of a new buffer. The next tag is reserved for it, too, because a
        reduction may use two."""
        self.next_tag += 2
        return self.next_tag - 2


SAME = "same"
# For interfaces other than fe.shard: parameters are broadcast from the first rank, and values are
# not compared.
FIRST_PARAMETERS = "rank0 parameters"


class InitialValues:
    """Sets the initial values of parameters and buffers of a model.

    This class is a seam (see ``docs/design.md``). Each rank keeps its own values, and they are not
    compared.

    Args:
        setup: The setup of the engine.
        choice: ``initial_values`` of :func:`~fsdp_engine.sharding.shard`.
        from_first: Whether parameters get the first rank's values.

    Attributes:
        choices: Legal values of ``choice``.
        from_first: Whether the first rank's parameters are broadcast when their unit is built.
        note: An object that is sent to all ranks with the digest of the plan.

    Raises:
        ValueError: ``choice`` is not legal.
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
        """Returns the object that sets the values, once ranks agree on the plan. Collective.

        Args:
            notes: The notes of all data-parallel ranks.
            all_notes: The notes of all ranks of the model.
            ranks: All ranks of the model.
            what: Name of the operation in messages.

        Raises:
            ValueError: The model cannot start with these values. Raised on all data-parallel ranks.
        """
        if any(notes):
            raise ValueError(
                "model: expected tensors with values on all ranks; found tensors on the meta "
                "device. The extension that initializes them is not part of this installation"
            )
        return self

    def give(self, index: int, planned: PlannedUnit, communicators: EngineCommunicators) -> None:
        """Set the values of the parameters of unit ``index`` before it is built."""

    def finish(self, model: nn.Module, communicators: EngineCommunicators, num_units: int) -> None:
        """Set the values of buffers, and move them to the device, after all units are built."""
        device = communicators.data.mesh.device
        # Each entry holds the old tensor, so that its id, the key, stays unique.
        moved: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    moved.setdefault(id(buffer), (buffer, buffer.to(device)))
                    module._buffers[name] = moved[id(buffer)][1]

    def started(self, engine: Any) -> None:
        """Receive the engine of the model, when it has been made."""


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
        values: The object that sets the initial values. None if there is an ``error``.
        error: The error of this rank.
        signature: Lines that must be the same on all data-parallel ranks.
        mesh: All data-parallel ranks.
        ranks: All ranks of the model.
        what: Name of the operation in messages.
        tag: The first tag that is free on this rank.

    Returns:
        The object that sets the initial values, and the first tag that is free on all data-parallel
        ranks.

    Raises:
        Exception: The error of this rank.
        ValueError: The signatures differ. The message has the first line that differs.
        RuntimeError: Another rank has an error. If its type is in
            :data:`~fsdp_engine.comm.rendezvous.ERROR_KINDS`, that type is raised instead.
    """
    digest = hashlib.sha256("\n".join(signature).encode()).hexdigest()
    note = None if values is None else values.note
    first = mesh.ranks[0]
    heads = agree(what, error, ranks.control_group, (first, digest, note, tag))
    # Only data-parallel ranks must agree: the other ranks hold other shards of DTensors.
    mine = [head for head in heads if head[0] == first]
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
        communicators: The communicators of the buffers.
        resources: The lanes, memory and tags that the units share.
        values: The object that sets the initial values. Unless parameters are broadcast from the
            first rank, each rank keeps the values of its own shards, and shards that several ranks
            hold are copied from the first of these ranks.

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
        planned: The plan of the unit. Its parameters have values, unless ``from_first`` is True.
        communicators: The communicators of the buffers.
        resources: The lanes, memory and tags that the units share.
        from_first: Whether the parameters are broadcast from the first rank.
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
            _OWNED.update((id(module), module) for module, _ in record.holders)
            mark_as_replaced(record.param, record.name)
            del record.param
    return buffers


def same_on_replicas(buffer: ParamAndGradBuffer, values: Tensor | None = None) -> None:
    """Broadcast values from the first of the ranks that hold the same shard. Collective.

    Args:
        buffer: The buffer.
        values: A tensor of the size of this rank's main weights. None: the main weights.
    """
    mesh, values = buffer.mesh, buffer.weights.main.tensor if values is None else values
    for axis in Axis:
        if not buffer.strategy.shards(Role.OPTIM, axis):
            broadcast_(values, mesh.axis(axis).reduce_group)


def _raise_first_difference(signature: list[str], mesh: DataMesh) -> None:
    all_signatures: list[Any] = gather_objects(signature, mesh.control_group)
    first = all_signatures[0]
    for rank, other in enumerate(all_signatures):
        if other == first:
            continue
        # The error names a line that only one rank has. If there is none, it names the first line
        # that the two ranks have at different positions.
        known, known_there = set(first), set(other)
        mine = [line for line in first if line not in known_there]
        theirs = [line for line in other if line not in known]
        if not mine and not theirs:
            pairs = itertools.zip_longest(first, other, fillvalue="nothing")
            mine, theirs = next(([a], [b]) for a, b in pairs if a != b)
        raise ValueError(
            "model: expected the same parameters and options, in one order, on all ranks; found "
            f"on data-parallel rank 0 [{(mine or ['nothing'])[0]}] and on rank {rank} "
            f"[{(theirs or ['nothing'])[0]}]"
        )
    raise AssertionError("digests differ but signatures do not")
