"""Gloo's threads at the end of a program.

The thread that ran a collective drops its tensors after the waiting thread has returned. Tensors
that Python has seen need the interpreter's lock for that, and a C++ thread that asks for it while
the interpreter ends aborts the process: "terminate called without an active exception", exit status
-6, right after the last collective of a program (torch 2.11 to 2.13; pytorch/pytorch#190489).
``destroy_process_group`` is no remedy: threads live as long as anything refers to their group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

_THREAD_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
# A thread is idle if it sleeps in so many looks, so far apart. It may sleep in one of them because
# it waits for the lock, which is free between them.
_LOOKS = 3
_INTERVAL_SECONDS = 0.005
_MOST_SECONDS = 2.0
_SECONDS_WITHOUT_PROC = 0.1


def wait_until_idle() -> None:
    """Return when gloo's threads have dropped what they ran, or after two seconds.

    Needs no other rank. Where no ``/proc`` tells what threads do, wait a tenth of a second.
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
    """Of each of gloo's threads: "S" sleeps, "R" runs or could (``man 5 proc``)."""
    for task in _TASKS.iterdir():
        try:
            _, name, rest = (task / "stat").read_text().replace("(", ")").split(")", 2)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if name == _THREAD_NAME:
            yield rest.split()[0]
