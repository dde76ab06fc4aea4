"""Errors of ``fe.plan`` and ``fe.simulate``: invalid arguments, and code that cannot be simulated.

An argument error contains the argument's name, the expected value and the found one.
``SimulationError`` contains the reason and the line of the user's code.
"""

from __future__ import annotations

import json
import linecache
import logging
import math
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


def check_count(name: str, value: object, expected: str) -> None:
    """Check a number that counts something.

    Raises:
        TypeError: ``value`` is not an integer.
        ValueError: ``value`` is less than 1.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {expected}, a whole number; found {value!r}")
    if value < 1:
        raise ValueError(f"{name}: expected {expected}; found {value!r}")


def check_positive(name: str, value: object, unit: str) -> None:
    """Check a number given by the user.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is not positive, or is infinite.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected {unit}; found {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected {unit}, more than 0; found {value!r}")


def check_callable(name: str, value: object, expected: str) -> None:
    """Check that an argument can be called.

    Raises:
        TypeError: ``value`` is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def listed(name: str, value: object, expected: str) -> list[Any]:
    """Returns the items of ``value`` as a list.

    Raises:
        TypeError: ``value`` is not iterable, or is a string.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")
    return list(value)


def check_sizes(name: str, sizes: tuple[Any, ...], expected: str) -> None:
    """Check the types of the sizes of mesh axes.

    Raises:
        TypeError: A size is not an integer.
    """
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name}: expected {expected}; found {sizes}")


def check_type(name: str, value: object, kind: type, expected: str) -> None:
    """Check the type of an argument.

    Raises:
        TypeError: ``value`` is not of type ``kind``.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {expected}; found {value!r}")


def read_json(path: str | Path, expected: str) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        OSError: There is no such file.
        TypeError: ``path`` is not a path.
        ValueError: The file does not contain a JSON object.
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


_READS = (
    "it reads a value (by .item(), int(), float(), bool(), `if`, a loop over a tensor's values), "
    "and tensors of a simulation have no values"
)

NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

# torch logs tracebacks of exceptions that it also raises; the log is disabled.
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class SimulationError(RuntimeError):
    """A model, its loss or its optimizer cannot run in a simulation, or raised an exception.

    Attributes:
        file, line: The innermost line of the user's code, outside of torch, this package and
            Python. None: there is no such line, for example in the backward of torch's functions.
        code: The text of that line.
        reason: Why the simulation failed.
        phase: The phase of the simulation that failed: "building the model", "forward", ...
        needs_values: The code depends on the values of tensors, and cannot run with shapes only.
            False: the code would also fail in training, or uses an operation without an
            implementation for shapes.
    """

    def __init__(
        self,
        phase: str,
        reason: str,
        place: traceback.FrameSummary | None = None,
        *,
        needs_values: bool = False,
    ) -> None:
        self.phase = phase
        self.reason = reason
        self.needs_values = needs_values
        self.file = place.filename if place is not None else None
        self.line = place.lineno if place is not None else None
        self.code = (place.line or "").strip() if place is not None else None
        where = "" if place is None else f" at {self.file}:{self.line}, `{self.code}`"
        super().__init__(f"simulate: {phase} failed{where}: {reason}")


@contextmanager
def as_simulation_error(phase: str) -> Iterator[None]:
    """Convert exceptions of user code in this context to :class:`SimulationError`."""
    was_quiet, _TORCH_LOG.disabled = _TORCH_LOG.disabled, True
    try:
        yield
    except SimulationError:
        raise
    except Exception as error:
        raise SimulationError(
            phase,
            _reason(error),
            _place(error.__traceback__),
            needs_values=isinstance(error, NEEDS_VALUES),
        ) from error
    finally:
        _TORCH_LOG.disabled = was_quiet


def _reason(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        return f"{_READS} ({error.func})"
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of the result of {error.func} depends on values, and tensors of a "
            "simulation have no values"
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} has no implementation for shapes alone (torch.library.register_fake)"
    message = str(error).strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _place(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Returns the innermost frame of user code, or None."""
    found = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            text = linecache.getline(code.co_filename, trace.tb_lineno)
            found = traceback.FrameSummary(
                code.co_filename, trace.tb_lineno, code.co_name, line=text
            )
        trace = trace.tb_next
    return found


def _is_users(file: str) -> bool:
    path = Path(file)
    if any(path.is_relative_to(folder) for folder in _OTHERS):
        return False
    # Installed packages are in Python's own folder, but count as user code.
    is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
    is_python = any(path.is_relative_to(folder) for folder in _PYTHON) and not is_installed
    return not is_python and not file.startswith("<frozen")


_OTHERS = [Path(torch.__file__).parent, Path(__file__).parents[2]]
_PYTHON = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
