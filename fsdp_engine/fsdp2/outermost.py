"""The first forward of the outermost module puts an engine over all units beneath it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_engine.config import Timing
from fsdp_engine.engine import Engine
from fsdp_engine.fsdp2.group import Group, group_of, groups_within
from fsdp_engine.optimizer.alive import optimizers_that_hold
from fsdp_engine.patterns import joined_names
from fsdp_engine.planning.assignment import collect_records
from fsdp_engine.runtime.hooks import hooks_of, not_compiled
from fsdp_engine.runtime.trees import iter_tensors, map_tensors


def await_first_call(group: Group) -> None:
    """Whichever of the group's modules is called first, being the outermost, makes the engine."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        # This call's hooks were listed before there were any of the engine's.
        engine = ensure_engine(module)
        args, kwargs = moved((args, kwargs), engine.mesh.device)
        hooks = hooks_of(module)
        return (args, kwargs) if hooks is None else hooks.before(args, kwargs)

    for module in group.modules:
        handle = module.register_forward_pre_hook(
            not_compiled(before), prepend=True, with_kwargs=True
        )
        # Hooks that users register from here on see what the unit's modules return, cast.
        place = module.register_forward_hook(_keep_place)
        group.first_calls += [(module, handle, place)]


def ensure_engine(module: nn.Module) -> Engine:
    """The engine over the unit of ``module``; if there is none, it is made, with ``module`` as the
    outermost.

    Raises:
        RuntimeError: parameters are on the meta device; something beneath was called before by
            itself; an optimizer holds parameters as they were before ``fully_shard``.
    """
    root = group_of(module)
    assert root is not None
    if root.engine is not None:
        return root.engine
    if len(root.modules) > 1:
        raise RuntimeError(
            f"forward of {type(module).__name__}: expected the outermost module to be a group of "
            f"its own; found a group of {len(root.modules)}. Call fully_shard() on the model, too"
        )
    groups = groups_within(module)
    for group in groups:
        if group.engine is not None:
            raise RuntimeError(
                f"forward of {type(module).__name__}: expected the outermost module to be called "
                f"first; found {group.unit.label} in it, which was called before by itself"
            )
    for group in groups:
        group.values.take_all()
    _name(module, groups)
    metas = [group.metas for group in groups if group.metas]
    if metas:
        more = f" and {sum(map(len, metas[1:]))} more" if len(metas) > 1 else ""
        raise RuntimeError(
            "forward: expected parameters with values. FSDP parameters should be materialized from "
            "meta device before training, but the following were still on meta device: "
            f"{metas[0]}{more}. Call model.to_empty(device=...), then give them values "
            "(model.init_weights(), say)"
        )
    _check_no_optimizer(groups)
    _check_ahead(groups)
    engine = Engine(
        module,
        [group.unit for group in groups],
        root.ladders,
        root.resources,
        root.settings.policy,
        Timing(),
    )
    if engine.mesh.device.type != "cpu":
        _move_inputs(module, engine.mesh.device)
    for group in groups:
        group.engine = engine
        for each, handle, place in group.first_calls:
            handle.remove()
            _move_hook(each, place)
        group.first_calls.clear()
    return engine


def moved(inputs: Any, device: torch.device) -> Any:
    """Inputs of the outermost module, on its parameters' device."""
    if all(tensor.device.type == device.type for tensor in iter_tensors(inputs)):
        return inputs
    return map_tensors(lambda tensor: tensor.to(device), inputs)


def _move_inputs(module: nn.Module, device: torch.device) -> None:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved((args, kwargs), device)

    module.register_forward_pre_hook(not_compiled(before), prepend=True, with_kwargs=True)


def _check_ahead(groups: Sequence[Group]) -> None:
    """What is to be gathered ahead must be of the same model."""
    known = {id(group) for group in groups}
    for group in groups:
        options = group.unit.options
        for each in (*(options.prefetch_in_forward or ()), *(options.prefetch_in_backward or ())):
            if id(each) not in known:
                raise ValueError(
                    f"set_modules_to_forward_prefetch, or ..._backward_..., of {group.unit.label}:"
                    " expected modules within the outermost one; found another"
                )


def _keep_place(module: nn.Module, args: Any, output: Any) -> None:
    """Stands where the engine's hook will."""


def _move_hook(module: nn.Module, place: Any) -> None:
    """Put the engine's hook on forwards, the last one, where ``place`` is kept for it."""
    hooks: Any = module._forward_hooks
    keys = list(hooks)
    if hooks_of(module) is not None and module._compiled_call_impl is None:
        for key in keys[keys.index(place.id) + 1 : -1]:
            hooks.move_to_end(key)
    place.remove()


def _name(root: nn.Module, groups: Sequence[Group]) -> None:
    """Units and parameters get the names that they have in ``root``."""
    places = {
        (id(module), attribute): record.aliases
        for record in collect_records(root)
        for module, attribute in record.owners
    }
    names = {module: name for name, module in root.named_modules()}
    for group in groups:
        built = group.unit.built
        name = joined_names([names[module] for module in group.modules])
        group.unit.built = dataclasses.replace(built, name=name)
        for buffer in group.unit.buffers:
            for index, record in enumerate(buffer.records):
                module, attribute = record.owners[0]
                record.aliases = list(places[id(module), attribute])
                buffer.rename(index, record.aliases[0])


def _check_no_optimizer(groups: Sequence[Group]) -> None:
    """No optimizer may hold what units have replaced. (Only if somebody holds it at all are all
    objects looked through.)"""
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
    for optimizer, held in optimizers_that_hold(alive):
        raise RuntimeError(
            "optimizer: expected it to be built after fully_shard(), from model.parameters(); "
            f"found a {type(optimizer).__name__} that holds {alive[held]} as it was before, or a "
            "tensor that was assigned to it, whose values the sharded parameter has taken"
        )
