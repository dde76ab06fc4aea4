"""Checks of arguments that planning and simulations share: each error names the argument, what was
expected and what was found."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def check_count(name: str, value: object, expected: str) -> None:
    """Raises:
    TypeError: ``value`` is no whole number.
    ValueError: it is less than 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, a whole number; found {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected {expected}; found {value!r}")


def check_memory(value: object) -> None:
    """Raises:
    TypeError: it is no number.
    ValueError: it is not positive, or not finite.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"memory: expected a number of bytes, such as 80e9; found {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"memory: expected bytes, more than 0; found {value!r}")


def check_callable(name: str, value: object, expected: str) -> None:
    """Raises:
    TypeError: ``value`` cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def listed(name: str, value: object, expected: str) -> list[Any]:
    """The items of ``value``.

    Raises:
        TypeError: it has none: no sequence, or a string.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")
    return list(value)


def check_sizes(name: str, sizes: tuple[Any, ...], expected: str) -> None:
    """Sizes of one or two axes.

    Raises:
        TypeError: one is no whole number.
    """
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name}: expected {expected}; found {sizes}")


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raises:
    TypeError: ``value`` is of another type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def read_json(path: str | Path, expected: str) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        OSError: there is no such file.
        TypeError: ``path`` is no path.
        ValueError: it has no JSON, or no object.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of {expected}; found {path!r}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bytes that are no text, no JSON, too deep
        raise ValueError(f"{path}: expected {expected}; found {error!r}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected {expected}; found a {type(content).__name__}")
    return content
