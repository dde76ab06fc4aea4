"""From a model to units with buffers: check everything, agree with all ranks, then change things.

Nothing is changed before every rank has checked its arguments and all ranks have told each other
so: an error on one rank is raised on all, and no rank is left waiting.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_engine.assignment import UnitSelector, assign, collect_records, find_units
from fsdp_engine.buffer import Ladder
from fsdp_engine.codecs import CastCodec, CodecRule, ParamCodec
from fsdp_engine.collectives import broadcast_, gather_objects
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.lanes import Lanes
from fsdp_engine.layout import Layout
from fsdp_engine.materialize import check_meta, materialize, materialize_buffers
from fsdp_engine.memory import Memory, Place
from fsdp_engine.mesh import DataMesh
from fsdp_engine.param_and_grad_buffer import (
    FIRST_TAG,
    BufferKind,
    ParamAndGradBuffer,
    ParamRecord,
)
from fsdp_engine.placement import TensorRequest, plan_layouts
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.unit import Unit

Granule = Callable[[str, nn.Parameter], int]


@dataclass(frozen=True)
class PlannedBuffer:
    """One buffer to be: its kind, its layout, its parameters, and how its codec is made."""

    kind: BufferKind
    layout: Layout
    records: list[ParamRecord]
    make_codec: Callable[[], ParamCodec]


@dataclass(frozen=True)
class PlannedUnit:
    """One unit to be."""

    name: str
    module: nn.Module
    buffers: list[PlannedBuffer]


@dataclass(frozen=True)
class Plan:
    """Everything about a model that is decided before it is changed."""

    units: list[PlannedUnit]
    records: list[ParamRecord]
    on_meta: bool

    def signature(self) -> list[str]:
        """A line for each parameter, which must be the same on all ranks."""
        params = [
            f"{record.name}: shape {tuple(record.param.shape)}, {record.param.dtype}, "
            f"{'trainable' if record.param.requires_grad else 'frozen'}"
            for record in self.records
        ]
        places = [
            f"{record.name}: in unit {unit.name or 'root'}, at {slot.offset} of "
            f"{buffer.layout.numel}"
            for unit in self.units
            for buffer in unit.buffers
            for record, slot in zip(buffer.records, buffer.layout.slots, strict=True)
        ]
        return [*params, *places]


def make_plan(
    model: nn.Module,
    units: UnitSelector | Iterable[UnitSelector] | None,
    policy: MixedPrecisionPolicy,
    config: DistributedDataParallelConfig,
    strategy: Strategy,
    axis_sizes: dict[Axis, int],
    granule: Granule | None,
    codec_rules: Sequence[CodecRule] = (),
) -> Plan:
    """Decide which parameter lies where. Changes nothing, sends nothing.

    Raises:
        ValueError: units that match nothing, a granule that does not divide its parameter, a
            model without parameters, uninitialised lazy parameters, DTensors, or an optimizer
            that holds the model's parameters already.
    """
    records = collect_records(model)
    if not records:
        raise ValueError(f"model: expected parameters; found none in {type(model).__name__}")
    for record in records:
        if isinstance(record.param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"{record.name}: expected a parameter with a shape; found a lazy one that no "
                "forward has initialised"
            )
        if isinstance(record.param, DTensor):
            raise ValueError(
                f"{record.name}: expected a plain parameter; found a {type(record.param).__name__} "
                f"over {record.param.device_mesh} (sharded elsewhere; tensor parallelism has to "
                "keep plain local parameters)"
            )
    _check_no_optimizer(records)
    on_meta = check_meta(model, records)
    modules = find_units(model, units)
    owned = assign(model, modules, records)
    sizes = {a: axis_sizes[a] if strategy.cuts(Role.OPTIM, a) else 1 for a in Axis}
    planned = []
    for name, module in {"": model, **modules}.items():
        buffers = _plan_buffers(owned[name], policy, config, sizes, granule, codec_rules)
        if buffers or not name:
            planned.append(PlannedUnit(name, module, buffers))
    return Plan(planned, records, on_meta)


def agree(plan: Plan | None, error: Exception | None, options: str, mesh: DataMesh) -> int:
    """Compare plans over all ranks; returns a seed that is the same on all of them.

    Raises:
        ValueError: this rank's own error, another rank's, or the first parameter that differs.
    """
    signature = [options, *plan.signature()] if plan is not None else []
    digest = hashlib.sha256("\n".join(signature).encode()).hexdigest()
    seed = int(torch.randint(2**31, ())) if plan is not None and plan.on_meta else 0
    text = f"{type(error).__name__}: {error}" if error is not None else ""
    heads: list[Any] = gather_objects((digest, text, seed), mesh.control_group)
    if error is not None:
        raise error
    for rank, (_, other_error, _) in enumerate(heads):
        if other_error:
            raise ValueError(f"shard() failed on data-parallel rank {rank}: {other_error}")
    if any(head[0] != digest for head in heads):
        _raise_first_difference(signature, mesh)
    return int(heads[0][2])


def build_units(
    plan: Plan,
    strategy: Strategy,
    ladder: Ladder,
    lanes: Lanes,
    memory: Memory,
    config: DistributedDataParallelConfig,
    seed: int,
) -> list[Unit]:
    """Make the buffers and put sharded parameters into the model, unit by unit."""
    mesh = ladder.mesh
    tag = FIRST_TAG
    units = []
    places = _places(plan, memory) if config.fsdp_double_buffer else [None] * len(plan.units)
    for index, planned in enumerate(plan.units):
        if plan.on_meta:
            records = [record for buffer in planned.buffers for record in buffer.records]
            materialize(plan.units[0].module, records, mesh.device, seed + index)
        buffers: list[ParamAndGradBuffer] = []
        for number, part in enumerate(planned.buffers):
            label = planned.name or "the root module"
            if len(planned.buffers) > 1:
                label += f" (buffer {number})"
            with memory.placing(places[index]):
                buffer = ParamAndGradBuffer(
                    label,
                    part.records,
                    part.layout,
                    part.kind,
                    part.make_codec(),
                    strategy,
                    ladder,
                    lanes,
                    memory,
                    config,
                    tag,
                )
            buffers.append(buffer)
            _same_on_replicas(buffers[-1], strategy, mesh)
            tag += 2  # a reduction may take two messages
        units.append(Unit(index, planned.name, planned.module, buffers, lanes, places[index]))
        for buffer in buffers:
            for record in buffer.records:
                # The user's own tensor goes now, so that one unit at a time is held twice.
                del record.param
    materialize_buffers(plan.units[0].module, mesh.device, seed + len(units))
    memory.fix_slots()
    return units


def _places(plan: Plan, memory: Memory) -> list[Place | None]:
    """Who takes turns with whom: see [Note: Slots] in ``memory.py``."""
    modules = {id(unit.module) for unit in plan.units}
    pair = (memory.make_slots(), memory.make_slots())
    places: list[Place | None] = []
    num_in_turn = 0
    for index, unit in enumerate(plan.units):
        num_inside = sum(id(module) in modules for module in unit.module.modules())
        if index and num_inside == 1:
            places.append(Place(index, pair[num_in_turn % 2]))
            num_in_turn += 1
        else:
            places.append(Place(index, memory.make_slots()))
    return places


def _plan_buffers(
    records: Sequence[ParamRecord],
    policy: MixedPrecisionPolicy,
    config: DistributedDataParallelConfig,
    sizes: dict[Axis, int],
    granule: Granule | None,
    codec_rules: Sequence[CodecRule],
) -> list[PlannedBuffer]:
    groups: dict[BufferKind, list[ParamRecord]] = {}
    makers: dict[BufferKind, Callable[[], ParamCodec]] = {}
    for record in records:
        kind, maker = _kind_of(record, policy, config, codec_rules)
        groups.setdefault(kind, []).append(record)
        makers.setdefault(kind, maker)
    planned = []
    for kind, members in groups.items():
        by_name = {record.name: record for record in members}
        codec = makers[kind]()
        requests = []
        for record in members:
            shape = tuple(record.param.shape)
            wanted = granule(record.name, record.param) if granule is not None else 1
            checked = TensorRequest(record.name, shape, wanted).granule
            together = math.lcm(checked, codec.granule(shape))
            requests.append(TensorRequest(record.name, shape, together))
        for layout in plan_layouts(
            requests, inner_size=sizes[Axis.INNER], outer_size=sizes[Axis.OUTER]
        ):
            inside = [by_name[slot.name] for slot in layout.slots]
            planned.append(PlannedBuffer(kind, layout, inside, makers[kind]))
    return planned


def _kind_of(
    record: ParamRecord,
    policy: MixedPrecisionPolicy,
    config: DistributedDataParallelConfig,
    codec_rules: Sequence[CodecRule],
) -> tuple[BufferKind, Callable[[], ParamCodec]]:
    param = record.param
    dtypes = policy.resolve(param, config.reduce_scatter_with_fp32_accumulation)
    divisor = float(getattr(param, "gradient_divisor", 1.0))
    for rule in codec_rules:
        found = rule(record.name, param, dtypes)
        if found is not None:
            key, maker = found
            return BufferKind(key, dtypes, param.requires_grad, divisor), maker
    return (
        BufferKind("cast", dtypes, param.requires_grad, divisor),
        lambda: CastCodec(dtypes.main, dtypes.compute),
    )


def _check_no_optimizer(records: Sequence[ParamRecord]) -> None:
    names = {id(record.param): record.name for record in records}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        for group in vars(thing).get("param_groups", ()):
            for param in group["params"]:
                if id(param) in names:
                    raise ValueError(
                        f"optimizer: expected it to be built after shard(); found a "
                        f"{type(thing).__name__} that already holds {names[id(param)]}"
                    )


def _same_on_replicas(buffer: ParamAndGradBuffer, strategy: Strategy, mesh: DataMesh) -> None:
    """Ranks that hold the same weights start from the same values: those of the first."""
    for axis in Axis:
        if not strategy.cuts(Role.OPTIM, axis):
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
