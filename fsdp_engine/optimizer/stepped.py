"""Notifies engines before and after each optimizer step.

Optimizers change weights in ways that version counters need not show (fused kernels, ``.data``).
Listeners are called in the order in which they were registered, which is the same on all ranks: a
listener may issue collectives.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_engine.optimizer.loaded_state import adopt_loaded_state
from fsdp_engine.optimizer.sharded_step import refuse_blockwise


class Listener(Protocol):
    """An object to notify; it is held weakly."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of this process is about to step; an error keeps it from that."""
        ...

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of this process has stepped."""
        ...


_LISTENERS: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_HOOKS: list[object] = []  # one of each kind for this process


def tell_of_steps(listener: Listener) -> None:
    """Call ``listener.optimizer_steps`` before each step without a closure of any optimizer of
    this process, and ``listener.optimizer_stepped`` after each step."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(refuse_blockwise))
        _HOOKS.append(register_optimizer_step_pre_hook(adopt_loaded_state))
        _HOOKS.append(register_optimizer_step_pre_hook(_tell_before))
        _HOOKS.append(register_optimizer_step_post_hook(_tell))
    _LISTENERS[next(_NUMBERS)] = listener


def _tell_before(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
        return  # the backward of a closure is still to come
    for listener in list(_LISTENERS.values()):
        listener.optimizer_steps(optimizer)


def _tell(optimizer: torch.optim.Optimizer, *args: object) -> None:
    for listener in list(_LISTENERS.values()):
        listener.optimizer_stepped(optimizer)
