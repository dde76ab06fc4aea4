"""``fe.shard``: check the user's arguments on all ranks, then shard the model and build its engine.

No parameter is changed before all ranks have agreed on the plan.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.buffers.sharded_buffer import MeshCommunicators
from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_threads import announce_rank, share_cores
from fsdp_engine.comm.mesh import DataMesh, check_device_mesh, ranks_that_meet
from fsdp_engine.comm.rendezvous import reporting
from fsdp_engine.engine import Engine, engine_within
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import implementation
from fsdp_engine.memory import allocator
from fsdp_engine.options import Options, Timing
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.runtime.unit import make_unit
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.assignment import UnitSelector
from fsdp_engine.units.build import (
    FIRST_PARAMETERS,
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
    Plan,
    PlanSettings,
    label_of,
    make_plan,
)

WHAT = "shard()"
AUTO = "auto"


class SelectsStrategy(Protocol):
    """An object that selects a strategy for the ranks of a job, such as a ``StrategyPlan``."""

    def arguments(
        self, mesh: tuple[int, ...] | None, world_size: int, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the arguments of :func:`shard` that the plan determines.

        Args:
            mesh: Sizes of the mesh. None: any mesh of ``world_size`` ranks.
            world_size: Number of data-parallel ranks.
            given: The user's arguments by name, which override the plan's. A value of None means
                that the argument was not given.
        """


def shard(
    model: nn.Module,
    mesh: DeviceMesh | Sequence[int] | None = None,
    strategy: str | SelectsStrategy | None = None,
    outer_strategy: str | None = None,
    *,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    initial_values: str = SAME,
    expert_mesh: DeviceMesh | None = None,
    options: Options | None = None,
    extensions: Iterable[EngineExtension] = (),
    **deprecated: Any,
) -> Engine:
    """Shard the parameters, gradients and optimizer state of ``model`` in place. Collective.

    Modules keep their class, names and identity. During forward and backward their parameters are
    full tensors. Otherwise each parameter is a ``FlatDTensor``, whose local part is this rank's
    shard. (At "no_shard", without fp32 main weights, parameters stay plain tensors.) Build the
    optimizer after this call, from ``model.parameters()``.

    Example::

        model = MyModel()  # built with the same seed on every rank
        engine = fe.shard(model, strategy="optim_grads_params")
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in loader:
            model(batch).backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: The module to shard. It may be on the meta device.
        mesh: The data-parallel ranks: a ``DeviceMesh`` of one axis, or of two (outer, inner); or
            the sizes of such a mesh over all ranks, such as ``(2, 8)``. With sizes, the ranks of an
            inner group are consecutive. None: all ranks on one axis.
        strategy: Level of the inner axis: "no_shard", "optim", "optim_grads" or
            "optim_grads_params". None: "optim_grads_params". Or a plan returned by ``fe.plan``,
            which must be equal on all ranks: its fastest candidate that fits into memory is used
            (on ``mesh``, if given). The plan also sets ``units``, ``mp_policy`` and ``options``
            unless they are given, and adds its extensions to ``extensions``.
        outer_strategy: Level of the outer axis, at most ``strategy``. None: "no_shard".
        units: Modules that are gathered and reduced together, one or several of: module classes,
            modules, name patterns such as "blocks.*", and functions that take a name and a module
            and return a bool. Each matching module is one unit; all modules that a tuple matches
            form one unit. None: the children of the outermost ``nn.ModuleList`` and
            ``nn.Sequential``, and the modules beside them.
        mp_policy: Dtypes of weights, gradients and reductions. None: forward computes in the dtype
            of each parameter, and bf16 and fp16 parameters have main weights in fp32.
        initial_values: Source of the initial values. "same": all ranks have built the same values;
            the call compares them. If only the first rank has values and the model of the others is
            on the meta device, the values of the first rank are broadcast. "rank0": the parameters
            and buffers of the first rank are broadcast. "empty": as "same", but tensors that are on
            the meta device on all ranks are allocated without values. Load values next: forward
            raises until all are loaded.
        expert_mesh: The data-parallel ranks of each expert, a ``DeviceMesh`` of one or two axes.
            Experts are parameters whose attribute ``allreduce`` is False, and DTensors that are
            sharded over ranks of ``mesh``.
        options: Prefetch window, buckets, granules and other options of the engine.
        extensions: Optional features, at most one of each class, such as ``fe.Float8()`` or
            ``fe.GradientChecks()``. ``docs/internals/extensions.md`` lists them.
        deprecated: Arguments of earlier versions. Each is accepted with a ``DeprecationWarning``
            that names its replacement.

    Returns:
        The engine of the model, with methods for clipping, accumulation, full weights and reports.

    Raises:
        ValueError, TypeError: An argument is invalid, or arguments or initial values differ between
            ranks. Raised on all ranks, before anything is changed.
        Exception: ``units``, the granule or an extension failed on this rank. The other ranks raise
            a RuntimeError that contains the rank and its error.
        RuntimeError: A rank did not call ``shard`` in time. The message names the rank.
    """
    num_rows = 1
    with reporting(WHAT, ranks := ranks_that_meet(mesh if isinstance(mesh, DeviceMesh) else None)):
        given: dict[str, Any] = {
            "mesh": mesh,
            "strategy": strategy,
            "outer_strategy": outer_strategy,
            "units": units,
            "mp_policy": mp_policy,
            "initial_values": initial_values,
            "expert_mesh": expert_mesh,
            "options": options,
            "extensions": extensions,
        }
        if deprecated:
            from fsdp_engine.deprecated_arguments import current_arguments, num_rows_of

            given = current_arguments(given, deprecated, WHAT)
            num_rows = num_rows_of(deprecated)
        if given["strategy"] == AUTO:
            raise ValueError(
                'strategy: expected a level, such as "optim", or the result of fe.plan(); found '
                '"auto"'
            )
        if is_plan(given["strategy"]):
            given |= _planned(given, len(ranks))
        mesh = given["mesh"]
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            num_rows = max(_rows_of(mesh, len(ranks)), num_rows)
        levels = Strategy.from_names(
            "optim_grads_params" if given["strategy"] is None else given["strategy"],
            "no_shard" if given["outer_strategy"] is None else given["outer_strategy"],
        )
        check_types(model, given["mp_policy"], given["options"])
        selected = check_extensions(given["extensions"])
    return make_engine(
        model,
        mesh if isinstance(mesh, DeviceMesh) else None,
        levels,
        given["mp_policy"] or MixedPrecisionPolicy(),
        given["options"] or Options(),
        Timing(),
        units=given["units"],
        expert_mesh=given["expert_mesh"],
        initial_values=given["initial_values"],
        extensions=selected,
        num_rows=num_rows,
    )


def is_plan(strategy: object) -> bool:
    """Returns whether an argument ``strategy`` is a plan, which also determines other arguments."""
    return hasattr(strategy, "arguments")


def _planned(given: Mapping[str, Any], num_ranks: int) -> dict[str, Any]:
    """Returns the arguments that the plan in ``given`` determines."""
    if given["outer_strategy"] is not None:
        raise ValueError(
            "outer_strategy: expected None with a plan as strategy; found "
            f"{given['outer_strategy']!r}"
        )
    mesh = given["mesh"]
    sizes = tuple(mesh.mesh.shape) if isinstance(mesh, DeviceMesh) else mesh
    named = {
        name: value or None
        for name, value in given.items()
        if name not in ("mesh", "strategy", "outer_strategy")
    }
    found: dict[str, Any] = given["strategy"].arguments(
        None if sizes is None else tuple(sizes), num_ranks, named
    )
    return found


def _lines(name: str, value: Any) -> list[str]:
    """Returns a line for each field in the repr of a dataclass, so that an error can name the field
    that differs between ranks."""
    shown = [each.name for each in dataclasses.fields(value) if each.repr]
    return [f"{name}.{each}={getattr(value, each)!r}" for each in shown]


def _refuse_renormalized_rows(model: nn.Module) -> None:
    """Check that no embedding has ``max_norm``, which renormalizes the rows of each rank's batch.

    Raises:
        ValueError: An embedding has ``max_norm``. The message names it.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"{name}.weight: expected an embedding without max_norm, which renormalizes the "
                "rows of each rank's own batch, so that ranks would have different weights; found "
                f"max_norm={module.max_norm}. Renormalize all rows after optimizer steps instead: "
                "torch.renorm within engine.unsharded()"
            )


def _warn_of_memory_format(records: Iterable[ParamRecord]) -> None:
    """Warn once if parameters have a memory format of channels, which slices cannot have."""
    for record in records:
        param, number = record.param, record.param.dim()
        memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(number)
        if memory_format is None or param.is_contiguous():
            continue
        if param.is_contiguous(memory_format=memory_format):
            warnings.warn(
                f"{record.name}: expected a row-major parameter; found {memory_format}. The engine "
                "stores all parameters row-major, with the same results. Convert the input instead "
                f"of the model: x.to(memory_format={memory_format})",
                stacklevel=5,
            )
            return


@allocator.ordinary_tensors()
def make_engine(
    model: nn.Module,
    mesh: DeviceMesh | None,
    levels: Strategy,
    policy: MixedPrecisionPolicy,
    options: Options,
    timing: Timing,
    *,
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    expert_mesh: DeviceMesh | None = None,
    initial_values: str = SAME,
    extensions: Sequence[EngineExtension] = (),
    num_rows: int = 1,
    what: str = WHAT,
) -> Engine:
    """Plan the units, agree on the plan with all ranks, and build the engine. Collective.

    Args:
        timing: When gradients are reduced and weights are gathered.
        num_rows: Size of the outer axis, if ``mesh`` has one axis or is None. Consecutive ranks
            form an inner group.
        initial_values: As for :func:`shard`, or ``FIRST_PARAMETERS``.
        what: The name of the function that the user has called, for messages.
        model, mesh, levels, policy, options, units, expert_mesh, extensions: See :func:`shard`.
    """
    if expert_mesh is not None:
        with reporting(what, ranks_that_meet(mesh)):
            check_device_mesh(expert_mesh, "expert_mesh")
    notes = [] if expert_mesh is None else ["an expert_mesh"]
    notes += [f"{each.signature()} at {levels}" for each in extensions if each.divides_mesh]
    data = DataMesh.create(mesh, num_instances=num_rows, what=what, note="; ".join(notes))
    for extension in extensions:
        data = extension.mesh_of_engine(data, levels)
    experts = None
    if expert_mesh is not None:
        experts = DataMesh.create(expert_mesh, what=f"expert_mesh of {what}")
    plan: Plan | None = None
    values: InitialValues | None = None
    signature: list[str] = []
    setup: EngineSetup | None = None
    error: Exception | None = None
    ranks: Ranks = data.part_of or data
    broadcasts = initial_values == FIRST_PARAMETERS
    choice = SAME if broadcasts else initial_values
    try:
        ranks = ranks_of_model(model.named_parameters(), data, experts)
        if experts is not None:
            mark_experts(model.parameters(), data)
        axis_plans = AxisPlans(
            axis_plan(data, levels), axis_plan(experts, levels) if experts is not None else None
        )
        if (name := engine_within(model) or owned_within(model)) is not None:
            raise ValueError(
                "model: expected modules that no engine has sharded; found "
                f"{name}, which another engine has sharded"
            )
        if data.size > 1:
            _refuse_renormalized_rows(model)
        settings = PlanSettings(policy, options, axis_plans, extensions)
        plan = make_plan(model, units, settings)
        _warn_of_memory_format(plan.records)
        setup = EngineSetup(model, units, settings, plan, data, experts)
        for each in extensions:
            each.check(setup)
        choose_written(plan.records, data, ranks)
        kind = implementation(InitialValues)
        values = kind(setup, choice, from_first=broadcasts)
        signature = [
            f"strategy={levels}",
            f"initial_values={initial_values!r}",
            *_lines("mp_policy", policy),
            *_lines("options", options),
            *(each.signature() for each in extensions),
            *plan.signature(),
        ]
    except Exception as caught:  # user code (units, granule, codec rules) may raise any exception
        error = caught
    computes_here = data.device.type == "cpu"
    if computes_here:
        announce_rank()
    values, _ = agree_on_plan(values, error, signature, data, data.part_of or ranks, what)
    if computes_here:
        share_cores()
    assert plan is not None
    assert setup is not None
    if experts is not None:
        from fsdp_engine.units.experts import place_experts

        place_experts(model, plan.records, data, experts)
    expert_communicators = MeshCommunicators(experts) if experts is not None else None
    communicators = EngineCommunicators(
        axis_plans, ranks, MeshCommunicators(data), expert_communicators
    )
    memories = [each.memory(setup) for each in extensions]
    memory = next((each for each in memories if each is not None), None)
    resources = Resources(data, options, memory)
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


def check_extensions(extensions: object) -> tuple[EngineExtension, ...]:
    """Returns the extensions as a tuple.

    Raises:
        TypeError: ``extensions`` is not iterable, or contains an object that is not an extension.
        ValueError: Two extensions have the same class.
    """
    if not isinstance(extensions, Iterable):
        raise TypeError(f"extensions: expected a sequence of extensions; found {extensions!r}")
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
    """Returns the sizes of the axes of ``mesh``, and the levels along the axes."""
    sizes = {axis: mesh.axis(axis).size for axis in Axis}
    return AxisPlan(sizes, levels.on(mesh.outer.size))


def _sharder_of(module: nn.Module) -> str | None:
    """Returns the part of torch that has sharded the parameters of ``module``; None: none has."""
    package = __name__.partition(".")[0]
    for kind in type(module).__mro__:
        if kind.__module__.startswith(f"{package}."):
            return None  # this package replaces torch's class by a subclass
        if kind.__module__.startswith("torch.distributed.fsdp."):
            is_wrapper = kind.__name__ == "FullyShardedDataParallel"
            return kind.__name__ if is_wrapper else "torch's fully_shard"
    return None


def check_types(model: object, policy: object, options: object = None) -> None:
    """Raise TypeError unless each argument has its type. ``policy`` and ``options`` may be None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; found {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "model: expected the module itself; found it within DistributedDataParallel, which "
            "shard() replaces. Pass model.module"
        )
    for name, module in model.named_modules():
        if (sharder := _sharder_of(module)) is not None:
            raise TypeError(
                "model: expected modules with full parameters; found "
                f"{label_of(name)}, whose parameters {sharder} has sharded. Do not apply {sharder} "
                "to the model: shard() replaces it"
            )
    check_policy_and_options(policy, options)


def check_policy_and_options(policy: object, options: object) -> None:
    """Raise TypeError unless each argument has its type or is None."""
    if policy is not None and not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy or None; found {policy!r}")
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options: expected an fe.Options or None; found {options!r}")


def _rows_of(sizes: object, num_ranks: int) -> int:
    """Returns the size of the outer axis of a mesh with ``sizes`` over all ranks.

    Raises:
        TypeError, ValueError: ``sizes`` are not one or two sizes of a mesh of ``num_ranks`` ranks.
    """
    is_sizes = isinstance(sizes, list | tuple) and all(isinstance(size, int) for size in sizes)
    if not is_sizes:
        raise TypeError(
            "mesh: expected a DeviceMesh, sizes such as (2, 8) (a tuple or list of integers), or "
            f"None; found {sizes!r}"
        )
    assert isinstance(sizes, list | tuple)
    if len(sizes) not in (1, 2) or math.prod(sizes) != num_ranks or min(sizes) < 1:
        raise ValueError(
            f"mesh: expected one or two sizes, with a product of {num_ranks} (the ranks); found "
            f"{tuple(sizes)}"
        )
    return sizes[0] if len(sizes) == 2 else 1


def keeps_after_forward(asked: object, size: int, levels: Strategy) -> bool:
    """Returns whether FSDP2's ``reshard_after_forward`` keeps full parameters after forward.

    Args:
        asked: The value of ``reshard_after_forward``: True, False, a number of ranks, or None. None
            has the effect of True, and is also legal where parameters are not sharded.
        size: Number of ranks that share a parameter.
        levels: The levels of the engine.

    Raises:
        ValueError: ``asked`` is none of these, does not divide ``size``, or is True where
            parameters are not sharded.
    """
    if asked is None or isinstance(asked, bool):
        if asked is True and levels.depth(Role.PARAM) == 0:
            raise ValueError(
                f"reshard_after_forward: expected None or False, since strategy {levels} keeps "
                "parameters full; found True"
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
            f"reshard_after_forward={asked}: parameters are resharded to all {size} ranks instead "
            f"of {asked}. This takes less memory and more communication, with the same results. To "
            "shard within a node only, give a 2-D mesh (HSDP)",
            stacklevel=3,
        )
    return asked == 1
