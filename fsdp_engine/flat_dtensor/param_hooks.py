"""Users' hooks on parameters: `register_hook`, `register_post_accumulate_grad_hook`.

Autograd would run them on the unreduced gradient of a full parameter. The engine runs them on the
reduced gradient, at the points where torch does: hooks on gradients on the new gradient, before it
is added to earlier ones; hooks on parameters when ``.grad`` is the sum. Hooks from before ``shard``
are kept in the dictionaries that their handles reference, so that ``handle.remove()`` works.

Sharded parameters register hooks here. For plain parameters torch registers them; they are moved
here when the next backward begins.
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
    """The hooks on the parameters of one buffer.

    Args:
        names: of the parameters.
        originals: the parameters that were passed to ``shard``.
    """

    def __init__(self, names: Sequence[str], originals: Sequence[Tensor]) -> None:
        self._names = names
        # By index of the parameter; one dictionary per registration or move.
        self._on_grad: dict[int, list[Hooks]] = {}
        self._on_param: dict[int, list[Hooks]] = {}
        # For plain parameters the key of the engine's own hook, which is not moved.
        self.own: dict[int, int] = {}
        for index, original in enumerate(originals):
            if original._backward_hooks:
                self._on_grad[index] = [original._backward_hooks]
            if original._post_accumulate_grad_hooks:
                self._on_param[index] = [original._post_accumulate_grad_hooks]

    def add(self, index: int, hook: Callable[..., Any], *, on_param: bool) -> RemovableHandle:
        """Add a hook to parameter ``index``: ``hook(gradient)``, or (``on_param``)
        ``hook(param)``."""
        hooks: Hooks = OrderedDict()
        (self._on_param if on_param else self._on_grad).setdefault(index, []).append(hooks)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def adopt(self, params: Sequence[Any]) -> None:
        """Move hooks from plain parameters to this object, before autograd runs them."""
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
        """Indices of parameters with hooks on their gradients, in ascending order."""
        return sorted(index for index, hooks in self._on_grad.items() if any(hooks))

    @torch.no_grad()
    def run_on_gradients(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(gradient)`` on the new, reduced gradients.

        Raises:
            TypeError: a hook returned neither None nor a gradient of the same shape.
        """
        for index in self.hooked:
            grad = _gradient(params[index])
            for hook in _all(self._on_grad[index]) if grad is not None else ():
                result = hook(grad)
                if result is None or result is grad:
                    continue
                if not isinstance(result, Tensor) or result.shape != grad.shape:
                    found = tuple(result.shape) if isinstance(result, Tensor) else repr(result)
                    raise TypeError(
                        f"hook of {self._names[index]}: expected None or a gradient of shape "
                        f"{tuple(grad.shape)}; found {found}"
                    )
                grad.copy_(result)

    @torch.no_grad()
    def run_on_params(self, params: Sequence[Tensor]) -> None:
        """Run ``hook(param)`` on the parameters whose gradients are accumulated."""
        for index in sorted(self._on_param):
            if _gradient(params[index]) is not None:
                for hook in _all(self._on_param[index]):
                    hook(params[index])


def _gradient(param: Tensor) -> Any:
    """``.grad``; of a FlatDTensor with ``takes_slices``, since masks are equal on all ranks."""
    grad: Any = param.grad
    if grad is not None:
        grad.takes_slices = True
    return grad


def _all(dictionaries: Sequence[Hooks]) -> list[Callable[..., Any]]:
    return [hook for hooks in dictionaries for hook in hooks.values()]
