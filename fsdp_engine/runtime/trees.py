"""Tensors inside whatever modules take and return: tuples, dicts, dataclasses, any nesting."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch


def iter_tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``tree``, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from iter_tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from iter_tensors(item)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from iter_tensors(getattr(tree, field.name, None))


def containers_in(values: Iterable[Any]) -> list[Any]:
    """Those of ``values`` in which :func:`iter_tensors` looks for tensors."""
    return [
        each for each in values if isinstance(each, (list, tuple, Mapping)) or _is_dataclass(each)
    ]


def unknown_part(tree: Any) -> Any:
    """Something in ``tree`` that may hold tensors which nobody here finds; None if nothing does."""
    if isinstance(tree, _SIMPLE):
        return None
    if isinstance(tree, (tuple, list, Mapping)) or _is_dataclass(tree):
        items = tree if isinstance(tree, tuple) else [value for _, value in _slots(tree)]
        return next((part for item in items if (part := unknown_part(item)) is not None), None)
    return tree


_SIMPLE = (torch.Tensor, torch.dtype, torch.device, type(None), int, float, str, bytes, enum.Enum)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced; parts in which nothing changed are kept as they are.

    Keeping unchanged parts means that a container of a user's own class comes back as the same
    object unless one of its tensors really was replaced. No container is changed: see
    :class:`Exchange` for that.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        return _mapped_tuple(partial(map_tensors, function), tree)
    changes = [
        (key, new)
        for key, value in _slots(tree)
        if (new := map_tensors(function, value)) is not value
    ]
    return _changed_copy(tree, changes) if changes else tree


class Exchange:
    """Other tensors in the user's own containers, until it is undone.

    A list, dict or dataclass that a module is given may be what it is to change (a history, a
    cache), so that it has to get that very object. Tuples, and whatever else cannot be changed,
    are copied where a tensor in them is replaced.
    """

    def __init__(self) -> None:
        # Each container with its new values by id, and the old ones.
        self._changed: list[tuple[Any, dict[int, tuple[Any, Any]]]] = []

    def put(self, function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
        """``tree``, with each of its tensors replaced by what ``function`` makes of it."""
        if isinstance(tree, torch.Tensor):
            return function(tree)
        if isinstance(tree, tuple):
            return _mapped_tuple(partial(self.put, function), tree)
        changes = [
            (key, value, new)
            for key, value in _slots(tree)
            if (new := self.put(function, value)) is not value
        ]
        if not changes:
            return tree
        if not _is_mutable(tree):
            return _changed_copy(tree, [(key, new) for key, _, new in changes])
        for key, _, new in changes:
            _set(tree, key, new)
        self._changed.append((tree, {id(new): (new, old) for _, old, new in changes}))
        return tree

    def undo(self) -> None:
        """Put the old values back, wherever in their containers the new ones are by now."""
        for tree, old_of in reversed(self._changed):
            for key, value in _slots(tree):
                if id(value) in old_of:
                    _set(tree, key, old_of[id(value)][1])
        self._changed.clear()


def _mapped_tuple(function: Callable[[Any], Any], tree: tuple[Any, ...]) -> Any:
    items = [function(item) for item in tree]
    if all(new is old for new, old in zip(items, tree, strict=True)):
        return tree
    return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)


def _slots(tree: Any) -> list[tuple[Any, Any]]:
    """What a container holds, with where it holds it; nothing of what is no container."""
    if isinstance(tree, list):
        return list(enumerate(tree))
    if isinstance(tree, Mapping):
        return list(tree.items())
    if _is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return [(name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return []


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _is_mutable(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return isinstance(tree, MutableMapping)
    return isinstance(tree, list) or not type(tree).__dataclass_params__.frozen


def _set(tree: Any, key: Any, value: Any) -> None:
    if isinstance(tree, (list, MutableMapping)):
        tree[key] = value
    else:
        object.__setattr__(tree, key, value)


def _changed_copy(tree: Any, changes: list[tuple[Any, Any]]) -> Any:
    """A copy, of the same type and with all its attributes, in which ``changes`` are made."""
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)({**tree, **dict(changes)})  # type: ignore[call-arg]
    made = copy.copy(tree)
    for key, value in changes:
        _set(made, key, value)
    return made
