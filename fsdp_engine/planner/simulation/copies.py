"""Copies between a device and a place of offloaded tensors, in simulated time.

Copies in one direction run one after the other, as on a device's copy engine or in a thread of a
disk. While both directions are busy, each runs at its own rate times ``both / (into + out)``, if
this factor is less than 1. Work of the host accesses the same host memory as the copies: while work
and copies run, all their rates are multiplied by ``host_rate / (sum of the rates)``.

A copy is added when the simulated host submits it. Copies that run at the same time may be added
earlier or later, so a later copy moves the ends of earlier ones that overlap with it. An operation
that has already been simulated, and that started at an end which now moves, keeps its start. In the
optimizer step there are no such operations: compute waits for a chunk's copies only after all
overlapping copies have been submitted. In backward there are such operations if the copy for a
gather takes longer than the compute of the unit before it. The copy of that unit's gradients is
submitted later, and lengthens the copy for the gather. The gather was already simulated, and has
started too early by up to the added time. Such errors do not add up, since the next copy in the
same direction starts at the corrected end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fsdp_engine.planner.simulation.machine import TwoWayLink


class Direction(Enum):
    """The direction of a copy, ``INTO`` the memory where state is used or ``OUT`` of it. ``WORK``
    is not a copy, but work of the host in its own memory."""

    INTO = "into"
    OUT = "out"
    WORK = "work"


@dataclass(eq=False)
class Copy:
    """One copy, or one piece of the host's work.

    Attributes:
        ready: The earliest time at which the copy may start.
        num_bytes: Number of bytes to copy.
        start, end: Start and end times, given the overlapping copies that have been added so far.
    """

    ready: float
    num_bytes: float
    start: float = 0.0
    end: float = 0.0
    # Each time at which the rate changes, and the rate from then on.
    _rates: list[tuple[float, float]] = field(default_factory=list, repr=False)
    _left: float = field(default=0.0, repr=False)

    def begin(self, free: float) -> None:
        """Start the copy when it is ready, but not before ``free``, the time at which the previous
        copy in its direction ends."""
        self.start = max(self.ready, free)
        self._left = self.num_bytes
        self._rates = []

    def return_to(self, time: float) -> None:
        """Discard the transfers after ``time``, so that they can be computed again."""
        self._rates = [each for each in self._rates if each[0] < time]
        self._left = self.num_bytes
        end = time
        for begin, rate in reversed(self._rates):
            self._left -= (end - begin) * rate
            end = begin

    def end_at(self, now: float, rate: float) -> float:
        """Returns the end time at a constant ``rate`` from ``now`` on."""
        return now + self._left / rate

    def run(self, now: float, until: float, rate: float) -> None:
        """Transfer bytes at ``rate`` from ``now`` until ``until``."""
        self._rates.append((now, rate))
        self._left -= (until - now) * rate


class CopyQueues:
    """The queues of copies on one link, one queue per direction.

    Args:
        link: The link.
        host_rate: Bytes per second of host memory that one rank can access.

    Attributes:
        link: The argument of that name.
    """

    def __init__(self, link: TwoWayLink, host_rate: float = math.inf) -> None:
        self.link = link
        self._host_rate = host_rate
        self._queues: dict[Direction, list[Copy]] = {each: [] for each in Direction}

    def add(self, direction: Direction, ready: float, num_bytes: float) -> Copy:
        """Append a copy to the queue of its direction."""
        copy, queue = Copy(ready, num_bytes), self._queues[direction]
        copy.begin(queue[-1].end if queue else -math.inf)
        queue.append(copy)
        now = copy.start + self._latency(direction)
        # Nothing before `now` changes. The new copy is the last in its direction.
        later = {direction: [copy]}
        for way, others in self._queues.items():
            if way is not direction:
                first = len(others)
                while first and others[first - 1].end > now:
                    first -= 1
                later[way] = others[first:]
                if first < len(others):
                    others[first].return_to(now)
        self._compute_times({way: iter(each) for way, each in later.items()}, now)
        return copy

    def forget(self, time: float) -> None:
        """Clear the queues if all copies have ended at ``time``. Copies that are added later must
        not start before ``time``."""
        if all(queue[-1].end <= time for queue in self._queues.values() if queue):
            for queue in self._queues.values():
                queue.clear()

    def _latency(self, way: Direction) -> float:
        return 0.0 if way is Direction.WORK else self.link.latency

    def _rates(self, busy: Sequence[Direction]) -> dict[Direction, float]:
        """Returns the bytes per second of each direction, while the directions in ``busy`` run."""
        link = self.link
        rates = {Direction.INTO: link.into, Direction.OUT: link.out}
        if all(way in busy for way in rates) and math.isfinite(link.both):
            share = min(link.both / (link.into + link.out), 1.0)
            rates = {way: rate * share for way, rate in rates.items()}
        rates[Direction.WORK] = self._host_rate
        total = sum(rates[way] for way in busy)
        if Direction.WORK in busy and math.isfinite(total):
            rates = {way: rate * self._host_rate / total for way, rate in rates.items()}
        return rates

    def _compute_times(self, waiting: dict[Direction, Iterator[Copy]], now: float) -> None:
        """Compute starts and ends of the copies that transfer bytes from ``now`` on. The first copy
        of each direction has started."""
        at_work = {way: copy for way, each in waiting.items() if (copy := next(each, None))}
        while at_work:
            # A copy starts to transfer bytes after the latency.
            begins = {way: copy.start + self._latency(way) for way, copy in at_work.items()}
            busy = [way for way, begin in begins.items() if begin <= now]
            later = [begin for begin in begins.values() if begin > now]
            rates = self._rates(busy)
            ends = {way: at_work[way].end_at(now, rates[way]) for way in busy}
            until = min([*ends.values(), *later])
            for way in busy:
                copy = at_work[way]
                copy.run(now, until, rates[way])
                if ends[way] <= until:
                    copy.end = until
                    following = next(waiting[way], None)
                    if following is None:
                        del at_work[way]
                    else:
                        following.begin(until)
                        at_work[way] = following
            now = until
