"""Arithmetic on records of numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def add_all(*numbers: float) -> float:
    """Returns the sum of numbers."""
    return sum(numbers)


def combined(function: Callable[..., float], *records: T) -> T:
    """Combine the numbers of ``records`` by ``function``, and return the record of the results.

    Args:
        function: Takes one number of each record.
        records: Numbers, or dicts or dataclasses of one class whose values are again records. A
            key that is missing in a dict counts as 0.
    """
    every: tuple[Any, ...] = records
    found: Any
    if isinstance(every[0], Mapping):
        keys = dict.fromkeys(key for each in every for key in each)
        found = {key: combined(function, *(each.get(key, 0) for each in every)) for key in keys}
    elif dataclasses.is_dataclass(every[0]):
        names = [each.name for each in dataclasses.fields(every[0])]
        numbers = {
            name: combined(function, *(getattr(each, name) for each in every)) for name in names
        }
        found = dataclasses.replace(every[0], **numbers)  # type: ignore[type-var]
    else:
        found = function(*every)
    return found  # type: ignore[no-any-return]
