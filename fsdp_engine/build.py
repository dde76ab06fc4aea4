"""From a plan to units with buffers: agree with all ranks, then change things.

Nothing is changed before every rank has checked its arguments and all ranks have told each other
so: an error on one rank is raised on all, and no rank is left waiting.

What the user's modules do when they give themselves values (``materialize.py``) shows only while
units are built. A rank where one of them raises goes on with whatever its memory holds, so that
ranks send each other the same; when all is built it tells, and all raise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_engine.buffer import Ladder
from fsdp_engine.collectives import broadcast_, gather_objects
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.initial_values import Holdings, Start, broadcast_buffers, decide
from fsdp_engine.lanes import Lanes
from fsdp_engine.materialize import ModuleTree, materialize, materialize_buffers
from fsdp_engine.meeting import error_of_another
from fsdp_engine.memory import Memory, Place
from fsdp_engine.mesh import DataMesh
from fsdp_engine.param_and_grad_buffer import FIRST_TAG, BufferKind, ParamAndGradBuffer
from fsdp_engine.plan import Ground, Grounds, Plan
from fsdp_engine.strategies import Axis, Role
from fsdp_engine.unit import Unit


@dataclass(frozen=True)
class Sites:
    """Where buffers are built: the levels of all data-parallel ranks and of experts' ranks, and the
    communicators of each."""

    grounds: Grounds
    data: Ladder
    expert: Ladder | None = None

    def of(self, kind: BufferKind) -> tuple[Ground, Ladder]:
        """Those of parameters of ``kind``."""
        ladder = self.expert if kind.is_expert and self.expert is not None else self.data
        return self.grounds.of(kind), ladder


def agree(
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
    found = (type(error).__name__, str(error)) if error is not None else None
    values = holdings.digests if holdings is not None else {}
    heads: list[Any] = gather_objects((digest, found, seed, values), mesh.control_group, what)
    if error is not None:
        raise error
    for rank, (_, other, *_) in enumerate(heads):
        if other is not None:
            raise error_of_another(what, f"data-parallel rank {rank}", *other)
    if any(head[0] != digest for head in heads):
        _raise_first_difference(signature, mesh)
    assert plan is not None
    assert holdings is not None
    all_values = [head[3] for head in heads]
    return Start(int(heads[0][2]), *decide(plan, holdings, all_values, initial_values, mesh))


def build_units(
    plan: Plan,
    sites: Sites,
    lanes: Lanes,
    memory: Memory,
    config: DistributedDataParallelConfig,
    start: Start,
) -> list[Unit]:
    """Make the buffers and put sharded parameters into the model, unit by unit.

    Args:
        start: whose values they begin with; where they are not the first rank's, each rank's
            slices are its own, and only those that several ranks hold are made the same.

    Raises:
        Exception: a module on the meta device could not give itself values, on some rank; the
            model is of no use any more.
    """
    error: Exception | None = None
    device = sites.data.mesh.device
    tag = FIRST_TAG
    units = []
    tree = ModuleTree(plan.units[0].module) if plan.on_meta else None
    places = _places(plan, memory) if config.fsdp_double_buffer else [None] * len(plan.units)
    for index, planned in enumerate(plan.units):
        if tree is not None:
            records = [
                record
                for part in planned.buffers
                # The others' values come from there, so they need none.
                if not start.whole or sites.of(part.kind)[1].mesh.is_first
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
            ground, ladder = sites.of(part.kind)
            with memory.placing(places[index]):
                buffer = ParamAndGradBuffer(
                    label,
                    part.records,
                    part.layout,
                    part.kind,
                    part.make_codec(),
                    ground.strategy,
                    ladder,
                    lanes,
                    memory,
                    config,
                    tag,
                    broadcast=start.from_first,
                )
            buffers.append(buffer)
            if not start.from_first:
                same_on_replicas(buffer)
            tag += 2  # a reduction may take two messages
        units.append(Unit(index, planned.name, planned.module, buffers, lanes, places[index]))
        for buffer in buffers:
            for record in buffer.records:
                # The user's own tensor goes now, so that one unit at a time is held twice.
                del record.param
    root = plan.units[0].module
    has_values = not start.whole or sites.data.mesh.is_first
    try:
        materialize_buffers(root, device, start.seed + len(units), values=has_values)
    except Exception as caught:
        error = error or caught
    if plan.on_meta or start.whole:
        _raise_everywhere(error, sites.data.mesh)
    if start.whole:
        experts = sites.expert.mesh if sites.expert is not None else None
        broadcast_buffers(root, sites.data.mesh, experts)
    units[0].parts = tuple(
        unit for unit, planned in zip(units, plan.units, strict=True) if planned.is_bucket
    )
    memory.fix_slots()
    return units


def _raise_everywhere(error: Exception | None, mesh: DataMesh) -> None:
    """Raise the error of whichever rank has one. Collective."""
    what = "giving values to modules on the meta device"
    found = (type(error).__name__, str(error)) if error is not None else None
    others: list[Any] = gather_objects(found, mesh.control_group, what)
    failed = [(rank, other) for rank, other in enumerate(others) if other is not None]
    if error is None and failed:
        rank, other = failed[0]
        error = error_of_another(what, f"data-parallel rank {rank}", *other)
    if error is not None:
        error.add_note("The model is half built: make a new one before the next shard()")
        raise error


def _places(plan: Plan, memory: Memory) -> list[Place | None]:
    """Who takes turns with whom: see [Note: Slots] in ``memory.py``."""
    modules = {id(unit.module) for unit in plan.units}
    pair = (memory.make_slots(), memory.make_slots())
    places: list[Place | None] = []
    num_in_turn = 0
    for index, unit in enumerate(plan.units):
        num_inside = sum(id(module) in modules for module in unit.module.modules())
        if unit.is_bucket or (index and num_inside == 1):
            places.append(Place(index, pair[num_in_turn % 2]))
            num_in_turn += 1
        else:
            places.append(Place(index, memory.make_slots()))
    return places


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
