"""Who is told that an optimizer has stepped.

Optimizers change weights in ways that version counters need not show (fused kernels, ``.data``).
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Listener(Protocol):
    """Is told, as long as somebody else holds it."""

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer of this process has stepped."""
        ...


_LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()
_HOOKS: list[object] = []  # one for this process


def tell_of_steps(listener: Listener) -> None:
    """From now on ``listener`` is told after each step of any optimizer."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_tell))
    _LISTENERS.add(listener)


def _tell(optimizer: torch.optim.Optimizer, *args: object) -> None:
    for listener in _LISTENERS:
        listener.optimizer_stepped(optimizer)
