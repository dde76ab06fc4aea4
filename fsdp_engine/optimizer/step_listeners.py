"""Notifies engines before and after each optimizer step.

Version counters do not record all weight updates of optimizers (fused kernels, ``.data``).
Listeners are called in the order of their registration, which is the same on all ranks, because a
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
    """Receiver of the notifications. Held by a weak reference."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any optimizer of this process steps. An exception prevents the step."""
        ...

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after any optimizer of this process has stepped."""
        ...


_LISTENERS: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_HOOKS: list[object] = []  # registered once for this process


def add_step_listener(listener: Listener) -> None:
    """Notify ``listener`` of the steps of all optimizers of this process.

    ``listener.optimizer_steps`` is called before each step without a closure,
    ``listener.optimizer_stepped`` after each step.
    """
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(refuse_blockwise))
        _HOOKS.append(register_optimizer_step_pre_hook(adopt_loaded_state))
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))
    _LISTENERS[next(_NUMBERS)] = listener


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
        return  # the closure will run the backward within the step
    for listener in list(_LISTENERS.values()):
        listener.optimizer_steps(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *args: object) -> None:
    for listener in list(_LISTENERS.values()):
        listener.optimizer_stepped(optimizer)
