"""Waits for gloo's threads at the end of a program.

The thread that ran a collective frees its tensors after the waiting thread has returned. To free a
tensor with a Python object it needs the interpreter's lock. A C++ thread that requests the lock
while the interpreter ends aborts the process: "terminate called without an active exception", exit
status -6, right after the last collective of a program (torch 2.11 to 2.13;
pytorch/pytorch#190489). ``destroy_process_group`` does not help, because threads live as long as
any reference to their group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

_THREAD_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
# Threads count as idle if they sleep at this number of consecutive checks, with this interval. One
# check is not enough: a gloo thread may sleep because it waits for the lock, which the checking
# thread releases between checks.
_LOOKS = 3
_INTERVAL_SECONDS = 0.005
_MOST_SECONDS = 2.0
_SECONDS_WITHOUT_PROC = 0.1


def wait_until_idle() -> None:
    """Wait until gloo's threads have freed the tensors of their collectives, or for two seconds.

    No other rank is needed. Without ``/proc``, which has the states of threads, wait 0.1 seconds.
    """
    if not _TASKS.is_dir():
        time.sleep(_SECONDS_WITHOUT_PROC)
        return
    end = time.monotonic() + _MOST_SECONDS
    idle = 0
    while idle < _LOOKS and time.monotonic() < end:
        states = list(_states())
        if not states:
            return
        idle = idle + 1 if set(states) == {"S"} else 0
        time.sleep(_INTERVAL_SECONDS)


def _states() -> Iterator[str]:
    """Yields the state of each gloo thread: "S" sleeps, "R" runs or is ready (``man 5 proc``)."""
    for task in _TASKS.iterdir():
        try:
            _, name, rest = (task / "stat").read_text().replace("(", ")").split(")", 2)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended
        if name == _THREAD_NAME:
            yield rest.split()[0]
