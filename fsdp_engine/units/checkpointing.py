"""Activation checkpointing of units: backward recomputes their forward.

Only the forward method of the instance is replaced: classes, names and hooks, and the arguments of
hooks, are unchanged, so a model may be sharded before or after. The recomputation runs within the
unit's backward, in which its full parameters are gathered anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_engine.units.assignment import (
    UnitSelector,
    collect_records,
    find_units,
    reads_weights_in_backward,
)

# Arguments by which layers of ``transformers`` fill a cache of keys and values. A second run would
# fill it twice, so that its own checkpointing leaves them out, too.
_NO_CACHE = {
    "use_cache": False,
    "past_key_values": None,
    "past_key_value": None,
    "layer_past": None,
}


def checkpoint_units(
    model: nn.Module, units: UnitSelector | Iterable[UnitSelector] | None = None
) -> tuple[str, ...]:
    """Checkpoint the activations of every module that is a unit of :func:`~fsdp_engine.shard`.

    Their forwards run under ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``: between
    forward and backward only their inputs are kept, and backward runs the forward again, with the
    same random numbers. Without autograd they run as they are. Call it before or after ``shard``;
    modules that are checkpointed already stay as they are.

    By default these are the blocks (the children of every ``nn.ModuleList`` and
    ``nn.Sequential``), each by itself, also where ``shard`` joins several in one unit. Not what
    lies beside them, and not embeddings, which keep nothing. Of units within each other the
    outermost is. Caches of keys and values that are given to a layer of ``transformers`` stay
    empty in such a forward.

    Args:
        model: any module.
        units: as for ``shard``, which should be given the same.

    Returns:
        Names of the modules that are checkpointed, in module order; none if nothing says what a
        block is.

    Raises:
        TypeError: ``model`` is no module, or a selector none; see
            :func:`~.assignment.find_units`.
        ValueError: a selector matches nothing; see there.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module; found {type(model).__name__}")
    blocks = find_blocks(model, units)
    for module in blocks.values():
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            # What users have set themselves is run, too.
            module.forward = CheckpointedForward(module, vars(module).get("forward"))
    return tuple(blocks)


def find_blocks(
    model: nn.Module, units: UnitSelector | Iterable[UnitSelector] | None
) -> dict[str, nn.Module]:
    """Returns the modules that :func:`checkpoint_units` checkpoints by name, in module order.

    Args:
        model, units: see there.
    """
    chosen: dict[str, nn.Module] = {}
    for unit in find_units(model, units, collect_records(model)):
        loose = {id(module) for module in unit.loose}
        for name, module in zip(unit.names, unit.modules, strict=True):
            if id(module) not in loose and reads_weights_in_backward(module):
                chosen[name] = module
    places = {id(module): place for place, module in enumerate(model.modules())}
    inside = {
        id(inner) for each in chosen.values() for inner in each.modules() if inner is not each
    }
    outermost = {name: module for name, module in chosen.items() if id(module) not in inside}
    return dict(sorted(outermost.items(), key=lambda item: places[id(item[1])]))


class WrappedForward:
    """In place of a module's ``forward``. A copied or unpickled module has one of its own.

    Args:
        module: whose.
        own: the forward that this instance has instead of its class's; None: it has none.
    """

    def __init__(self, module: nn.Module, own: Callable[..., Any] | None) -> None:
        self._module = module
        self._own = own

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that it wraps."""
        if self._own is not None:
            return self._own
        forward: Callable[..., Any] = type(self._module).forward.__get__(self._module)
        return forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


class CheckpointedForward(WrappedForward):
    """A forward that backward runs again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        kwargs |= {name: value for name, value in _NO_CACHE.items() if name in kwargs}
        # Bound, since `checkpoint` has keywords of its own.
        function = partial(self.original, **kwargs) if kwargs else self.original
        return checkpoint(function, *args, use_reentrant=False)
