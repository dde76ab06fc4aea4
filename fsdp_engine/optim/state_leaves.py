"""State of a parameter as optimizers keep it: any values in nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or None."""
    return value is None or isinstance(value, bool | int | float | complex | str)


class TensorLeaf(NamedTuple):
    """A tensor in the state of a parameter, as ranks that do not own it know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class NumberLeaf(NamedTuple):
    """A number in the state of a parameter, whose value ranks exchange after each step."""

    kind: type


class OtherLeaf(NamedTuple):
    """Another object in the state of a parameter, that ranks exchange when it changes."""

    value: Any


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves of dicts, lists and tuples, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_of(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from leaves_of(value)
    else:
        yield tree


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """The same containers with changed leaves."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(change, value) for value in tree)
    return change(tree)


def described(value: Any) -> Any:
    """What other ranks know of a value in the state of a parameter."""
    if isinstance(value, Tensor):
        return TensorLeaf(tuple(value.shape), value.dtype)
    if isinstance(value, bool | int | float):
        return NumberLeaf(type(value))
    return OtherLeaf(value if value is None or isinstance(value, str) else type(value).__name__)
