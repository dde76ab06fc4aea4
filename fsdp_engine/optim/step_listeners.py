"""Notifies engines before and after each optimizer step.

Version counters do not record all weight updates of optimizers (fused kernels, ``.data``).
Listeners are called in the order of their registration, which is the same on all ranks, because a
listener may issue collectives.

FSDP2's tutorial loads full optimizer state with ``distribute_tensor(value, param.device_mesh,
param.placements)`` for each value, and ``optimizer.load_state_dict``. The results are DTensors over
this rank's slices. Before the next step the engine replaces them by FlatDTensors over the same
memory. The state in a checkpoint of DDP is full; it is replaced by this rank's slices.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.elementwise import slice_of_distributed


def find_optimizers(params: Collection[int]) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Find the optimizers of this process that hold given parameters.

    Args:
        params: ``id``s of the parameters.

    Yields:
        For each such parameter, the optimizer and the ``id`` of the parameter.
    """
    classes = _with_subclasses(torch.optim.Optimizer)
    # torch sets `hooked` on a class's step when the first instance is created. Most jobs have no
    # optimizer when this runs, and skip the scan.
    if not any(hasattr(each.step, "hooked") for each in classes):
        return
    # Types are compared exactly, not with isinstance, because there may be a million objects, and
    # some override __class__.
    for candidate in gc.get_objects():
        if type(candidate) not in classes:
            continue
        for group in vars(candidate).get("param_groups", ()):
            for param in group["params"]:
                if id(param) in params:
                    yield candidate, id(param)


def _with_subclasses(
    base: type[torch.optim.Optimizer],
) -> set[type[torch.optim.Optimizer]]:
    return {base}.union(*map(_with_subclasses, base.__subclasses__()))


# The state of each optimizer when it was last converted. Loading replaces this dict.
_CONVERTED: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def adopt_loaded_state(optimizer: Optimizer, *args: object) -> None:
    """Convert loaded state of sharded parameters to FlatDTensors. A step pre-hook."""
    # A wrapper may have no state of its own. The steps of the wrapped optimizer convert its state.
    state = optimizer.__dict__.get("state")
    if _CONVERTED.get(optimizer) is state:
        return
    _CONVERTED[optimizer] = state
    if not state:
        return
    from fsdp_engine.optim.shadow import StepHook

    # A step hook converts state itself: full state may belong to one rank alone.
    hooks = optimizer._optimizer_step_pre_hooks.values()
    is_converted = any(isinstance(hook, StepHook) for hook in hooks)
    for param, values in state.items():
        if not isinstance(param, FlatDTensor):
            continue
        for key, value in values.items():
            if is_converted and not isinstance(value, DTensor):
                continue
            if (local := _loaded_slice(value, param)) is not None:
                values[key] = FlatDTensor.from_flat_local(local, param.flat_placement)


def _loaded_slice(value: Any, param: FlatDTensor) -> torch.Tensor | None:
    """Returns this rank's slice of a loaded value; None: the value stays as it is."""
    if isinstance(value, DTensor):
        is_flat = isinstance(value, FlatDTensor)
        return None if is_flat else slice_of_distributed(value, param.flat_placement)
    # A number of steps is 0-d, as a scalar parameter is.
    if type(value) is torch.Tensor and value.ndim and value.shape == param.shape:
        return param.flat_placement.slice_of_full(value).clone()
    return None


class Listener(Protocol):
    """Receiver of notifications. Only a weak reference to it is kept."""

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the coming step of an optimizer. An exception prevents the step."""
        ...

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle the end of a step of an optimizer."""
        ...


_LISTENERS: weakref.WeakValueDictionary[int, Listener] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_HOOKS: list[object] = []  # the hooks of all optimizers, registered once for this process
_CHECKS: list[Callable[[Optimizer], None]] = []


def add_step_check(check: Callable[[Optimizer], None]) -> None:
    """Call ``check`` with each optimizer of this process before each of its steps.

    Checks run before listeners. An exception prevents the step.
    """
    if check not in _CHECKS:
        _CHECKS.append(check)


def add_step_listener(listener: Listener) -> None:
    """Notify ``listener`` of the steps of all optimizers of this process.

    ``listener.optimizer_steps`` is called before each step without a closure,
    ``listener.optimizer_stepped`` after each step.
    """
    if not _HOOKS:
        for hook in (_check_step, adopt_loaded_state, _before_step):
            _HOOKS.append(register_optimizer_step_pre_hook(hook))
        _HOOKS.append(register_optimizer_step_post_hook(_after_step))
    _LISTENERS[next(_NUMBERS)] = listener


def _check_step(optimizer: torch.optim.Optimizer, *args: object) -> None:
    for check in _CHECKS:
        check(optimizer)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
        return  # the closure runs backward within the step
    for listener in list(_LISTENERS.values()):
        listener.optimizer_steps(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, *args: object) -> None:
    for listener in list(_LISTENERS.values()):
        listener.optimizer_stepped(optimizer)
