"""Hooks that users put on parameters: `register_hook`, `register_post_accumulate_grad_hook`.

Autograd would run them on what one rank's backward leaves at a full parameter. Users mean the
gradient: so they run when it has been reduced, as torch runs them: hooks on gradients on the new
gradient alone, before earlier ones are added; hooks on parameters when ``.grad`` is their sum.
Hooks from before ``shard`` are carried over, in the dictionaries that their handles know, so that
``handle.remove()`` works.

A sharded parameter adds hooks here by itself. A plain one is torch's own: what was put on it is
found when the next backward begins, and taken from it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Hooks = MutableMapping[int, Callable[..., Any]]


class ParamHooks:
    """Of the parameters of one buffer.

    Args:
        names: of the parameters.
        originals: the users' parameters, as they were given to ``shard``.
    """

    def __init__(self, names: Sequence[str], originals: Sequence[Tensor]) -> None:
        self._names = names
        # By index of the parameter; several dictionaries where hooks came at several times.
        self._on_grad: dict[int, list[Hooks]] = {}
        self._on_param: dict[int, list[Hooks]] = {}
        # Of plain parameters: the engine's own hook, which stays where it is.
        self.own: dict[int, int] = {}
        for index, original in enumerate(originals):
            if original._backward_hooks:
                self._on_grad[index] = [original._backward_hooks]
            if original._post_accumulate_grad_hooks:
                self._on_param[index] = [original._post_accumulate_grad_hooks]

    def add(self, index: int, hook: Callable[..., Any], *, on_param: bool) -> RemovableHandle:
        """A hook on parameter ``index``: ``hook(gradient)``, or (``on_param``) ``hook(param)``."""
        hooks: Hooks = OrderedDict()
        (self._on_param if on_param else self._on_grad).setdefault(index, []).append(hooks)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def adopt(self, params: Sequence[Any]) -> None:
        """Take hooks from plain parameters, before autograd runs them."""
        for index, param in enumerate(params):
            if param._backward_hooks:
                self._on_grad.setdefault(index, []).append(param._backward_hooks)
                param._backward_hooks = None
            hooks = param._post_accumulate_grad_hooks
            if hooks is not None and len(hooks) > 1 and index in self.own:
                key = self.own[index]
                param._post_accumulate_grad_hooks = OrderedDict({key: hooks.pop(key)})
                self._on_param.setdefault(index, []).append(hooks)

    @property
    def hooked(self) -> Collection[int]:
        """Parameters with hooks on their gradients, by index, in ascending order."""
        return sorted(index for index, hooks in self._on_grad.items() if any(hooks))

    @torch.no_grad()
    def run_on_gradients(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(gradient)`` on the new gradients, which are reduced.

        Raises:
            TypeError: a hook returned something else than None or a gradient of the same shape.
        """
        for index in self.hooked:
            grad = _gradient(params[index])
            for hook in _all(self._on_grad[index]) if grad is not None else ():
                given = hook(grad)
                if given is None or given is grad:
                    continue
                if not isinstance(given, Tensor) or given.shape != grad.shape:
                    found = tuple(given.shape) if isinstance(given, Tensor) else repr(given)
                    raise TypeError(
                        f"hook of {self._names[index]}: expected None or a gradient of shape "
                        f"{tuple(grad.shape)}; found {found}"
                    )
                grad.copy_(given)

    @torch.no_grad()
    def run_on_params(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(param)`` on the parameters whose gradients are accumulated."""
        for index in sorted(self._on_param):
            if _gradient(params[index]) is not None:
                for hook in _all(self._on_param[index]):
                    hook(params[index])


def _gradient(param: Tensor) -> Any:
    """``.grad``. Of a FlatDTensor: masks beside it are the same on every rank."""
    grad: Any = param.grad
    if grad is not None:
        grad.takes_slices = True
    return grad


def _all(dictionaries: Sequence[Hooks]) -> list[Callable[..., Any]]:
    return [hook for hooks in dictionaries for hook in hooks.values()]
