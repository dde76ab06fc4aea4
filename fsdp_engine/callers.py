"""Finds the line of the user's code that has called the library, for warnings and errors."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_STDLIB = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")
_LIBRARIES = (f"{Path(__file__).parent}/", f"{Path(torch.__file__).parent}/")


def is_of_library(file: str) -> bool:
    """Returns whether a source file belongs to this package, to torch or to Python itself."""
    if file.startswith(_LIBRARIES):
        return True
    return file.startswith(_STDLIB) and not is_installed(file)


def is_installed(file: str) -> bool:
    """Returns whether a source file belongs to an installed package."""
    return any(folder in file for folder in _PACKAGES)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost of ``frame`` and its callers that runs the user's code, or None."""
    while frame is not None and is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def own_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost of ``frame`` and its callers that runs the user's code and is in no
    installed package, or None."""
    while (frame := user_frame(frame)) is not None and is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def user_stacklevel() -> int:
    """Returns the ``stacklevel`` with which a warning of the calling function points to the line of
    the user's code."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and is_of_library(frame.f_code.co_filename):
        frame = frame.f_back
        level += 1
    return level
