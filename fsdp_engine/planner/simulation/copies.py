"""Copies between a device and a place of offloaded tensors, in simulated time.

Copies of one direction run one after the other, as on a copy engine of a device or in a thread of a
disk. While both directions are busy, each runs at its own rate times ``both / (into + out)``, if
that is less than 1. Work of the host reads and writes the memory that copies read and write: while
it runs beside them, all run at their rates times ``host_rate / (sum of their rates)``.

A copy is added when the simulated host submits it, which may be before or after copies that run at
the same time are known. A later copy therefore moves the ends of earlier ones that overlap with it.
Operations that were already simulated to start at an earlier end do not move. In the optimizer's
step there are none: compute waits for a chunk's copies only when the copies beside them have been
submitted. In backward there are, if the copy for a gather takes longer than the unit before it
computes: that unit's gradients, whose copy is submitted later, lengthen it, and the gather has been
simulated to start up to that much early. Delays do not add up, since the next copy in its direction
starts at the true end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fsdp_engine.planner.simulation.machine import TwoWayLink


class Direction(Enum):
    """Of a copy: ``INTO`` the memory where state is used, or ``OUT`` of it; or ``WORK`` of the host
    in its own memory."""

    INTO = "into"
    OUT = "out"
    WORK = "work"


@dataclass(eq=False)
class Copy:
    """One copy, or work of the host.

    Attributes:
        ready: The time from which it may start.
        num_bytes: Its size.
        start, end: As far as overlapping copies are known.
    """

    ready: float
    num_bytes: float
    start: float = 0.0
    end: float = 0.0
    # Times from which on it runs at a rate.
    _rates: list[tuple[float, float]] = field(default_factory=list, repr=False)
    _left: float = field(default=0.0, repr=False)

    def begin(self, free: float) -> None:
        """It starts when it is ready, and its direction is ``free``."""
        self.start = max(self.ready, free)
        self._left = self.num_bytes
        self._rates = []

    def return_to(self, time: float) -> None:
        """Forget what it transfers from ``time`` on."""
        self._rates = [each for each in self._rates if each[0] < time]
        self._left = self.num_bytes
        end = time
        for begin, rate in reversed(self._rates):
            self._left -= (end - begin) * rate
            end = begin

    def end_at(self, now: float, rate: float) -> float:
        """Its end, if it runs at ``rate`` from ``now`` on."""
        return now + self._left / rate

    def run(self, now: float, until: float, rate: float) -> None:
        """It runs at ``rate``."""
        self._rates.append((now, rate))
        self._left -= (until - now) * rate


class CopyQueues:
    """The copies of a link.

    Args:
        link: The link.
        host_rate: Bytes per second of the host's memory, of a rank.

    Attributes:
        link: See the argument.
    """

    def __init__(self, link: TwoWayLink, host_rate: float = math.inf) -> None:
        self.link = link
        self._host_rate = host_rate
        self._queues: dict[Direction, list[Copy]] = {each: [] for each in Direction}

    def add(self, direction: Direction, ready: float, num_bytes: float) -> Copy:
        """Add a copy behind those of its direction."""
        copy, queue = Copy(ready, num_bytes), self._queues[direction]
        copy.begin(queue[-1].end if queue else -math.inf)
        queue.append(copy)
        now = copy.start + self._latency(direction)
        # Nothing before that changes, and in its direction there is nothing behind it.
        later = {direction: [copy]}
        for way, others in self._queues.items():
            if way is not direction:
                first = len(others)
                while first and others[first - 1].end > now:
                    first -= 1
                later[way] = others[first:]
                if first < len(others):
                    others[first].return_to(now)
        self._settle({way: iter(each) for way, each in later.items()}, now)
        return copy

    def forget(self, time: float) -> None:
        """Forget all copies if they end at ``time`` or before; no copy can start before it."""
        if all(queue[-1].end <= time for queue in self._queues.values() if queue):
            for queue in self._queues.values():
                queue.clear()

    def _latency(self, way: Direction) -> float:
        return 0.0 if way is Direction.WORK else self.link.latency

    def _rates(self, busy: Sequence[Direction]) -> dict[Direction, float]:
        """Bytes per second of each direction, while these are busy."""
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

    def _settle(self, waiting: dict[Direction, Iterator[Copy]], now: float) -> None:
        """Determine starts and ends of copies that transfer bytes from ``now`` on; the first of a
        direction has started."""
        at_work = {way: copy for way, each in waiting.items() if (copy := next(each, None))}
        while at_work:
            # A copy transfers bytes after the latency.
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
