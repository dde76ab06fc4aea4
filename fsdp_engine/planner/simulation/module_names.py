"""Finds the names of the modules whose operations run, in forward and in backward.

In forward, and in a recomputed forward, an operation belongs to the innermost module being called.
In backward it belongs to the module that was being called when the autograd node was created. Nodes
have increasing sequence numbers, and the number at each change of module is recorded.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class ModuleNames:
    """Tracks the module whose operations run."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._called: list[str] = []
        self._left = ""  # the module whose call ended last
        self._last = ""
        # Sequence numbers at which the module changes, and the names of the modules.
        self._starts: list[int] = [0]
        self._modules: list[str] = [""]
        self._handles: list[Any] = []
        self._register: Callable[[], None] = lambda: None

    def set_model(self, model: nn.Module) -> None:
        """Set the model whose module names are reported."""
        self._names = {id(module): name for name, module in model.named_modules()}

    def current(self) -> str:
        """Returns the name of the module whose operation runs; "" outside of the model's
        children."""
        if self._called:
            return self._called[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        if torch.is_grad_enabled():  # in a recomputed forward, between calls of modules
            return _parent_of(self._left)
        # Nodes that accumulate gradients have the largest numbers, so they get the last recorded
        # module, which is "".
        return self._modules[bisect_right(self._starts, node._sequence_nr()) - 1]

    def last(self) -> str:
        """Returns the name of the module whose operations run or ran last."""
        self._last = self.current() or self._last
        return self._last

    def restart(self) -> None:
        """Clear the record, at the start of a step."""
        self._starts, self._modules, self._last = [0], [""], ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record calls of modules in this context, by global hooks."""

        def enter(module: nn.Module, args: Any) -> None:
            del args
            self._enter(module)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            del module, args, output
            self._leave()

        def register() -> None:
            self._handles = [
                register_module_forward_pre_hook(enter),
                register_module_forward_hook(leave, always_call=True),
            ]

        self._register = register
        register()
        try:
            yield
        finally:
            self._remove()

    def as_one(self, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``method`` of a compiled module, wrapped so that it runs without the hooks, which
        would be compiled. All of its operations are attributed to the module."""

        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            is_outermost = bool(self._handles)
            self._remove()
            self._enter(module)
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()
                if is_outermost:
                    self._register()

        return wrapper

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        self._called.append(self._called[-1] if name is None and self._called else name or "")
        self._change()

    def _leave(self) -> None:
        if self._called:
            self._left = self._called.pop()
        self._change()

    def _change(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._called[-1] if self._called else "")


def _parent_of(name: str) -> str:
    names = parents_of(name)
    return names[-2] if len(names) > 1 else ""


def parents_of(name: str) -> list[str]:
    """Returns the names of a module and of the modules around it, the outermost first, without
    containers of numbered modules: "layers.3" and "layers.3.mlp" for "layers.3.mlp"."""
    return [name[: match.end()] for match in re.finditer(r"[^.]+(?:\.\d+)*(?=\.|$)", name)]
