"""The group of parameters of one ``fully_shard`` call: a unit that is built by the call, and is
managed by an engine from the first forward.

Assignments to a unit's parameters before the engine is constructed support the sequence of FSDP2's
tutorial: ``fully_shard`` on the meta device, ``distribute_tensor`` of each value,
``load_state_dict(assign=True)``, then the optimizer. Assigned values are copied into the existing
parameter objects. For a unit on the meta device they are kept until values for all of its
parameters have been assigned; then the unit's memory is allocated.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.param_and_grad_buffer import FIRST_TAG
from fsdp_engine.buffers.redistribute import MeshCommunicators
from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.comm.groups import Ranks, default_group, timeout_of_group
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.comm.rendezvous import meet, reporting
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.engine import Engine, engine_within
from fsdp_engine.extension_list import find_module, implementation
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.offload import Offload
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.parameter_guard import AssignedValues, Owner, owners_of, watch
from fsdp_engine.runtime.unit import Unit
from fsdp_engine.sharding import axis_plan
from fsdp_engine.strategies import Strategy
from fsdp_engine.units.build import (
    EngineCommunicators,
    Resources,
    agree_on_plan,
    build_unit,
    check_homes,
)
from fsdp_engine.units.dtensors import choose_written, ranks_of_model
from fsdp_engine.units.initial_values import Built, Holdings
from fsdp_engine.units.plan import AxisPlans, Plan, PlanSettings, plan_one


@dataclass(frozen=True)
class _Pending:
    """A value of a parameter on the meta device.

    Attributes:
        value: The assigned tensor.
        places: ``id`` of the module, and attribute, of each place that it was assigned to.
    """

    value: Tensor
    places: frozenset[tuple[int, str]]


class AssignedBeforeEngine:
    """Handles assignments until the engine is constructed; see the module docstring. The engine
    replaces it by its ``ParameterGuard``.

    Args:
        unit: the unit whose parameters are assigned to.
        communicators: Those of the model. Ranks agree on values for tied parameters.
        give_memory: allocates the memory of a unit on the meta device.
    """

    def __init__(
        self, unit: Unit, communicators: EngineCommunicators, give_memory: Callable[[], None]
    ) -> None:
        self._communicators = communicators
        self._give_memory = give_memory
        self._places = owners_of([unit])
        self._values = implementation(AssignedValues)(self._places)
        self._owners = {(id(each.module), each.attribute): each for each in self._places}
        self._pending: dict[int, _Pending] = {}  # by id of the sharded parameter
        for owner in self._places:
            watch(owner.module, self)

    @property
    def assigned(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of users' parameters whose values were copied and that still exist."""
        names = {each.name: _current_name(each) for each in self._places}
        found = ((names[name], reference()) for name, reference in self._values.assigned)
        return [(name, param) for name, param in found if param is not None]

    def is_pending(self, param: Tensor) -> bool:
        """Whether a value was assigned to ``param`` while other values of the unit are missing."""
        return id(param) in self._pending

    def drop_pending(self) -> None:
        """Drop pending values, after the unit's memory was allocated in another way."""
        self._pending.clear()

    def parameter_assigned(self, module: nn.Module, attribute: str, value: Tensor) -> Tensor:
        """Returns the tensor to store in ``module`` when ``value`` is assigned to ``attribute``.

        Collective for each further name of a tied parameter.

        Raises:
            ValueError: the value is not valid for the parameter; names it.
        """
        owner = self._owners.get((id(module), attribute))
        if owner is None or value is None or value is owner.sharded:
            return value
        if owner.sharded.is_meta:
            if not value.is_meta:
                self._keep(owner, value)
            return owner.sharded
        if owner.others:
            self._check_tied(owner, value, owner.sharded)
            return owner.sharded
        return self._values.take(owner, value)

    def module_assigned(self, module: nn.Module, attribute: str, value: nn.Module | None) -> None:
        """Does nothing: modules may be added and removed until the first forward."""

    def take_unhooked(self) -> None:
        """Take values that were assigned without torch's hooks (``module._parameters[...] = ...``).

        Raises:
            ValueError: a value is not valid for its parameter; names it.
        """
        for owner in self._places:
            present = dict.get(owner.module._parameters, owner.attribute)
            if present is not None and present is not owner.full:
                taken = self.parameter_assigned(owner.module, owner.attribute, present)
                owner.module._parameters[owner.attribute] = taken  # type: ignore[assignment]

    def _keep(self, owner: Owner, value: Tensor) -> None:
        self._values.check_value(owner, value, as_tied=True)
        key, place = id(owner.sharded), (id(owner.module), owner.attribute)
        places = frozenset([place])
        known = self._pending.get(key)
        if known is not None and place not in known.places:  # else it replaces the known value
            self._check_tied(owner, value, known.value)
            places |= known.places
        self._pending[key] = _Pending(value.detach(), places)
        self._values.remember(owner, value)
        if len(self._pending) == len({id(each.sharded) for each in self._places}):
            pending = dict(self._pending)
            self.drop_pending()
            self._give_memory()
            with torch.no_grad():
                for each in self._places:
                    each.sharded.copy_(pending[id(each.sharded)].value)

    def _check_tied(self, owner: Owner, value: Tensor, present: Tensor) -> None:
        """Check that all names of a tied parameter get one value. Collective: on some ranks the
        shards may be equal where on others they are not.

        Raises:
            ValueError: ``value`` differs from ``present`` on this rank; names the parameter.
            RuntimeError: it differs on another rank.
        """
        what, ranks = f"assignment to {owner.name}", self._communicators.ranks
        with reporting(what, ranks.ranks):
            if not _has_value(present, value):
                self._values.check_value(owner, value)
        if ranks.control_group is not None:
            timeout = timeout_of_group(ranks.control_group, ranks.device)
            meet(what, ranks.ranks, timeout, groups=self._communicators.groups)


def _has_value(present: Tensor, value: Tensor) -> bool:
    """Whether this rank's elements of ``present`` equal those of ``value``."""
    if value.shape != present.shape or value.is_meta:
        return False
    with torch.no_grad():
        if isinstance(present, FlatDTensor):
            value = present.detach().clone().copy_(value)
        elif getattr(present, "placements", None) != getattr(value, "placements", None):
            present, value = _full(present), _full(value)
    mine, given = _local(present), _local(value)
    dtype = torch.promote_types(mine.dtype, given.dtype)
    return torch.equal(mine.to(dtype), given.to(dtype))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FlatDTensor):
        return tensor.local
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _current_name(owner: Owner) -> str:
    """The parameter's name in the root module once that is known, else in its group."""
    sharded = owner.sharded
    return sharded.flat_placement.name if isinstance(sharded, FlatDTensor) else owner.name


class UsageError(ValueError, AssertionError):
    """An invalid value. Also an AssertionError, which FSDP2 raises, so that code that catches it
    works unchanged."""


WHAT = "fully_shard()"
_STATE = "_fsdp_engine_group"

# For each default process group and device, the resources that its units share while any exists.
_Shared = weakref.WeakValueDictionary[torch.device, Resources]
_RESOURCES: weakref.WeakKeyDictionary[object, _Shared] = weakref.WeakKeyDictionary()

# Users' original parameters that units replaced with sharded ones, while they are referenced.
_REPLACED: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class ParamGroup:
    """See the module docstring.

    Attributes:
        modules: the modules whose calls need the parameters; none is inside another.
        unit: the unit of their parameters.
        communicators: the communicators of the unit's buffers.
        resources: lanes and memory, shared with other units on the device.
        settings: the settings of the unit's plan.
        offload: where the unit's shards lie.
        engine: the unit's engine; None before the first forward.
        replaced: users' original parameters, which the unit's parameters replaced.
        values: handles assignments to the unit's parameters.
        first_call_hooks: (module, handle of the hook that constructs the engine, handle of the hook
            that reserves the position of the engine's forward hook).
        divisor: of sums of gradients; None: the number of ranks.
    """

    modules: Sequence[nn.Module]
    unit: Unit
    communicators: EngineCommunicators
    resources: Resources
    settings: PlanSettings
    offload: Offload
    engine: Engine | None = None
    replaced: list[tuple[ParamRecord, weakref.ref[Tensor]]] = field(default_factory=list)
    first_call_hooks: list[Any] = field(default_factory=list)
    divisor: float | None = None

    def __post_init__(self) -> None:
        self.values = AssignedBeforeEngine(self.unit, self.communicators, self.give_memory)
        for buffer in self.unit.buffers:
            buffer.give_norms_as_dtensors()

    @property
    def index(self) -> int:
        """The unit's index; options of other units refer to the group."""
        return self.unit.index

    @property
    def reshards(self) -> bool:
        """Whether the unit reshards its parameters; options of other units refer to the group."""
        return self.unit.reshards

    @property
    def records(self) -> Iterator[ParamRecord]:
        """Records of the group's parameters."""
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
        same objects, so optimizers may reference them already. Not collective.

        Args:
            dtype_of: maps the dtype of main weights to a new one. None: unchanged.
        """
        resources = self.resources.with_offload(self.offload)
        resources.memory.begin_unit()
        for buffer in self.unit.buffers:
            kind, main = buffer.kind, buffer.kind.dtypes.main
            dtype = main if dtype_of is None else dtype_of(main)
            if dtype == main:
                codec = buffer.weights.codec.converted(kind.dtypes)
            elif (conversion := find_module("conversion.dtype_conversion")) is not None:
                kind, codec = conversion.kind_after(
                    buffer, dtype, self.settings.policy, resources.config
                )
            else:
                raise ValueError(
                    f"{buffer.records[0].name}: expected {main} to stay, without the extension for "
                    f"conversions; found a conversion to {dtype}. Convert the model before "
                    "fully_shard()"
                )
            buffer.rebuild(kind, codec, resources)

    def divide_gradients(self) -> None:
        """Set the divisor of the unit's buffers, if there is one."""
        for buffer in self.unit.trainable if self.divisor is not None else ():
            assert buffer.grads is not None
            assert self.divisor is not None
            buffer.grads.divide_by(self.divisor)


def group_of(module: nn.Module) -> ParamGroup | None:
    """The group of ``module``; None if ``fully_shard`` was not called on it."""
    found: ParamGroup | None = vars(module).get(_STATE)
    return found


def groups_within(module: nn.Module) -> list[ParamGroup]:
    """The distinct groups of ``module`` and its submodules, in module order."""
    found = (group for each in module.modules() if (group := group_of(each)) is not None)
    return list({id(group): group for group in found}.values())


def make_group(
    modules: Sequence[nn.Module],
    mesh: DataMesh,
    levels: Strategy,
    policy: MixedPrecisionPolicy | None,
    offload: Offload,
    ignored: Collection[nn.Parameter],
    error: Exception | None,
) -> ParamGroup:
    """Plan a unit, compare the plans of all ranks, and build it. Collective.

    Args:
        modules: none is inside another.
        mesh: the ranks over which their parameters are sharded.
        levels: of both axes.
        policy: dtypes; None if there is an ``error``.
        offload: where shards lie.
        ignored: parameters that are not sharded.
        error: an error of this rank, to be raised on all ranks.

    Raises:
        Exception: this rank's error or another's, on all ranks, before anything is modified.
    """
    config = DistributedDataParallelConfig()
    axis_plans = AxisPlans(axis_plan(mesh, levels))
    plan: Plan | None = None
    holdings: Holdings | None = None
    signature: list[str] = []
    shared = _RESOURCES.setdefault(default_group(), weakref.WeakValueDictionary())
    resources = shared.get(mesh.device)
    settings: PlanSettings | None = None
    ranks: Ranks = mesh
    try:
        if error is not None:
            raise error
        params = (each for module in modules for each in module.named_parameters())
        ranks = ranks_of_model(params, mesh)
        assert policy is not None
        settings = PlanSettings(policy, config, axis_plans)
        _check_modules(modules)
        plan = plan_one(_label(modules), modules, _UnshardedParams(modules, ignored), settings)
        choose_written(plan.records, mesh, ranks)
        holdings = Holdings(plan, None, compare=mesh.size > 1)
        check_homes(plan, axis_plans, offload, mesh.device)
        signature = [f"{levels}, {policy}, {offload.places}", *plan.signature()]
    except Exception as caught:
        error = caught
    tag = FIRST_TAG if resources is None else resources.next_tag
    _, tag = agree_on_plan(plan, holdings, error, signature, mesh, ranks, WHAT, _check_values, tag)
    assert plan is not None
    assert settings is not None
    if resources is None:
        resources = shared[mesh.device] = Resources(mesh, config)
    resources.next_tag = tag
    communicators = EngineCommunicators(axis_plans, ranks, MeshCommunicators(mesh))
    replaced: list[tuple[ParamRecord, weakref.ref[Tensor]]] = []
    for record in plan.records:
        _REPLACED[id(record.param)] = record.param
        replaced.append((record, weakref.ref(record.param)))
    planned = plan.units[0]
    planned = dataclasses.replace(planned, name=f"{planned.name} ({tag})")
    own = resources.with_offload(offload)
    where = own.on(torch.device("meta")) if plan.on_meta else own
    buffers = build_unit(planned, communicators, where)
    resources.next_tag = where.next_tag
    policy = settings.policy
    unit = Unit(planned, buffers, policy, policy.output_dtype, resources.lanes)
    group = ParamGroup(
        tuple(modules), unit, communicators, resources, settings, offload, replaced=replaced
    )
    for module in modules:
        vars(module)[_STATE] = group
        # torch's composable functions read the registry of a module.
        registry = vars(module).setdefault(REGISTRY_KEY, OrderedDict())
        registry["fully_shard"] = RegistryItem()
    return group


def _check_values(built: Built) -> None:
    """Warn where ranks have built other values.

    Raises:
        ValueError: some ranks have values where others are on the meta device.
    """
    if built.metas_differ:
        raise ValueError(
            "module: expected parameters on the meta device on all ranks, or on none; found that "
            "ranks differ. After to_empty(), set_model_state_dict(..., options=StateDictOptions("
            "full_state_dict=True, broadcast_from_rank0=True)) sends the first rank's values"
        )
    if found := built.other_value():
        warnings.warn(
            f"{found}. Each rank keeps its slice of its own, as with FSDP2: seed all ranks alike, "
            "or give parameters values afterwards",
            stacklevel=2,
        )


def _label(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        name = type(module).__name__
        if group_of(module) is not None:
            raise UsageError(
                "module: expected one that fully_shard() was not called on. Each distinct "
                "composable distributed API can only be applied to a module once. Found a "
                f"{name} that it was called on before"
            )
        if engine_within(module) is not None and not groups_within(module):
            raise ValueError(f"module: expected one that was not given to shard(); found a {name}")
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
                    for owner, attribute in record.owners:
                        self._owned[id(owner), attribute] = group.unit.label
            for each in module.modules():
                if _is_replicated(each):
                    self._skipped |= {id(inner) for inner in each.modules()}

    def __call__(self, record: ParamRecord) -> bool:
        """Whether the call shards the parameter.

        Raises:
            ValueError: the parameter is tied to one that an inner call has sharded.
        """
        if id(record.param) in self._ignored:
            return False
        places = [(id(module), attribute) for module, attribute in record.owners]
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
    """Whether ``torch.distributed._composable.replicate`` was applied to the module."""
    return "replicate" in vars(module).get(REGISTRY_KEY, ())
