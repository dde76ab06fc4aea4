"""Constructs the engine of a model in the first forward of its root module.

Before that, ``model.to(dtype)``, ``model.to_empty(device)`` and similar methods convert units.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.engine import Engine
from fsdp_engine.extension_list import find_module
from fsdp_engine.fsdp2.param_group import ParamGroup, group_of, groups_within
from fsdp_engine.memory import allocator
from fsdp_engine.optim.step_listeners import find_optimizers
from fsdp_engine.options import Timing
from fsdp_engine.patterns import joined_names
from fsdp_engine.runtime.hooks import hooks_of
from fsdp_engine.runtime.inputs import iter_tensors, map_tensors
from fsdp_engine.runtime.not_compiled import not_compiled
from fsdp_engine.runtime.parameter_guard import check_same
from fsdp_engine.units.assignment import collect_records
from fsdp_engine.units.installing import hidden

# The new dtype of each old dtype, for a unit that is moved off the meta device.
_DtypeMap = dict[torch.dtype, torch.dtype]

_thread = threading.local()


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """Implement ``nn.Module._apply`` for parameters that belong to units.

    Converts in place the dtypes of units that have values, and allocates memory for units that are
    moved off the meta device. Parameters remain the same objects. Collective if a dtype changes.

    Args:
        module: The module to convert; ``fully_shard`` was called on it.
        fn: The function that is the argument of ``_apply``.
        apply: ``_apply`` of the module itself, for submodules, buffers and parameters of no unit.

    Raises:
        RuntimeError: A forward or backward of a unit is in progress.
        ValueError: The device would change, or a dtype would change without the extension
            ``conversion``, or the extension raised an error.
    """
    if getattr(_thread, "is_converting", False):
        apply()
        return
    groups = groups_within(module)
    for group in groups:
        if group.unit.uses:
            raise RuntimeError(
                f"conversion of {group.unit.label}: expected no forward or backward of it in "
                "progress; found one"
            )
    allocations = [(group, _new_dtypes(group, fn)) for group in groups]
    conversion = find_module("conversion.dtype_conversion")
    changes: list[Any] = []
    by_ranks: dict[tuple[int, ...], Any] = {}
    for group, dtypes in allocations:
        if not dtypes:
            inside = [each for outer in group.modules for each in outer.modules()]
            if conversion is None:
                check_same(group.unit.buffers, inside, fn)
                continue
            found = list(conversion.changes_of(group.unit, fn, group.resources.options, inside))
            changes += found
            known = by_ranks.setdefault(
                tuple(group.communicators.ranks.ranks), (group.communicators, [])
            )
            known[1].extend(found)
    for communicators, found in by_ranks.values():
        if found:
            conversion.agree_on_changes(communicators, found)
    for group in groups:
        group.unit.release()
    _thread.is_converting = True
    try:
        allocated = [b for group, dtypes in allocations if dtypes for b in group.unit.buffers]
        with hidden([*allocated, *(each.buffer for each in changes)]):
            apply()
    finally:
        _thread.is_converting = False
    for each in changes:
        conversion.convert_buffer(each, are_reduced=False)
    for group, dtypes in allocations:
        if dtypes:
            group.values.drop_pending()
            group.give_memory(dtypes.__getitem__)


def _new_dtypes(group: ParamGroup, fn: Callable[[Tensor], Tensor]) -> _DtypeMap:
    """Returns the new dtype for each dtype of parameters that ``fn`` moves off the meta device;
    empty if it moves none."""
    device = group.resources.memory.device
    found: _DtypeMap = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        if main.is_meta:
            probe = fn(allocator.empty(0, main.dtype, main.device))
            # As in FSDP2, ``fn`` may move to the compute device, or to that of the main weights.
            place = group.own_resources.placement.device_of_main(device)
            if probe.device.type in (device.type, place.type):
                found[main.dtype] = probe.dtype
    return found


def build_engine_on_first_call(group: ParamGroup) -> None:
    """Register hooks that construct the engine, unless it exists, in the first call of one of the
    group's modules, with that module as the root."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        # torch has already listed the hooks of this call, so it does not run those of the engine.
        engine = ensure_engine(module)
        args, kwargs = inputs_on((args, kwargs), engine.mesh.device)
        hooks = hooks_of(module)
        return (args, kwargs) if hooks is None else hooks.before(args, kwargs)

    for module in group.modules:
        handle = module.register_forward_pre_hook(
            not_compiled(before), prepend=True, with_kwargs=True
        )
        # The engine's hook takes the place of this one, so that hooks that users register later
        # receive the module's output after the engine's cast.
        place = module.register_forward_hook(_reserve_position)
        group.first_call_hooks += [(module, handle, place)]


def engine_of(model: nn.Module) -> Engine:
    """Returns the engine of a model, for ``fsdp_engine.Checkpointer`` and other functions that take
    the result of ``fsdp_engine.shard``. Constructs the engine if no forward has run yet.

    Args:
        model: The root module, on which ``fully_shard`` was called. All parameters have values.

    Raises:
        TypeError: ``fully_shard`` was not called on ``model``.
        ValueError: ``model`` is not the root module.
        RuntimeError: Parameters are on the meta device, a submodule was called before the root, or
            an optimizer references parameters that ``fully_shard`` has replaced.
    """
    if not isinstance(model, nn.Module) or group_of(model) is None:
        raise TypeError(
            "model: expected a module on which fully_shard() was called; found a "
            f"{type(model).__name__}"
        )
    engine = ensure_engine(model)
    if engine.model is not model:
        raise ValueError(
            f"model: expected the root module; found a {type(model).__name__} within a "
            f"{type(engine.model).__name__}"
        )
    return engine


def ensure_engine(module: nn.Module) -> Engine:
    """Returns the engine of the unit of ``module``. Constructs it if there is none, with ``module``
    as the root.

    Raises:
        RuntimeError: Parameters are on the meta device, a submodule was called before the root, or
            an optimizer references parameters that ``fully_shard`` has replaced.
    """
    root = group_of(module)
    assert root is not None
    if root.engine is not None:
        return root.engine
    if len(root.modules) > 1:
        raise RuntimeError(
            f"forward of {type(module).__name__}: expected the root module to be a group of its "
            f"own; found a group of {len(root.modules)} modules. Call fully_shard() on the model "
            "as well"
        )
    groups = groups_within(module)
    for group in groups:
        if group.engine is not None:
            raise RuntimeError(
                f"forward of {type(module).__name__}: expected the root module to be called first; "
                f"found that {group.unit.label}, which is inside of it, was called before"
            )
    for group in groups:
        group.values.take_unhooked()
    _rename(module, groups)
    metas = [group.names_on_meta for group in groups if group.names_on_meta]
    if metas:
        more = f" and {sum(map(len, metas[1:]))} more" if len(metas) > 1 else ""
        raise RuntimeError(
            "forward: expected parameters with values. FSDP parameters should be materialized from "
            "meta device before training, but the following were still on meta device: "
            f"{metas[0]}{more}. Call model.to_empty(device=...), then initialize them "
            "(for example, model.init_weights())"
        )
    _check_no_optimizer(groups)
    _check_prefetched(groups)
    engine = Engine(
        module,
        [group.unit for group in groups],
        root.communicators,
        root.resources,
        root.settings.policy,
        Timing(),
    )
    if engine.mesh.device.type != "cpu":
        _move_inputs(module, engine.mesh.device)
    for group in groups:
        group.engine = engine
        for each, handle, place in group.first_call_hooks:
            handle.remove()
            _move_hook(each, place)
        group.first_call_hooks.clear()
    return engine


def inputs_on(inputs: Any, device: torch.device) -> Any:
    """Move the inputs of the root module to the device of its parameters."""
    if all(tensor.device.type == device.type for tensor in iter_tensors(inputs)):
        return inputs
    return map_tensors(lambda tensor: tensor.to(device), inputs)


def _move_inputs(module: nn.Module, device: torch.device) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return inputs_on((args, kwargs), device)

    module.register_forward_pre_hook(not_compiled(before), prepend=True, with_kwargs=True)


def _check_prefetched(groups: Sequence[ParamGroup]) -> None:
    """Check that the modules to prefetch belong to the same model.

    Raises:
        ValueError: A module to prefetch belongs to no unit of the model; the message names the
            module that would prefetch it.
    """
    known = {id(group) for group in groups}
    for group in groups:
        options = group.unit.options
        for each in (*(options.prefetch_in_forward or ()), *(options.prefetch_in_backward or ())):
            if id(each) not in known:
                raise ValueError(
                    f"set_modules_to_forward_prefetch, or ..._backward_..., of {group.unit.label}:"
                    " expected modules within the root module; found one outside of it"
                )


def _reserve_position(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing. This hook reserves the position for the engine's hook."""


def _move_hook(module: nn.Module, place: Any) -> None:
    """Move the engine's forward hook, the last one, to the position of the hook ``place``."""
    hooks: Any = module._forward_hooks
    keys = list(hooks)
    if hooks_of(module) is not None and module._compiled_call_impl is None:
        for key in keys[keys.index(place.id) + 1 : -1]:
            hooks.move_to_end(key)
    place.remove()


def _rename(root: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Rename units and parameters by their names in ``root``."""
    places = {
        (id(module), attribute): record.aliases
        for record in collect_records(root)
        for module, attribute in record.holders
    }
    names = {module: name for name, module in root.named_modules()}
    for group in groups:
        group.unit.rename(joined_names([names[module] for module in group.modules]))
        for buffer in group.unit.buffers:
            for index, record in enumerate(buffer.records):
                module, attribute = record.holders[0]
                record.aliases = list(places[id(module), attribute])
                buffer.rename(index, record.aliases[0])


def _check_no_optimizer(groups: Sequence[ParamGroup]) -> None:
    """Check that no optimizer references parameters that units have replaced. Searches all objects,
    but only if one of these parameters is still alive.

    Raises:
        RuntimeError: An optimizer references such a parameter.
    """
    replaced = [
        (record.name, param)
        for group in groups
        for record, reference in group.replaced
        if (param := reference()) is not None
    ]
    replaced += [each for group in groups for each in group.values.assigned]
    alive = {id(param): name for name, param in replaced}
    if not alive:
        return
    for optimizer, held in find_optimizers(alive):
        raise RuntimeError(
            "optimizer: expected it to be built after fully_shard(), from model.parameters(); "
            f"found a {type(optimizer).__name__} that references {alive[held]} from before the "
            "call, or a tensor that was assigned to it and copied to the sharded parameter"
        )
