"""Signals that ask a job to save and end, for example before a time limit or a preemption.

    SIGUSR1    save and exit with status 0; the sender restarts the job (Slurm)
    SIGTERM    save and end by this signal, so that the launcher sees an unfinished job (torchrun,
               which sends the signal before it restarts workers; Kubernetes; preemption)

Some or all ranks may receive a signal, at different steps. All ranks end after the same step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class Interruption:
    """Context in which these signals are recorded and have no other effect.

    Python handles signals in the main thread only. In another thread (Ray Train) the context does
    nothing.
    """

    def __init__(self) -> None:
        self._heard = 0
        self._asked: tuple[torch.Tensor, Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {each: signal.signal(each, self._hear) for each in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._asked is not None:
            self._asked[1].wait()
        for each, handler in self._handlers.items():
            signal.signal(each, handler)

    def heard(self) -> int:
        """Returns the number of the signal that a rank had received at the previous call; 0: none.
        Collective; the result is the same on all ranks.

        The all-reduce of one step is read in the next one, so that no rank waits for another.
        """
        if dist.get_world_size() == 1:
            return self._heard
        before, mine = self._asked, torch.tensor(self._heard)
        # If both signals were sent, the maximum is SIGTERM.
        self._asked = mine, dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = max(self._heard, number)


def end_by(number: int) -> None:
    """End this process by the signal ``number`` if it is SIGTERM; return if it is SIGUSR1."""
    if number == signal.SIGTERM:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
