"""Waits of compute, recorded within ``engine.measure()``.

[Note: Waits of compute]
Lanes have *meters*: none in ordinary training, which costs a look at an empty tuple. Within
``engine.measure()`` there is one, and lanes report each wait of compute to it.

On CPU compute is the host, which waits for works of a lane: the seconds are those of the operation
that has issued the works. On CUDA the host does not wait when a wait is submitted. So events with
times are recorded before and behind the wait on compute's stream: between them the stream only
waits. (If the host is behind the device, they are apart by the host's time from one call to the
next, some microseconds.) They are read late, when they have been reached, or when the measurement
is read: training does not wait for them. The operation that is waited for has two such events, too,
and so have the operations before it: as in a simulation, a wait is due to the longest of them,
since a wait for the cast of a message is a wait for the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Events are read, as far as they are reached, when there are so many waits with them.
_MOST_PENDING = 1024
_MILLI = 1e-3


@dataclass(frozen=True)
class TimedWork:
    """One operation on a device: its lane, its label, and events with times around it."""

    lane: str
    label: str
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        """How long it took; its end must be reached."""
        return float(self.begin.elapsed_time(self.end)) * _MILLI


class Meter(Protocol):
    """Records waits of compute."""

    def waited(self, lane: str, label: str, seconds: float) -> None:
        """The host has waited for works of an operation."""
        ...

    def waits(self, begin: Any, end: Any, works: Sequence[TimedWork]) -> None:
        """Between two events compute's stream waits for the first of ``works``, which came right
        after the others."""
        ...


@dataclass
class Waits:
    """Waits of one kind: how many, and their seconds."""

    count: int = 0
    seconds: float = 0.0


class WaitMeter:
    """Adds up waits. See [Note: Waits of compute].

    Args:
        phase: returns the present phase of the program.

    Attributes:
        found: waits by (lane, label, phase), as far as they are known.
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
        """Turn events into seconds.

        Args:
            wait: for the last of them. False: only events that have been reached are read.
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
