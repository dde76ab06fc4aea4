"""Flushes open files when the process ends.

Python flushes a file when the file object is deleted. At the end of a process it deletes the
globals of the main program, unless a reference cycle holds them that the garbage collector cannot
see. There is one if the last loss is a global, and the class of the model is defined in the main
program: the loss refers to hooks on functions of autograd (in C++), the hooks to the engine and its
model, the model to its class, and the methods of the class to the globals.
"""

from __future__ import annotations

import atexit
import gc
import io
from contextlib import suppress
from functools import cache

_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


@cache
def flush_at_exit() -> None:
    """Flush all open files of this process when it ends. Further calls have no effect."""
    atexit.register(_flush)


def _flush() -> None:
    for each in gc.get_objects():
        if type(each) in _FILES:
            # Python, too, ignores errors of files that it closes: pipes whose reader has ended, for
            # example.
            with suppress(OSError, ValueError):
                each.flush()
