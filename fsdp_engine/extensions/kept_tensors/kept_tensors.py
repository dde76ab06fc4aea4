"""Tensors that a module keeps in addition to its output, where a backward of its unit can start.

[Note: Kept tensors]
A module can compute a tensor and keep it: an early exit or an auxiliary loss in an attribute, keys
and values in a cache, the result of a forward hook in a list. If the loss uses such a tensor, the
backward of the unit can start there instead of at an output:

    out = x + f(x); self.kept = self.exit(out); return out

Autograd runs functions in the reverse order of their creation, i.e. of their sequence numbers. The
functions of ``kept`` run before the hook on ``out``. If the loss does not depend on ``out``, that
hook does not run at all. So the hook of outputs is also registered on kept tensors. They are
searched for in attributes of the module and its children, in the arguments, and in containers and
objects that these hold.

A steady forward is not searched. A call is searched if no earlier call has created the same number
of functions, if tensors were found in a call with this number, or if its last function is not that
of an output.

A module can also keep a tensor elsewhere, e.g. in a list of a closure. If the last function of a
call is neither that of an output nor that of a tensor that was found, all objects of the
interpreter are searched, once for each number of functions. If a tensor is found, its unit is no
longer freed. A tensor that is kept elsewhere and was computed before an output is not searched for.
If the loss uses this tensor and not the output, the start of the unit's backward is not detected:
the weights are not gathered, and functions of the backward fail.
"""

from __future__ import annotations

import gc
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.runtime.kept_tensors import KeptTensors, next_function

# Maximum number of objects that a search visits.
_MOST_OBJECTS = 4096
# For each module, the maximum number of different counts of functions that are stored, and the
# maximum number of these counts for which all objects of the interpreter are searched.
_MOST_COUNTS = 64
_MOST_SEARCHES = 8
_NOT_SEARCHED = (
    type(None),
    str,
    bytes,
    int,
    float,
    type,
    nn.Module,
    torch.dtype,
    torch.device,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_PACKAGE = __name__.partition(".")[0] + "."
# Attributes that all modules have, in which no forward keeps tensors.
_OF_ALL_MODULES = frozenset(vars(nn.Module())) - {"_buffers"}


class FoundTensors(KeptTensors):
    """Searches for tensors that modules keep. See [Note: Kept tensors]."""

    def __init__(self) -> None:
        # Whether a search has found tensors, and the text about a tensor that only a search of the
        # interpreter has found (None: none), by the number of functions that a call creates.
        self._are_found: dict[int, bool] = {}
        self._hidden: dict[int, str | None] = {}

    def needs_search(self, began: int, outputs: Iterable[Tensor]) -> bool:
        """See the base class."""
        if super().needs_search(began, outputs):
            return True
        count = next_function() - began
        return count > 0 and self._are_found.get(count, True)

    def search(
        self, began: int, outputs: Collection[Tensor], modules: Iterable[nn.Module], arguments: Any
    ) -> tuple[list[Tensor], str | None]:
        """See the base class."""
        end: int = next_function()
        known = {id(tensor) for tensor in outputs}
        found = {
            id(tensor): tensor
            for tensor in _tensors_in([_own_attributes(modules), arguments])
            if id(tensor) not in known and _number_of(tensor) >= began
        }
        count = end - began
        if count in self._are_found or len(self._are_found) < _MOST_COUNTS:
            self._are_found[count] = bool(found)
        last = max(map(_number_of, (*outputs, *found.values())), default=-1)
        last = max(last, began - 1)
        hidden = self._hidden_after(last, count) if last < end - 1 else None
        return list(found.values()), hidden

    def _hidden_after(self, last: int, count: int) -> str | None:
        if count not in self._hidden:
            if len(self._hidden) == _MOST_SEARCHES:
                return next((text for text in self._hidden.values() if text is not None), None)
            self._hidden[count] = next(
                (
                    f"one of shape {tuple(each.shape)} that is kept elsewhere"
                    for each in gc.get_objects()
                    if type(each) is Tensor and _number_of(each) > last
                ),
                None,
            )
        return self._hidden[count]


def _number_of(tensor: Tensor) -> int:
    if not tensor.requires_grad:
        return -1
    try:
        node: Any = tensor.grad_fn
    except RuntimeError:  # A view of memory that was changed in place in a way that torch refuses.
        return -1
    return -1 if node is None else int(node._sequence_nr())


def _own_attributes(modules: Iterable[nn.Module]) -> list[Any]:
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name not in _OF_ALL_MODULES and not isinstance(value, _NOT_SEARCHED)
    ]


def _tensors_in(roots: list[Any]) -> Iterator[Tensor]:
    """Yields the tensors in ``roots``, their containers and attributes of objects, recursively."""
    stack, seen = list(roots), set[int]()
    while stack and len(seen) < _MOST_OBJECTS:
        each = stack.pop()
        if isinstance(each, Tensor):
            yield each
            continue
        if isinstance(each, _NOT_SEARCHED) or id(each) in seen:
            continue
        if type(each).__module__.startswith(_PACKAGE):
            # The engine's own objects keep no such tensors, and after an access to ``__dict__``
            # CPython reads the attributes of an object more slowly for the rest of its life.
            continue
        seen.add(id(each))
        # Methods of a user's class may raise. iter() avoids __len__, which a tuple may not support.
        with suppress(Exception):
            if isinstance(each, Mapping):
                stack.extend(iter(each.values()))
            elif isinstance(each, (list, tuple, deque, Set)):
                stack.extend(iter(each))
            else:
                stack.extend(getattr(each, "__dict__", {}).values())
                slots = [getattr(kind, "__slots__", ()) for kind in type(each).__mro__]
                names = [name for row in slots for name in ([row] if isinstance(row, str) else row)]
                stack.extend(getattr(each, name, None) for name in names if name != "__dict__")
