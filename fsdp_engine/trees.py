"""Tensors inside whatever modules take and return: tuples, dicts, dataclasses, any nesting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from iter_tensors(getattr(tree, field.name))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced; parts in which nothing changed are kept as they are.

    Keeping unchanged parts means that a container of a user's own class comes back as the same
    object unless one of its tensors really was replaced.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return type(tree)(items)
    if isinstance(tree, Mapping):
        pairs = {key: map_tensors(function, value) for key, value in tree.items()}
        if all(pairs[key] is value for key, value in tree.items()):
            return tree
        return type(tree)(pairs)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {}
        for field in dataclasses.fields(tree):
            old = getattr(tree, field.name)
            new = map_tensors(function, old)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(tree, **changes) if changes else tree
    return tree
