"""Copies of offloaded state over a link with two directions, in simulated time.

Copies of one direction run one after the other, as on a copy engine of a device or in a thread of a
disk. While both directions are busy, each runs at its own rate times ``both / (into + out)``, if
that is less than 1.

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
from dataclasses import dataclass, field
from enum import Enum

from fsdp_engine.simulation.machine import TwoWayLink


class Direction(Enum):
    """Of a copy: ``INTO`` the memory where state is used, or ``OUT`` of it."""

    INTO = "into"
    OUT = "out"


@dataclass(eq=False)
class Copy:
    """One copy.

    Attributes:
        ready: the time from which it may start.
        num_bytes: its size.
        start, end: as far as overlapping copies are known.
    """

    ready: float
    num_bytes: float
    start: float = 0.0
    end: float = 0.0
    _left: float = field(default=0.0, repr=False)


class CopyQueues:
    """The copies of a link.

    Args:
        link: the link.
    """

    def __init__(self, link: TwoWayLink) -> None:
        self._link = link
        self._queues: dict[Direction, list[Copy]] = {each: [] for each in Direction}

    def add(self, direction: Direction, ready: float, num_bytes: float) -> Copy:
        """Add a copy behind those of its direction."""
        copy = Copy(ready, num_bytes)
        self._queues[direction].append(copy)
        self._settle()
        return copy

    def forget(self, time: float) -> None:
        """Forget all copies if they end at ``time`` or before; no copy can start before it."""
        if all(queue[-1].end <= time for queue in self._queues.values() if queue):
            for queue in self._queues.values():
                queue.clear()

    def _settle(self) -> None:
        """Determine all starts and ends."""
        link = self._link
        rates = {Direction.INTO: link.into, Direction.OUT: link.out}
        has_limit = math.isfinite(link.both)
        share = min(link.both / (link.into + link.out), 1.0) if has_limit else 1.0
        waiting = {way: iter(queue) for way, queue in self._queues.items()}
        at_work: dict[Direction, Copy] = {}
        now = -math.inf

        def take(way: Direction, free: float) -> None:
            copy = next(waiting[way], None)
            if copy is None:
                at_work.pop(way, None)
                return
            copy.start = max(copy.ready, free)
            copy._left = copy.num_bytes
            at_work[way] = copy

        for way in Direction:
            take(way, -math.inf)
        while at_work:
            # A copy transfers bytes after the latency.
            begins = {way: copy.start + link.latency for way, copy in at_work.items()}
            if now == -math.inf:
                now = min(begins.values())
            busy = [way for way, begin in begins.items() if begin <= now]
            factor = share if len(busy) > 1 else 1.0
            ends = {way: now + at_work[way]._left / (rates[way] * factor) for way in busy}
            later = [begin for way, begin in begins.items() if way not in busy]
            until = min([*ends.values(), *later])
            for way in busy:
                copy = at_work[way]
                if ends[way] <= until:
                    copy.end = until
                    take(way, until)
                else:
                    copy._left -= (until - now) * rates[way] * factor
            now = until
