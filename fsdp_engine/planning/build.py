"""From a plan to units with buffers: agree with all ranks, then change things.

Nothing is changed before every rank has checked its arguments and all ranks have told each other
so: an error on one rank is raised on all, and no rank is left waiting.

What the user's modules do when they give themselves values (``materialize.py``) shows only while
units are built. A rank where one of them raises goes on with whatever its memory holds, so that
ranks send each other the same; when all is built it tells, and all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fsdp_engine.buffers.param_and_grad_buffer import FIRST_TAG, ParamAndGradBuffer
from fsdp_engine.buffers.redistribute import Ladder, Machinery
from fsdp_engine.buffers.spec import BufferKind, BufferSpec
from fsdp_engine.buffers.weights import Weights
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.devices.agreement import agree
from fsdp_engine.devices.collectives import broadcast_, gather_objects
from fsdp_engine.devices.lane import Lanes
from fsdp_engine.devices.memory import Memory
from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.planning.initial_values import Holdings, Start, broadcast_buffers, decide
from fsdp_engine.planning.installing import watch_reads
from fsdp_engine.planning.materialize import ModuleTree, materialize, materialize_buffers
from fsdp_engine.planning.plan import AxisPlan, AxisPlans, Plan
from fsdp_engine.strategies import Axis, Role


@dataclass(frozen=True)
class Ladders:
    """Where buffers are built: the axis plan and the communicators of all data-parallel ranks, and
    those of experts' ranks."""

    axis_plans: AxisPlans
    data: Ladder
    expert: Ladder | None = None

    def of(self, kind: BufferKind) -> tuple[AxisPlan, Ladder]:
        """Those of parameters of ``kind``."""
        ladder = self.expert if kind.is_expert and self.expert is not None else self.data
        return self.axis_plans.of(kind), ladder


@dataclass(frozen=True)
class BuiltUnit:
    """A unit with its buffers, of which the model holds the sharded parameters. It knows no other.

    Attributes:
        index: its number in module order.
        name: fully qualified names of its modules; "" for the root.
        modules: whose forwards need its full parameters.
        buffers: its parameters, by kind.
        loose: see :class:`~fsdp_engine.planning.plan.PlannedUnit`.
    """

    index: int
    name: str
    modules: Sequence[nn.Module]
    buffers: Sequence[ParamAndGradBuffer]
    loose: Sequence[nn.Module]

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name or "the root module"

    @cached_property
    def num_elements(self) -> int:
        """Elements of its buffers, padding included."""
        return sum(buffer.layout.numel for buffer in self.buffers)

    @cached_property
    def reshards(self) -> bool:
        """Whether its full parameters come and go."""
        return any(buffer.weights.reshards for buffer in self.buffers)

    @cached_property
    def needs_refresh(self) -> bool:
        """Whether a change of main weights has to travel or be cast before use."""
        return any(buffer.weights.needs_refresh for buffer in self.buffers)

    @cached_property
    def split_weights(self) -> Sequence[Weights]:
        """Weights of which forward and backward gather different bytes ([Note: Planes] in
        ``codecs/base.py``)."""
        weights = [buffer.weights for buffer in self.buffers]
        return [each for each in weights if each.reshards and each.num_planes > 1]


def agree_on_plan(
    plan: Plan | None,
    holdings: Holdings | None,
    error: Exception | None,
    signature: list[str],
    initial_values: str,
    mesh: DataMesh,
    what: str,
) -> Start:
    """Compare plans and initial values over all ranks; returns what all start from.

    Args:
        plan, holdings: None where there is an ``error``.
        error: why this rank cannot go on.
        signature: everything that must be the same, in lines.
        initial_values: see :func:`~fsdp_engine.sharding.shard`.
        mesh: all data-parallel ranks.
        what: who asks, in messages.

    Raises:
        Exception: this rank's own error.
        ValueError: the first parameter that differs. Or another rank's error, of its kind; of a
            kind that is not known everywhere, RuntimeError.
    """
    digest = hashlib.sha256("\n".join(signature).encode()).hexdigest()
    seed = int(torch.randint(2**31, ())) if plan is not None and plan.on_meta else 0
    values = holdings.digests if holdings is not None else {}
    heads = agree(what, error, mesh.control_group, (digest, seed, values))
    if any(head[0] != digest for head in heads):
        _raise_first_difference(signature, mesh)
    assert plan is not None
    assert holdings is not None
    all_values = [head[2] for head in heads]
    return Start(int(heads[0][1]), *decide(plan, holdings, all_values, initial_values, mesh))


def build_units(
    plan: Plan,
    ladders: Ladders,
    lanes: Lanes,
    memory: Memory,
    config: DistributedDataParallelConfig,
    start: Start,
) -> list[BuiltUnit]:
    """Make the buffers and put sharded parameters into the model, unit by unit.

    Args:
        start: whose values they begin with; where they are not the first rank's, each rank's
            slices are its own, and only those that several ranks hold are made the same.

    Raises:
        Exception: a module on the meta device could not give itself values, on some rank; the
            model is of no use any more.
    """
    error: Exception | None = None
    device = ladders.data.mesh.device
    tag = FIRST_TAG
    units = []
    tree = ModuleTree(plan.root) if plan.on_meta else None
    for index, planned in enumerate(plan.units):
        memory.begin_unit()
        if tree is not None:
            records = [
                record
                for part in planned.buffers
                # The others' values come from there, so they need none.
                if not start.whole or ladders.of(part.kind)[1].mesh.is_first
                for record in part.records
            ]
            try:
                materialize(tree, records, device, start.seed + index)
            except Exception as caught:
                error = error or caught
        buffers: list[ParamAndGradBuffer] = []
        for number, part in enumerate(planned.buffers):
            label = planned.name or "the root module"
            if len(planned.buffers) > 1:
                label += f" (buffer {number})"
            axes, ladder = ladders.of(part.kind)
            buffer = ParamAndGradBuffer(
                BufferSpec(label, part.layout, part.kind, axes.strategy, tag),
                Machinery(ladder, lanes, memory),
                part.records,
                part.make_codec(),
                config,
                broadcast=start.from_first,
            )
            buffers.append(buffer)
            if not start.from_first:
                same_on_replicas(buffer)
            tag += 2  # a reduction may take two messages
        name, modules = planned.name, planned.modules
        units.append(BuiltUnit(index, name, modules, buffers, planned.loose))
        for buffer in buffers:
            for record in buffer.records:
                # The user's own tensor goes now, so that one unit at a time is held twice.
                del record.param
    root = plan.root
    has_values = not start.whole or ladders.data.mesh.is_first
    try:
        materialize_buffers(root, device, start.seed + len(units), values=has_values)
    except Exception as caught:
        error = error or caught
    if plan.on_meta or start.whole:
        what = "giving values to modules on the meta device"
        try:
            agree(what, error, ladders.data.mesh.control_group)
        except Exception as raised:
            raised.add_note("The model is half built: make a new one before the next shard()")
            raise
    for unit in units:
        if unit.loose:
            watch_reads(unit.buffers)
    if start.whole:
        experts = ladders.expert.mesh if ladders.expert is not None else None
        broadcast_buffers(root, ladders.data.mesh, experts)
    return units


def same_on_replicas(buffer: ParamAndGradBuffer) -> None:
    """Ranks that hold the same main weights get those of the first of them. Collective."""
    mesh = buffer.mesh
    for axis in Axis:
        if not buffer.strategy.cuts(Role.OPTIM, axis):
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
