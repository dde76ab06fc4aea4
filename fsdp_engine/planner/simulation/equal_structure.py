"""Compares modules, to find blocks that run equal operations."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# Suffixes of attributes that number blocks, such as "layer_idx".
_NUMBERS = ("idx", "index", "number", "layer_id")


def have_equal_structure(one: Any, other: Any, distance: int | None = None) -> bool:
    """Returns whether two objects are equal in classes, attributes and shapes, except for block
    numbers.

    Args:
        one, other: Modules, or objects that they refer to.
        distance: Difference by which any integer in ``other`` may be larger. None: only attributes
            named like block numbers may differ.
    """
    return _have_equal_structure(one, other, distance, set())


def _have_equal_structure(
    one: Any, other: Any, distance: int | None, seen: set[tuple[int, int]]
) -> bool:
    key = id(one), id(other)
    if one is other or key in seen:
        return True
    if type(one) is not type(other):
        return False
    seen.add(key)
    again = partial(_have_equal_structure, distance=distance, seen=seen)
    if isinstance(one, FakeTensorMode):  # the modes of separately built tensors are equivalent
        return True
    if isinstance(one, Tensor):
        kinds = [(each.shape, each.dtype, each.requires_grad) for each in (one, other)]
        return kinds[0] == kinds[1] and again(vars(one), vars(other))
    if isinstance(one, bool | str):
        return bool(one == other)
    if isinstance(one, int):
        return bool(one == other or other - one == distance)
    if isinstance(one, float):  # drop probabilities may grow with the depth
        return bool(one == other or (one != 0) == (other != 0))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(again, one, other))
    if isinstance(one, Mapping):
        names = [[each for each in mapping if isinstance(each, str)] for mapping in (one, other)]
        if len(one) != len(other) or names[0] != names[1]:
            return False
        pairs = zip(one, one.values(), other.values(), strict=True)
        return all(
            (distance is None and _counts_blocks(name, first)) or again(first, second)
            for name, first, second in pairs
        )
    if isinstance(one, types.FunctionType):
        cells = [each.__closure__ or () for each in (one, other)]
        values = [[cell.cell_contents for cell in each] for each in cells]
        return one.__code__ is other.__code__ and again(*values)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and again(one.__self__, other.__self__)
    if hasattr(one, "__dict__"):
        return again(vars(one), vars(other))
    return bool(one == other)


def _counts_blocks(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, int) and name.endswith(_NUMBERS)
