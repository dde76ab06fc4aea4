"""Functions for the state of a parameter: values in nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a string or None."""
    return value is None or isinstance(value, bool | int | float | complex | str)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists and tuples, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_of(value)
    elif type(tree) in (list, tuple):
        for value in tree:
            yield from leaves_of(value)
    else:
        yield tree


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a copy of nested dicts, lists and tuples, with ``change`` applied to each leaf."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(change, value) for value in tree)
    return change(tree)
