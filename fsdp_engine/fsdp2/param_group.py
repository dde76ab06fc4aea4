"""The parameters of one ``fully_shard`` call. The call builds their unit, and an engine manages the
unit from the first forward on.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

from fsdp_engine.buffers.param_and_grad_buffer import FIRST_TAG
from fsdp_engine.buffers.sharded_buffer import MeshCommunicators
from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.comm.groups import Ranks, default_group
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.engine import Engine, engine_within
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_module
from fsdp_engine.options import Options
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.unit import Unit, make_unit
from fsdp_engine.sharding import axis_plan
from fsdp_engine.strategies import Strategy
from fsdp_engine.units.assignment import check_memory, collect_records
from fsdp_engine.units.build import (
    SAME,
    EngineCommunicators,
    EngineSetup,
    InitialValues,
    Resources,
    agree_on_plan,
    build_unit,
)
from fsdp_engine.units.dtensors import choose_written, ranks_of_model, set_spreads
from fsdp_engine.units.plan import (
    AxisPlans,
    Plan,
    PlannedUnit,
    PlanSettings,
    check_record,
    plan_buffers,
)


class NoAssignedValues:
    """The plain handler of values that users assign to a unit's parameters before the engine is
    constructed. This handler ignores them; the handler of an extension copies them to the sharded
    parameters.

    Attributes:
        assigned: Name and tensor of each assigned value that was copied and still exists.
    """

    assigned: Sequence[tuple[str, Tensor]] = ()

    def is_pending(self, param: Tensor) -> bool:
        """Returns whether a value was assigned to ``param`` but other values of the unit are
        missing."""
        return False

    def drop_pending(self) -> None:
        """Drop pending values. Called after another operation has allocated the unit's memory."""

    def take_unhooked(self) -> None:
        """Take values that were assigned without torch's hooks (``module._parameters[...] = ...``).

        Raises:
            ValueError: A value is not valid for its parameter; the message names the parameter.
        """


class UsageError(ValueError, AssertionError):
    """Error for an invalid value. It is also an AssertionError, because FSDP2 raises one and
    existing code may catch it."""


WHAT = "fully_shard()"
_STATE = "_fsdp_engine_group"

# Resources by default process group and device. Units share the resources and keep them alive.
_Shared = weakref.WeakValueDictionary[torch.device, Resources]
_RESOURCES: weakref.WeakKeyDictionary[object, _Shared] = weakref.WeakKeyDictionary()

# Users' original parameters that units replaced with sharded ones, by id. Weak references.
_REPLACED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class ParamGroup:
    """The parameters of one ``fully_shard`` call; see the module docstring.

    Attributes:
        modules: The modules whose calls need the parameters. None of them is inside another.
        unit: The unit of the modules' parameters.
        communicators: The communicators of the unit's buffers.
        resources: Lanes and memory, shared with other units on the device.
        settings: The settings of the unit's plan.
        own_resources: A copy of ``resources`` with the memory placement of the unit's shards.
        engine: The unit's engine; None before the first forward.
        replaced: Weak references to users' original parameters, which the unit's parameters
            replaced.
        values: The handler of assignments to the unit's parameters before the engine is
            constructed.
        first_call_hooks: Tuples (module, handle of the hook that constructs the engine, handle of
            the hook that reserves the position of the engine's forward hook).
        divisor: The divisor of sums of gradients; None: the number of ranks.
        requires_gradient_sync: The last value that ``set_requires_gradient_sync`` has set.
    """

    modules: Sequence[nn.Module]
    unit: Unit
    communicators: EngineCommunicators
    resources: Resources
    settings: PlanSettings
    own_resources: Resources
    engine: Engine | None = None
    replaced: list[tuple[ParamRecord, weakref.ref[Tensor]]] = field(default_factory=list)
    first_call_hooks: list[Any] = field(default_factory=list)
    divisor: float | None = None
    requires_gradient_sync: bool = True

    def __post_init__(self) -> None:
        self.values: Any = NoAssignedValues()
        if (found := find_module("parameter_guard.before_engine")) is not None:
            arguments = (self.unit, self.communicators, self.give_memory)
            self.values = found.AssignedBeforeEngine(*arguments)
        for buffer in self.unit.buffers:
            buffer.give_norms_as_dtensors()

    @property
    def index(self) -> int:
        """The unit's index. It is read by units whose options list this group for prefetching."""
        return self.unit.index

    @property
    def reshards(self) -> bool:
        """Whether the unit reshards its parameters. It is read by other units, like ``index``."""
        return self.unit.reshards

    @property
    def records(self) -> Iterator[ParamRecord]:
        """The records of the group's parameters."""
        return (record for buffer in self.unit.buffers for record in buffer.records)

    @property
    def names_on_meta(self) -> list[str]:
        """Names of parameters on the meta device to which no value was assigned."""
        return [
            record.name
            for buffer in self.unit.buffers
            for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
            if param.is_meta and not self.values.is_pending(param)
        ]

    def give_memory(self, dtype_of: Callable[[torch.dtype], torch.dtype] | None = None) -> None:
        """Allocate uninitialized memory for a unit on the meta device. The parameters remain the
        same objects, because optimizers may already reference them. Not collective.

        Args:
            dtype_of: Function that maps the dtype of main weights to a new one. None: no change.

        Raises:
            ValueError: A dtype changes, and the extension for conversions is missing.
        """
        resources = self.own_resources
        resources.memory.begin_unit()
        for buffer in self.unit.buffers:
            kind, main = buffer.kind, buffer.kind.dtypes.main
            dtype = main if dtype_of is None else dtype_of(main)
            if dtype == main:
                codec = buffer.weights.codec.converted(kind.dtypes)
            elif (conversion := find_module("conversion.dtype_conversion")) is not None:
                kind, codec = conversion.kind_after(
                    buffer, dtype, self.settings.policy, resources.options
                )
            else:
                raise ValueError(
                    f"{buffer.records[0].name}: expected the dtype to stay {main}, since the "
                    f"extension for conversions is missing; found a conversion to {dtype}. Convert "
                    "the model before fully_shard()"
                )
            buffer.rebuild(kind, codec, resources)

    def divide_gradients(self) -> None:
        """Set the divisor of the gradients in the unit's buffers, if the user has set one."""
        for buffer in self.unit.trainable if self.divisor is not None else ():
            assert buffer.grads is not None
            assert self.divisor is not None
            buffer.grads.divide_by(self.divisor)


def group_of(module: nn.Module) -> ParamGroup | None:
    """Returns the group of ``module``; None if ``fully_shard`` was not called on it."""
    found: ParamGroup | None = vars(module).get(_STATE)
    return found


def groups_within(module: nn.Module) -> list[ParamGroup]:
    """Returns the distinct groups of ``module`` and its submodules, in module order."""
    found = (group for each in module.modules() if (group := group_of(each)) is not None)
    return list({id(group): group for group in found}.values())


def make_group(
    modules: Sequence[nn.Module],
    mesh: DataMesh,
    levels: Strategy,
    policy: MixedPrecisionPolicy | None,
    extensions: Sequence[EngineExtension],
    ignored: Collection[nn.Parameter],
    error: Exception | None,
) -> ParamGroup:
    """Plan a unit, compare the plans of all ranks, and build it. Collective.

    Args:
        modules: The modules of the unit. None of them is inside another.
        mesh: The ranks over which the parameters are sharded.
        levels: The levels of both axes.
        policy: The policy of dtypes; None if there is an ``error``.
        extensions: The extensions of the unit.
        ignored: Parameters not to shard.
        error: An error of this rank, which all ranks raise.

    Raises:
        Exception: The error of this or another rank. All ranks raise, before anything is modified.
    """
    options = Options()
    axis_plans = AxisPlans(axis_plan(mesh, levels))
    plan: Plan | None = None
    values: InitialValues | None = None
    signature: list[str] = []
    shared = _RESOURCES.setdefault(default_group(), weakref.WeakValueDictionary())
    resources = shared.get(mesh.device)
    settings: PlanSettings | None = None
    setup: EngineSetup | None = None
    ranks: Ranks = mesh
    try:
        if error is not None:
            raise error
        params = (each for module in modules for each in module.named_parameters())
        ranks = ranks_of_model(params, mesh)
        assert policy is not None
        settings = PlanSettings(policy, options, axis_plans)
        _check_modules(modules)
        plan = _plan_one(_label(modules), modules, _UnshardedParams(modules, ignored), settings)
        choose_written(plan.records, mesh, ranks)
        setup = EngineSetup(plan.root, None, settings, plan, mesh)
        values = _OwnValues(setup, SAME)
        for each in extensions:
            each.check(setup)
        given = [levels, policy, *(each.signature() for each in extensions)]
        signature = [", ".join(map(str, given)), *plan.signature()]
    except Exception as caught:
        error = caught
    tag = FIRST_TAG if resources is None else resources.next_tag
    _, tag = agree_on_plan(values, error, signature, mesh, ranks, WHAT, tag)
    assert plan is not None
    assert settings is not None
    assert setup is not None
    if resources is None:
        resources = shared[mesh.device] = Resources(mesh, options)
    resources.next_tag = tag
    communicators = EngineCommunicators(axis_plans, ranks, MeshCommunicators(mesh))
    replaced: list[tuple[ParamRecord, weakref.ref[Tensor]]] = []
    for record in plan.records:
        _REPLACED[id(record.param)] = record.param
        replaced.append((record, weakref.ref(record.param)))
    planned = plan.units[0]
    planned = dataclasses.replace(planned, name=f"{planned.name} ({tag})")
    own = copy(resources)
    for each in extensions:
        each.prepare(setup, own)
    where = own.on(torch.device("meta")) if plan.on_meta else own
    buffers = build_unit(planned, communicators, where)
    resources.next_tag = where.next_tag
    policy = settings.policy
    unit = make_unit(planned, buffers, policy, policy.output_dtype, resources.lanes)
    group = ParamGroup(
        tuple(modules), unit, communicators, resources, settings, own, replaced=replaced
    )
    for module in modules:
        vars(module)[_STATE] = group
        # torch's composable functions read the registry of a module.
        registry = vars(module).setdefault(REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = RegistryItem()
    return group


def _plan_one(
    name: str,
    modules: Sequence[nn.Module],
    is_free: Callable[[ParamRecord], bool],
    settings: PlanSettings,
) -> Plan:
    """Plan one unit. Changes nothing and communicates nothing.

    Args:
        name: The name of the unit in messages.
        modules: The modules of the unit. None of them is inside another.
        is_free: Predicate of the parameters that belong to the unit; it may raise.
        settings: The policy, the options and the axes of the plan.

    Raises:
        ValueError: A parameter cannot be sharded, two parameters share memory, or only some
            parameters are on the meta device.
    """
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    records = [record for record in collect_records(root) if is_free(record)]
    set_spreads(records)
    for record in records:
        check_record(record, settings)
    check_memory(root, records)
    metas = [record.name for record in records if record.param.is_meta]
    if metas and len(metas) < len(records):
        other = next(record.name for record in records if not record.param.is_meta)
        raise ValueError(
            f"{other}: expected all parameters of {name} on the meta device, or none; found this "
            f"one with values and {metas[0]} without"
        )
    unit = PlannedUnit(name, modules, plan_buffers(records, settings))
    return Plan([unit], records, on_meta=bool(metas))


class _OwnValues(InitialValues):
    """Initial values of FSDP2: each rank keeps its slices of its own values, or all parameters are
    on the meta device."""

    def __init__(self, setup: EngineSetup, choice: str) -> None:
        super().__init__(setup, choice)
        self._mesh = setup.data
        self._comparison = find_module("initial_values.comparison")
        self._holdings: Any = None
        self.note = setup.plan.on_meta, {}
        if self._comparison is not None:
            self._holdings = self._comparison.Holdings(
                setup.plan, None, compare=setup.data.size > 1
            )
            self.note = setup.plan.on_meta, self._holdings.digests

    def decide(
        self, notes: Sequence[Any], all_notes: Sequence[Any], ranks: Ranks, what: str
    ) -> InitialValues:
        """Keep each rank's own values, and warn if the ranks' values differ.

        Raises:
            ValueError: Parameters have values on some ranks and are on the meta device on others.
        """
        differ, found = len({on_meta for on_meta, _ in notes}) > 1, ""
        if self._comparison is not None:
            digests = [digests for _, digests in notes]
            comparison = self._comparison.Comparison(self._holdings, digests, self._mesh)
            differ |= comparison.metas_differ
            found = "" if differ else comparison.other_value()
        if differ:
            raise ValueError(
                "module: expected parameters on the meta device on all ranks, or on none; found "
                "that ranks differ. After to_empty(), set_model_state_dict(..., options="
                "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)) sends the "
                "first rank's values"
            )
        if found:
            warnings.warn(
                f"{found}. Each rank keeps the slice of its own values, as with FSDP2. Use the "
                "same seed on all ranks, or set the values afterwards",
                stacklevel=2,
            )
        return self


def _label(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        name = type(module).__name__
        if group_of(module) is not None:
            raise UsageError(
                "module: expected one that fully_shard() was not called on. Each distinct "
                "composable distributed API can only be applied to a module once. Found a "
                f"{name} on which it was called before"
            )
        if engine_within(module) is not None and not groups_within(module):
            raise ValueError(
                f"module: expected one that was not passed to shard(); found a sharded {name}"
            )
        ran = next((group for group in groups_within(module) if group.engine is not None), None)
        if ran is not None:
            raise ValueError(
                f"module: expected fully_shard() on {name} before any forward of its submodules; "
                f"found {ran.unit.label}, whose forward has run"
            )


class _UnshardedParams:
    """Callable that selects the parameters to shard in a call of ``fully_shard``."""

    def __init__(self, modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> None:
        self._ignored = {id(param) for param in ignored}
        self._owned: dict[tuple[int, str], str] = {}
        self._skipped: set[int] = set()
        for module in modules:
            for group in groups_within(module):
                for record in group.records:
                    for owner, attribute in record.holders:
                        self._owned[id(owner), attribute] = group.unit.label
            for each in module.modules():
                if _is_replicated(each):
                    self._skipped |= {id(inner) for inner in each.modules()}

    def __call__(self, record: ParamRecord) -> bool:
        """Returns whether this call of ``fully_shard`` shards the parameter.

        Raises:
            ValueError: The parameter is tied to a parameter that an earlier call has sharded.
        """
        if id(record.param) in self._ignored:
            return False
        places = [(id(module), attribute) for module, attribute in record.holders]
        owners = {self._owned[place] for place in places if place in self._owned}
        if all(place in self._owned for place in places):
            return False
        if owners or _REPLACED.get(id(record.param)) is record.param:
            of_unit = f" of {min(owners)}" if owners else ""
            raise ValueError(
                f"{record.name}: expected a parameter that no earlier fully_shard() sharded; found "
                f"one tied to a parameter{of_unit} that was sharded before. Pass the modules that "
                "share it to one call: fully_shard([embedding, head])"
            )
        return not all(module in self._skipped for module, _ in places)


def _is_replicated(module: nn.Module) -> bool:
    """Returns whether ``torch.distributed._composable.replicate`` was applied to the module."""
    return "replicate" in vars(module).get(REGISTRY_KEY, ())
