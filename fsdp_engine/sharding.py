"""From a user's arguments to an engine: all is checked, on all ranks, before anything moves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.buffers.redistribute import MeshCommunicators
from fsdp_engine.codecs import CodecRule
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_threads import announce_rank, share_cores
from fsdp_engine.comm.mesh import DataMesh, check_device_mesh, ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.config import DistributedDataParallelConfig, Timing
from fsdp_engine.engine import Engine, engine_within
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_name, implementation
from fsdp_engine.memory import allocator
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.unit import make_unit
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.build import (
    SAME,
    EngineCommunicators,
    EngineSetup,
    InitialValues,
    Resources,
    agree_on_plan,
    build_units,
    owned_within,
)
from fsdp_engine.units.dtensors import choose_written, mark_experts, ranks_of_model
from fsdp_engine.units.plan import (
    AxisPlan,
    AxisPlans,
    Granule,
    Plan,
    PlanSettings,
    make_plan,
    place_experts,
)

WHAT = "shard()"
AUTO = "auto"


class Chooses(Protocol):
    """Knows which strategy to take: a :class:`~fsdp_engine.planner.strategy_plan.StrategyPlan`."""

    def arguments(
        self, mesh: tuple[int, ...] | None, world_size: int, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of :func:`shard` for a mesh of these sizes, or for so many ranks, with those
        that are given."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh | Sequence[int] | None = None,
    strategy: str | None = None,
    outer_strategy: str | None = None,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    config: DistributedDataParallelConfig | None = None,
    granule: Granule | None = None,
    *,
    expert_mesh: DeviceMesh | None = None,
    codec_rules: Iterable[CodecRule] = (),
    initial_values: str = SAME,
    min_unit_size: int | None = None,
    checkpointing: object = False,
    offload: EngineExtension | None = None,
    plan: Chooses | None = None,
    extensions: Iterable[EngineExtension] = (),
) -> Engine:
    """Shard ``model``'s parameters, gradients and optimizer state in place. Collective.

    Modules keep their class, names and identity. Outside forward and backward their parameters
    are :class:`FlatDTensor`\\ s over this rank's slices (plain tensors if nothing is sharded and
    main weights are compute weights). Create the optimizer afterwards.

    Args:
        model: any module, also on the meta device.
        mesh: data-parallel ranks, (inner,) or (outer, inner), or the sizes of such a mesh of all
            ranks with consecutive inner ranks. None: all ranks on one axis.
        strategy: level of the inner axis: "no_shard", "optim", "optim_grads" or
            "optim_grads_params". None: that of ``config``, else "optim_grads_params". "auto": the
            fastest of ``plan`` that fits, on ``mesh`` if given.
        outer_strategy: level of the outer axis, at most ``strategy``. None: that of ``config``,
            else "no_shard".
        units: modules that are gathered and reduced together: see
            :func:`~.assignment.find_units`.
        mp_policy: dtypes. None: each parameter's own, with fp32 main weights.
        config: all other options.
        granule: ``granule(name, parameter)`` returns a number of elements that divides the
            parameter; so many consecutive elements are always on one rank.
        expert_mesh: data-parallel ranks of each expert, (inner,) or (outer, inner). Experts are
            parameters whose attribute ``allreduce`` is False, and DTensors that are sharded over
            ranks of ``mesh``.
        codec_rules: functions that select the codec of a parameter's all-gather. The first result
            other than None is used, else the cast to the compute dtype.
        initial_values: "same": all ranks have built the same values, which is checked; if only
            the first rank has values and others are on the meta device, the first rank's are
            broadcast unit by unit. "rank0": the first rank's parameters and buffers are broadcast
            to all ranks. "empty": as "same", but tensors that are on the meta device on all ranks
            are allocated and not initialized, to be loaded next; until they are loaded, forwards
            and saves raise.
        min_unit_size: default units of fewer elements are joined with their neighbours; 0: no
            unit is joined. None: [Note: Size of a unit] in ``units/assignment.py``.
        checkpointing: recompute the forward of blocks in backward; see
            :func:`~fsdp_engine.checkpoint_units`. "selective": but for outputs of attention kernels
            and of every second matrix product. A :class:`Checkpointing`: of each k-th block, or
            by another policy. "offload", or an :class:`OffloadActivations`: the tensors that these
            blocks save for backward are in pinned host memory until then.
        offload: an :class:`~fsdp_engine.Offload`, where state lies between its uses. None: on the
            device.
        plan: the result of :func:`~fsdp_engine.plan` for ``strategy="auto"``, equal on all ranks;
            its candidates with as many data-parallel ranks as ``mesh`` are meant.
            It also determines ``checkpointing``, and those of ``units``, ``mp_policy``, ``config``,
            ``granule``, ``codec_rules`` and ``min_unit_size`` that are not given.
        extensions: features beside plain training, at most one of each class.

    Raises:
        ValueError, TypeError: an argument is invalid, or arguments or initial values differ
            between ranks; on all ranks, before anything is changed.
        Exception: an error of ``units``, ``granule`` or a codec rule, on its rank; on the others a
            RuntimeError with that rank and error.
        RuntimeError: a rank did not come; names it.
    """
    if strategy == AUTO or plan is not None:
        is_mesh = isinstance(mesh, DeviceMesh)
        with reporting(WHAT, ranks := ranks_that_meet(mesh if is_mesh else None)):
            chooses = _chooses(strategy, outer_strategy, plan)
            given_here = {
                "units": units,
                "mp_policy": mp_policy,
                "config": config,
                "granule": granule,
                "codec_rules": tuple(codec_rules) or None,
                "min_unit_size": min_unit_size,
                "checkpointing": checkpointing or None,
                "initial_values": initial_values,
                "expert_mesh": expert_mesh,
                "offload": offload,
                "extensions": tuple(extensions) or None,
            }
            arguments = chooses.arguments(_sizes_of(mesh), len(ranks), given_here)
        return shard(model, arguments.pop("mesh", mesh), **arguments)
    rows = 1
    with reporting(WHAT, ranks := ranks_that_meet(mesh if isinstance(mesh, DeviceMesh) else None)):
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            rows = _rows_of(mesh, len(ranks))
        given = config if config is not None else DistributedDataParallelConfig()
        check_types(model, mp_policy, given)
        options = given.checked()
        named = (
            options.level_names if options.names_strategy else ("optim_grads_params", "no_shard")
        )
        inner, outer = (
            said if given is None else given
            for given, said in zip((strategy, outer_strategy), named, strict=True)
        )
        levels = Strategy.from_names(inner, outer)
        _check_agreement(options, strategy, outer_strategy)
        rules = tuple(codec_rules)
        asked = (*_offload_of(offload), *options.to_extensions(), *_activations(checkpointing))
        selected = check_extensions([*asked, *extensions])
    return make_engine(
        model,
        mesh if isinstance(mesh, DeviceMesh) else None,
        levels,
        mp_policy if mp_policy is not None else MixedPrecisionPolicy(),
        options,
        Timing(),
        units=units,
        granule=granule,
        expert_mesh=expert_mesh,
        codec_rules=rules,
        initial_values=initial_values,
        min_unit_size=min_unit_size,
        extensions=selected,
        num_rows=rows,
    )


def _refuse_renormalized_rows(model: nn.Module) -> None:
    """Check that no embedding renormalizes the rows of each rank's own batch.

    Raises:
        ValueError: one does; names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name}.weight: expected an embedding without max_norm, which renormalizes the "
                "rows of each rank's own batch, so that ranks would have different weights; found "
                f"max_norm={module.max_norm}. Renormalize all rows after optimizer steps instead: "
                "torch.renorm within engine.unsharded()"
            )


@allocator.ordinary_tensors()
def make_engine(
    model: nn.Module,
    mesh: DeviceMesh | None,
    levels: Strategy,
    policy: MixedPrecisionPolicy,
    config: DistributedDataParallelConfig,
    timing: Timing,
    *,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    granule: Granule | None = None,
    expert_mesh: DeviceMesh | None = None,
    codec_rules: Sequence[CodecRule] = (),
    initial_values: str = SAME,
    min_unit_size: int | None = None,
    extensions: Sequence[EngineExtension] = (),
    num_rows: int = 1,
    broadcast: bool = False,
    what: str = WHAT,
) -> Engine:
    """Plan, agree on the plan with all ranks, build. Collective.

    Args:
        timing: when gradients are reduced and weights gathered.
        num_rows: without a mesh: ranks of the outer axis, each with as many consecutive ones; where
            it is 1, as many as ``config`` says.
        broadcast: parameters start from the first rank's values, which are not compared.
        what: who asks, in messages.
        model, mesh, levels, policy, config, units, granule, expert_mesh, codec_rules,
            initial_values, min_unit_size, extensions: see :func:`shard`.
    """
    if expert_mesh is not None:
        with reporting(what, ranks_that_meet(mesh)):
            check_device_mesh(expert_mesh)
    num_instances = num_rows if num_rows > 1 else config.num_distributed_optimizer_instances
    note = "" if expert_mesh is None else "an expert_mesh"
    data = DataMesh.create(mesh, num_instances=num_instances, what=what, note=note)
    experts = None
    if expert_mesh is not None:
        experts = DataMesh.create(expert_mesh, what=f"expert_mesh of {what}")
    plan: Plan | None = None
    values: InitialValues | None = None
    signature: list[str] = []
    setup: EngineSetup | None = None
    error: Exception | None = None
    ranks: Ranks = data
    try:
        ranks = ranks_of_model(model.named_parameters(), data, experts)
        if experts is not None:
            mark_experts(model.parameters(), data)
        axis_plans = AxisPlans(
            axis_plan(data, levels), axis_plan(experts, levels) if experts is not None else None
        )
        if (name := engine_within(model) or owned_within(model)) is not None:
            raise ValueError(
                "model: expected one that was not sharded before; found "
                f"{name} in the hands of another engine"
            )
        if data.size > 1:
            _refuse_renormalized_rows(model)
        policy = config.applied_to(policy)
        rules = [*codec_rules, *(rule for each in extensions for rule in each.codec_rules)]
        settings = PlanSettings(
            policy, config, axis_plans, granule, rules, min_unit_size=min_unit_size
        )
        plan = make_plan(model, units, settings)
        setup = EngineSetup(model, units, plan, axis_plans, data, experts)
        for each in extensions:
            each.check(setup)
        choose_written(plan.records, data, ranks)
        kind = implementation(InitialValues)
        values = kind(plan, initial_values, data, experts, from_first=broadcast)
        options = f"{levels}, {policy}, {config}, {initial_values}, min_unit_size={min_unit_size}"
        options += "".join(f", {each.signature()}" for each in extensions)
        signature = [options, *plan.signature()]
    except Exception as caught:  # units, granule and codec rules are the user's, and raise anything
        error = caught
    computes_here = data.device.type == "cpu"
    if computes_here:
        announce_rank()
    values, _ = agree_on_plan(values, error, signature, data, ranks, what)
    if computes_here:
        share_cores()
    assert plan is not None
    assert setup is not None
    if experts is not None:
        place_experts(model, plan.records, data, experts)
    expert_communicators = MeshCommunicators(experts) if experts is not None else None
    communicators = EngineCommunicators(
        axis_plans, ranks, MeshCommunicators(data), expert_communicators
    )
    memories = [each.memory(setup) for each in extensions]
    memory = next((each for each in memories if each is not None), None)
    resources = Resources(data, config, memory)
    for extension in extensions:
        extension.prepare(setup, resources)
    built = build_units(plan, communicators, resources, values)
    made = [
        make_unit(
            planned, buffers, policy, policy.output_dtype if not index else None, resources.lanes
        )
        for index, (planned, buffers) in enumerate(zip(plan.units, built, strict=True))
    ]
    engine = Engine(model, made, communicators, resources, policy, timing)
    for extension in extensions:
        extension.start(engine)
    values.started(engine)
    return engine


def _activations(checkpointing: object) -> list[EngineExtension]:
    """Returns the extension that the argument of :func:`shard` selects."""
    return [] if checkpointing is False else [find_name("ActivationSettings")(checkpointing)]


def check_extensions(extensions: Iterable[object]) -> tuple[EngineExtension, ...]:
    """Returns the extensions as a tuple.

    Raises:
        TypeError: An object is no extension.
        ValueError: Two are of one class.
    """
    found: dict[type, EngineExtension] = {}
    for each in extensions:
        if not isinstance(each, EngineExtension):
            raise TypeError(
                f"extensions: expected objects such as fe.GradientChecks(); found {each!r}"
            )
        if type(each) in found:
            raise ValueError(
                f"extensions: expected at most one {type(each).__name__}; found "
                f"{found[type(each)]!r} and {each!r}"
            )
        found[type(each)] = each
    return tuple(found.values())


def axis_plan(mesh: DataMesh, levels: Strategy) -> AxisPlan:
    """The axes of ``mesh`` with the levels along them."""
    sizes = {axis: mesh.axis(axis).size for axis in Axis}
    return AxisPlan(sizes, levels.on(mesh.outer.size))


def check_types(model: object, policy: object, config: object) -> None:
    """Raise TypeError for an argument of another type."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; found {type(model).__name__}")
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy or None; found {policy!r}")
    if not isinstance(config, DistributedDataParallelConfig):
        raise TypeError(
            f"config: expected a DistributedDataParallelConfig or None; found {config!r}"
        )


def _offload_of(offload: object) -> list[EngineExtension]:
    """Returns the extension that the argument ``offload`` is.

    Raises:
        TypeError: it is another object.
    """
    if offload is None:
        return []
    kind = find_name("Offload")
    if kind is None or not isinstance(offload, EngineExtension) or not isinstance(offload, kind):
        raise TypeError(f"offload: expected an fe.Offload or None; found {offload!r}")
    return [offload]


def _sizes_of(mesh: DeviceMesh | Sequence[int] | None) -> tuple[int, ...] | None:
    if mesh is None:
        return None
    return tuple(mesh.mesh.shape) if isinstance(mesh, DeviceMesh) else tuple(mesh)


def _rows_of(sizes: object, num_ranks: int) -> int:
    """Ranks of the outer axis, of a mesh of all ranks that has these sizes."""
    is_sizes = isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes)
    if not is_sizes:
        raise TypeError(
            "mesh: expected a DeviceMesh, sizes such as (2, 8), or None; "
            f"found {type(sizes).__name__}"
        )
    assert isinstance(sizes, list | tuple)
    if len(sizes) not in (1, 2) or math.prod(sizes) != num_ranks or min(sizes) < 1:
        raise ValueError(
            f"mesh: expected one or two sizes of {num_ranks} ranks; found {tuple(sizes)}"
        )
    return sizes[0] if len(sizes) == 2 else 1


def _chooses(strategy: str | None, outer_strategy: str | None, plan: Chooses | None) -> Chooses:
    """``plan``, if it and "auto" are given together, and nothing else that says the levels."""
    if strategy != AUTO:
        raise ValueError(f'strategy: expected "auto" with a plan; found {strategy!r}')
    if plan is None:
        raise ValueError('plan: expected what fe.plan found, for strategy="auto"; found None')
    if outer_strategy is not None:
        raise ValueError(
            f'outer_strategy: expected None with strategy="auto"; found {outer_strategy!r}'
        )
    return plan


def _check_agreement(
    config: DistributedDataParallelConfig, strategy: str | None, outer_strategy: str | None
) -> None:
    """An argument and the config must not name different levels."""
    if not config.names_strategy:
        return
    given = (("strategy", strategy), ("outer_strategy", outer_strategy))
    for (name, value), said in zip(given, config.level_names, strict=True):
        if value is not None and value != said:
            raise ValueError(
                f"{name}: expected None, or {said!r} as the config says; found {value!r}"
            )


def keeps_after_forward(asked: object, size: int, levels: Strategy) -> bool:
    """Whether full parameters are kept after forward, by FSDP2's ``reshard_after_forward``.

    Args:
        asked: the argument: True, False, a number of ranks, or None, which is True.
        size: ranks that share a parameter.
        levels: those of the engine.

    Raises:
        ValueError: ``asked`` is none of these, no divisor of ``size``, or True where parameters
            are not sharded.
    """
    if asked is None or isinstance(asked, bool):
        if asked is True and levels.depth(Role.PARAM) == 0:
            raise ValueError(
                f"reshard_after_forward: expected None or False, since {levels} keeps parameters "
                "full; found True"
            )
        return asked is False
    if not isinstance(asked, int):
        raise ValueError(
            f"reshard_after_forward: expected a bool, a number of ranks or None; found {asked!r}"
        )
    if asked < 1 or size % asked:
        raise ValueError(
            f"reshard_after_forward: expected a divisor of the {size} ranks that share a "
            f"parameter; found {asked}"
        )
    if asked not in (1, size):
        warnings.warn(
            f"reshard_after_forward={asked}: parameters are resharded to all {size} ranks and "
            "gathered from them in backward: results are the same, less memory is held, more is "
            "sent. To hold parameters within a node only, give a 2-D mesh (HSDP)",
            stacklevel=3,
        )
    return asked == 1
