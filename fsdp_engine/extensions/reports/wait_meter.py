"""Sums the waits of compute that lanes report: [Note: Waits of compute] in ``comm/lanes.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_engine.comm.lanes import TimedWork

# Number of pending waits at which the events that have completed are read.
_MOST_PENDING = 1024
_MILLI = 1e-3


@dataclass
class Waits:
    """Number of waits of one kind, and their total seconds."""

    count: int = 0
    seconds: float = 0.0


class WaitMeter:
    """Sums waits by lane, label and phase. See [Note: Waits of compute].

    Args:
        phase: Returns the current phase of the program.

    Attributes:
        found: Waits by (lane, label, phase), without those whose events have not been read.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.found: dict[tuple[str, str, str], Waits] = {}
        self._phase = phase
        self._pending: deque[tuple[Any, Any, Sequence[TimedWork], str]] = deque()

    def waited(self, lane: str, label: str, seconds: float) -> None:
        """See :class:`Meter`."""
        self._add(lane, label, self._phase(), seconds)

    def waits(self, begin: Any, end: Any, works: Sequence[TimedWork]) -> None:
        """See :class:`Meter`."""
        self._pending.append((begin, end, works, self._phase()))
        if len(self._pending) >= _MOST_PENDING:
            self.read(wait=False)

    def read(self, *, wait: bool) -> None:
        """Convert pairs of events to seconds.

        Args:
            wait: Wait for all events. False: read only events that have completed.
        """
        pending = self._pending
        if wait and pending:
            pending[-1][1].synchronize()
        while pending and pending[0][1].query():
            begin, end, works, phase = pending.popleft()
            longest = max(works, key=lambda work: work.seconds)
            seconds = max(float(begin.elapsed_time(end)) * _MILLI, 0.0)
            self._add(longest.lane, longest.label, phase, seconds)

    def _add(self, lane: str, label: str, phase: str, seconds: float) -> None:
        waits = self.found.setdefault((lane, label, phase), Waits())
        waits.count += 1
        waits.seconds += seconds
