"""``SimulationError``: the reason and the line of the user's code that cannot be simulated."""

from __future__ import annotations

import linecache
import logging
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

_READS = (
    "it reads a value (by .item(), int(), float(), bool(), `if`, a loop over a tensor's values), "
    "and tensors of a simulation have no values"
)

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

# torch logs a traceback of exceptions that it also raises.
_TORCH_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class SimulationError(RuntimeError):
    """A model, its loss or its optimizer cannot run in a simulation, or raised an exception.

    Attributes:
        file, line: the innermost line of the user's code, outside of torch, this package and
            Python. None: there is none, for example in the backward of torch's own functions.
        code: that line's text.
        reason: why the simulation failed.
        phase: "building the model", "forward", ...
        needs_values: the code depends on the values of tensors, and cannot run with shapes only.
            False: it would also fail in training, or uses an operation without an implementation
            for shapes.
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
    """Context for user code that converts its exceptions to :class:`SimulationError`."""
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
            needs_values=isinstance(error, _NEEDS_VALUES),
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
    """The innermost frame of user code."""
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


_OTHERS = [Path(torch.__file__).parent, Path(__file__).parents[1]]
_PYTHON = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
