"""Plans the units and flat buffers of a model, without changing it and without communication.

``assignment.py`` assigns parameters to units. Within a unit, parameters of one *kind* share a
buffer. Parameters outside of units are split into *buckets*: separate buffers, which are gathered
and reduced one by one. Buckets follow the reverse registration order, in which gradients are
computed. If parameters are sharded, buckets are buffers of the root unit, because all of them are
gathered for the root's forward. Otherwise each bucket is a unit of the modules that hold its
parameters: its gradients are reduced during backward, and the call of such a module waits for the
weights of this bucket alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from fsdp_engine.buffers.spec import BufferKind, ParamRecord
from fsdp_engine.codecs import CastCodec, CodecRule, ParamCodec
from fsdp_engine.codecs.base import PARAM_CLASSES, class_rule, param_class_of
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import advice_for
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.layout import ALIGNMENT, Layout
from fsdp_engine.layout.placement import TensorRequest, plan_layouts
from fsdp_engine.optim.step_listeners import find_optimizers
from fsdp_engine.options import Options
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.assignment import (
    Expected,
    UnitSelector,
    assign,
    bucket_multiple,
    check_memory,
    collect_records,
    expect,
    find_units,
    join_small,
    split_by_count,
    split_by_size,
)
from fsdp_engine.units.dtensors import set_spreads

# Megatron-Core sums the gradient shards of parameters with these marks over ranks that have other
# layers. The shards have equal ranges on these ranks only if each such parameter has a buffer of
# its own.
_MARKS_OF_SHARED = ("shared_embedding", "position_embedding", "pipeline_parallel")


@dataclass(frozen=True)
class AxisPlan:
    """Sizes of the axes of the ranks that share parameters, and the levels along these axes."""

    sizes: dict[Axis, int]
    strategy: Strategy

    @property
    def num_ranks(self) -> int:
        """The number of ranks on both axes together."""
        return math.prod(self.sizes.values())

    def num_shards(self, axis: Axis) -> int:
        """Returns the number of shards of the optimizer state along ``axis``."""
        return self.sizes[axis] if self.strategy.shards(Role.OPTIM, axis) else 1


@dataclass(frozen=True)
class AxisPlans:
    """Axis plans by kind of parameter.

    Attributes:
        data: The axes of all data-parallel ranks.
        expert: The axes of the ranks that share an expert. None: there is no expert mesh.
    """

    data: AxisPlan
    expert: AxisPlan | None = None

    def of(self, kind: BufferKind) -> AxisPlan:
        """Returns the axis plan of parameters of ``kind``."""
        return self.expert if kind.is_expert and self.expert is not None else self.data


@dataclass(frozen=True)
class PlanSettings:
    """The inputs of a plan other than the model: dtypes, options, axes and extensions."""

    policy: MixedPrecisionPolicy
    options: Options
    axis_plans: AxisPlans
    extensions: Sequence[EngineExtension] = ()

    @cached_property
    def rules(self) -> Sequence[CodecRule]:
        """The codec rules. Rules for classes of parameters precede the rules of extensions."""
        given = (rule for each in self.extensions for rule in each.codec_rules)
        return (class_rule(self.extensions), *given)


@dataclass(frozen=True)
class PlannedBuffer:
    """The plan of one buffer: its kind, its layout, its parameters, and a factory of its codec."""

    kind: BufferKind
    layout: Layout
    records: list[ParamRecord]
    make_codec: Callable[[], ParamCodec]

    @cached_property
    def codec(self) -> ParamCodec:
        """A codec of this kind that belongs to no buffer. It is used to read the sizes of the
        encoded weights."""
        return self.make_codec()


def label_of(name: str) -> str:
    """Returns the name of a unit, or of a module of the model, for messages."""
    return name or "the root module"


@dataclass(frozen=True)
class PlannedUnit:
    """The plan of one unit.

    Attributes:
        name: Fully qualified names of its modules, joined; "" for the root.
        modules: The modules whose calls need its parameters.
        buffers: Buffers of its parameters, one or several for each kind.
        loose: The modules of the unit that are not blocks. Forwards of modules around them may read
            their parameters without calling them.
    """

    name: str
    modules: Sequence[nn.Module]
    buffers: list[PlannedBuffer]
    loose: Sequence[nn.Module] = ()

    @property
    def label(self) -> str:
        """The name of the unit in messages."""
        return label_of(self.name)


@dataclass(frozen=True)
class Plan:
    """The units and buffers of a model, before it is changed.

    Attributes:
        units: The planned units, the root first.
        records: The model's parameters.
        on_meta: Whether some parameter or buffer is on the meta device.
    """

    units: list[PlannedUnit]
    records: list[ParamRecord]
    on_meta: bool

    @property
    def root(self) -> nn.Module:
        """The root module of the model."""
        return self.units[0].modules[0]

    @property
    def expected(self) -> Expected:
        """The expected order of uses of the units."""
        return expect(self.root, [unit.modules for unit in self.units])

    def signature(self) -> list[str]:
        """Returns the lines that must be the same on all ranks, two for each parameter."""
        params = [
            f"{_known_as(record)}: shape {tuple(record.param.shape)}, {record.param.dtype}, "
            f"{'trainable' if record.param.requires_grad else 'frozen'}"
            f"{'' if record.spread is None else f', {record.spread.placements}'}"
            for record in self.records
        ]
        places = [
            f"{_known_as(record)}: in unit {unit.name or 'root'}, at element {slot.offset} "
            f"of {buffer.layout.numel}, encoded by {buffer.kind.codec}"
            for unit in self.units
            for buffer in unit.buffers
            for record, slot in zip(buffer.records, buffer.layout.slots, strict=True)
        ]
        return [*params, *places]


def make_plan(
    model: nn.Module, units: UnitSelector | Iterable[UnitSelector] | None, settings: PlanSettings
) -> Plan:
    """Decide the unit and the offset of each parameter, without changing the model.

    Raises:
        ValueError: A selector of units matches nothing, a granule does not divide its parameter,
            the model has no parameters, parameters are lazy or share memory, a DTensor has a
            placement other than ``Shard`` and ``Replicate``, experts are given without an expert
            mesh, weight gradients are delayed without the extension for it, or an optimizer already
            holds parameters of the model.
    """
    records = collect_records(model)
    if not records:
        raise ValueError(f"model: expected parameters; found none in {type(model).__name__}")
    set_spreads(records)
    for record in records:
        check_record(record, settings)
    check_memory(model, records)
    _check_no_optimizer(records)
    on_meta = any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))
    planned = plan_units(model, records, units, settings)
    return Plan(planned, records, on_meta)


def plan_units(
    model: nn.Module,
    records: Sequence[ParamRecord],
    selectors: UnitSelector | Iterable[UnitSelector] | None,
    settings: PlanSettings,
) -> list[PlannedUnit]:
    """Returns the units with their buffers, the root first; see the module docstring."""
    least = settings.options.min_unit_size
    sets = find_units(model, selectors, records)
    if selectors is None:
        sets = join_small(model, sets, records, least)
    elif least:
        raise ValueError(
            "min_unit_size: expected None or 0 with units=, because named units are not joined; "
            f"found {settings.options.min_unit_size}"
        )
    owned = assign(model, sets, records)
    root, *buckets = _plan_root(model, owned[""], settings)
    planned = list(buckets)
    for each in sets:
        buffers = plan_buffers(owned[each.name], settings)
        if buffers:
            planned.append(PlannedUnit(each.name, each.modules, buffers, each.loose))
    # Units are sorted by the registration of their first parameter, as a first guess of the order
    # of execution.
    places = {record.name: place for place, record in enumerate(records)}
    planned.sort(
        key=lambda unit: min(places[r.name] for each in unit.buffers for r in each.records)
    )
    return [root, *planned]


def plan_buffers(
    records: Sequence[ParamRecord], settings: PlanSettings, *, in_buckets: bool = False
) -> list[PlannedBuffer]:
    """Returns the buffers for the parameters of one unit.

    Args:
        records: The parameters.
        settings: The inputs of the plan.
        in_buckets: Split the parameters into buckets. For parameters outside of units.
    """
    groups: dict[BufferKind, list[ParamRecord]] = {}
    makers: dict[BufferKind, Callable[[], ParamCodec]] = {}
    for record in records:
        kind, maker = _kind_of(record, settings)
        groups.setdefault(kind, []).append(record)
        makers.setdefault(kind, maker)
    planned: list[PlannedBuffer] = []
    for kind, members in groups.items():
        parts = _split(members, kind, settings) if in_buckets else [members]
        for part in parts:
            planned += _lay_out(part, kind, makers[kind], settings, in_buckets)
    return planned


def _plan_root(
    model: nn.Module, records: Sequence[ParamRecord], settings: PlanSettings
) -> list[PlannedUnit]:
    """Returns the unit of the root, and the units of buckets; see the module docstring."""
    buffers = plan_buffers(records, settings, in_buckets=True)
    is_sharded = settings.axis_plans.data.strategy.depth(Role.PARAM) > 0
    if is_sharded or len({buffer.kind for buffer in buffers}) == len(buffers):
        return [PlannedUnit("", [model], buffers)]
    buckets = []
    for number, buffer in enumerate(buffers):
        holders = _holders(buffer.records)
        buckets.append(PlannedUnit(f"(bucket {number})", holders, [buffer], loose=holders))
    return [PlannedUnit("", [model], []), *buckets]


def _holders(records: Sequence[ParamRecord]) -> list[nn.Module]:
    """Returns the modules that hold the parameters, each once."""
    modules = (module for record in records for module, _ in record.holders)
    return list({id(module): module for module in modules}.values())


def _split(
    records: Sequence[ParamRecord], kind: BufferKind, settings: PlanSettings
) -> list[list[ParamRecord]]:
    """Returns buckets of the parameters of one kind, in reverse registration order."""
    backwards = list(reversed(records))
    sizes = [record.param.numel() for record in backwards]
    options = settings.options
    if options.num_buckets is not None:
        buckets = split_by_count(sizes, options.num_buckets)
    else:
        num_ranks = settings.axis_plans.of(kind).num_ranks
        buckets = split_by_size(sizes, options.closing_size(num_ranks))
    return [[backwards[place] for place in bucket] for bucket in buckets]


def _lay_out(
    records: Sequence[ParamRecord],
    kind: BufferKind,
    make_codec: Callable[[], ParamCodec],
    settings: PlanSettings,
    is_bucket: bool,
) -> list[PlannedBuffer]:
    by_name = {record.name: record for record in records}
    codec = make_codec()
    requests = []
    for record in records:
        shard = record.shard
        shape = tuple(shard.shape)
        granule = settings.options.granule
        wanted = granule(record.name, shard) if granule is not None else 1
        checked = TensorRequest(record.name, shape, wanted).granule
        together = math.lcm(checked, codec.granule(shape))
        requests.append(TensorRequest(record.name, shape, together))
    axes, multiple = settings.axis_plans.of(kind), ALIGNMENT
    inner_size, outer_size = axes.num_shards(Axis.INNER), axes.num_shards(Axis.OUTER)
    padded = settings.options.pad_shards
    if is_bucket or padded:
        whole = bucket_multiple(axes.num_ranks, padded=padded)
        multiple = whole // math.gcd(whole, inner_size * outer_size)
    layouts = plan_layouts(
        requests, inner_size=inner_size, outer_size=outer_size, shard_multiple=multiple
    )
    return [
        PlannedBuffer(kind, layout, [by_name[slot.name] for slot in layout.slots], make_codec)
        for layout in layouts
    ]


def _kind_of(
    record: ParamRecord, settings: PlanSettings
) -> tuple[BufferKind, Callable[[], ParamCodec]]:
    param = record.shard
    policy = settings.policy
    if any(keeps_statistics(module) for module, _ in record.holders):
        # Batch norm needs weights in the dtype of its running statistics, which no policy casts.
        policy = dataclasses.replace(policy, param_dtype=None)
    dtypes = policy.resolve(param, settings.options.sum_in_fp32)
    of_experts = is_expert(param)
    divisor = float(getattr(param, "gradient_divisor", 1.0))
    if of_experts and settings.axis_plans.expert is not None:
        # An expert gets tokens of all ranks, but only the ranks that share it sum its gradient.
        divisor *= settings.axis_plans.data.num_ranks / settings.axis_plans.expert.num_ranks
    apart = record.name if any(getattr(param, mark, False) for mark in _MARKS_OF_SHARED) else ""
    codec_name, maker = "cast", partial(CastCodec, dtypes.main, dtypes.compute)
    for rule in settings.rules:
        found = rule(record.name, param, dtypes)
        if found is not None:
            codec_name, maker = found  # type: ignore[assignment]
            break
    return BufferKind(codec_name, dtypes, param.requires_grad, divisor, of_experts, apart), maker


def keeps_statistics(module: nn.Module) -> bool:
    """Returns whether ``module`` is a batch norm that keeps running statistics."""
    return isinstance(module, _NormBase) and module.running_mean is not None


def is_expert(param: Tensor) -> bool:
    """Returns whether ``param`` has Megatron-Core's mark of experts, ``allreduce=False``.

    Not all data-parallel ranks share such a parameter.
    """
    return getattr(param, "allreduce", True) is False


def _known_as(record: ParamRecord) -> str:
    """Returns the name of a parameter in the signature, which ranks compare. Experts have one name
    there, because their own names may differ between ranks."""
    return "an expert's parameter" if is_expert(record.param) else record.name


def check_record(record: ParamRecord, settings: PlanSettings) -> None:
    """Check that the engine supports the parameter.

    Raises:
        ValueError: The engine does not support it. The message names the parameter.
    """
    param = record.param
    if any(isinstance(holder, torch.jit.ScriptModule) for holder, _ in record.holders):
        raise ValueError(
            f"{record.name}: expected a parameter of a Python module; found a parameter of a "
            "torch.jit.ScriptModule, which cannot be replaced by a sharded one. Use the module "
            "that was scripted or traced instead"
        )
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{record.name}: expected a parameter with a shape; found a lazy one that no "
            "forward has initialised. Call the model once before shard()"
        )
    if param.is_meta and any(
        getattr(module, "primary_weights_in_fp8", False) for module, _ in record.holders
    ):
        raise ValueError(
            f"{record.name}: expected a module with quantised weights (quantized_model_init) to be "
            "built on a device; found it on the meta device"
        )
    if isinstance(param, FlatDTensor):
        raise ValueError(
            f"{record.name}: expected a parameter that is not sharded yet; found a slice of one "
            "that was sharded before"
        )
    if record.spread is not None:
        param = record.shard
    param_class = param_class_of(param)
    if param_class is not None:
        param_class.check(record.name, param, is_in_dtensor=record.spread is not None)
    elif type(param) not in (Tensor, nn.Parameter, FakeTensor):
        raise ValueError(
            f"{record.name}: expected a plain torch.nn.Parameter; found a {type(param).__name__}. "
            "shard() keeps only the elements of a parameter, so other data of this class would be "
            "lost. Make it a plain parameter before shard(), for example by dequantizing it, or "
            "register it as a buffer"
        )
    else:
        for each in PARAM_CLASSES:
            each.refuse_marked(record.name, param)
    if is_expert(param) and settings.axis_plans.expert is None:
        raise ValueError(
            f"{record.name}: expected expert_mesh, the ranks that share this expert, since it has "
            "allreduce=False; found None"
        )
    puts_off = param.requires_grad and getattr(param, "skip_backward_post_hook", False)
    if puts_off and not any(each.awaits_late_gradients for each in settings.extensions):
        advice = advice_for("delayed weight gradients")
        raise ValueError(
            f"{record.name}: expected an engine that awaits delayed weight gradients, since the "
            "parameter's module delays them (skip_backward_post_hook); found an engine that would "
            f"lose them{advice and '. '}{advice}"
        )


def _check_no_optimizer(records: Sequence[ParamRecord]) -> None:
    names = {id(record.param): record.name for record in records}
    for optimizer, param in find_optimizers(names):
        raise ValueError(
            f"optimizer: expected it to be built after shard(); found one, "
            f"{type(optimizer).__name__}, that already holds {names[param]}"
        )
