"""Signals that ask a job to save and end: a time limit that comes near, a node that is wanted back.

    SIGUSR1    save and exit with status 0; the sender restarts the job (Slurm)
    SIGTERM    save and end as that signal ends a process: who launched the job sees that it was not
               done (torchrun, which sends it before it restarts workers; Kubernetes; preemption)

One rank may be sent it, or all, at different steps; all end after the same step.
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
    """Within it, these signals do nothing but to be heard.

    Outside of the main thread Python cannot hear signals, and nothing changes (Ray Train).
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
        """The signal that some rank was sent by the time of its last call; 0: none. Collective, the
        same on all ranks.

        A request of one step is read in the next one, so that no rank waits for another.
        """
        if dist.get_world_size() == 1:
            return self._heard
        before, mine = self._asked, torch.tensor(self._heard)
        # SIGTERM is the larger number: where both were sent, it counts.
        self._asked = mine, dist.all_reduce(mine, dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._heard = max(self._heard, number)


def end_by(number: int) -> None:
    """End this process as ``number`` asks for; returns for SIGUSR1."""
    if number == signal.SIGTERM:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
