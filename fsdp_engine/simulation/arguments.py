"""Argument checks of ``plan`` and ``simulate``. Each error contains the argument's name, the
expected value and the found one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def check_count(name: str, value: object, expected: str) -> None:
    """Raises:
    TypeError: ``value`` is not an integer.
    ValueError: it is less than 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, a whole number; found {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected {expected}; found {value!r}")


def check_memory(value: object) -> None:
    """Raises:
    TypeError: ``value`` is not a number.
    ValueError: it is not positive, or not finite.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"memory: expected a number of bytes, such as 80e9; found {value!r}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"memory: expected bytes, more than 0; found {value!r}")


def check_callable(name: str, value: object, expected: str) -> None:
    """Raises:
    TypeError: ``value`` is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def listed(name: str, value: object, expected: str) -> list[Any]:
    """The items of ``value`` as a list.

    Raises:
        TypeError: ``value`` is not iterable, or is a string.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")
    return list(value)


def check_sizes(name: str, sizes: tuple[Any, ...], expected: str) -> None:
    """Check the types of the sizes of mesh axes.

    Raises:
        TypeError: a size is not an integer.
    """
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name}: expected {expected}; found {sizes}")


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Raises:
    TypeError: ``value`` is not of type ``kind``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def read_json(path: str | Path, expected: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: there is no such file.
        TypeError: ``path`` is not a path.
        ValueError: the file does not contain a JSON object.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of {expected}; found {path!r}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path}: expected {expected}; found {error!r}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected {expected}; found a {type(content).__name__}")
    return content
