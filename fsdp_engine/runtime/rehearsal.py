"""The units that hold transient memory at one time, predicted from units and their sizes alone.

A *moment* is the units that have full parameters, or staged gradients, at one time, in the order in
which they get them. Where memory has to be counted or allocated before a step has run, units are
taken to be used as their modules were registered
(:class:`~fsdp_engine.units.assignment.Expected`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdp_engine.options import StagingBudget
from fsdp_engine.runtime.schedule import Use, prefetch_windows
from fsdp_engine.runtime.unit import FORWARD
from fsdp_engine.units.assignment import Expected


@dataclass(frozen=True)
class Rehearsal:
    """A step whose reductions take until they are waited for.

    Attributes:
        expected: how units are used. One that contains others, or is used again further on in
            backward, gets gradients until then.
        gathered: by unit, elements that are gathered.
        staged: by unit, elements of staged gradients.
        window: elements that are prefetched.
        limit: The limit on staged gradients.
    """

    expected: Expected
    gathered: Sequence[int]
    staged: Sequence[int]
    window: int
    limit: StagingBudget

    def full(self) -> Iterator[list[int]]:
        """Units that are full while each of them computes, in forward and in backward."""
        for order in (self.expected.forward, self.expected.backward):
            uses = [Use(unit, FORWARD) for unit in order]
            windows = prefetch_windows(uses, self.gathered, self.window)
            for use, window in zip(uses, windows, strict=True):
                around = sorted(self.expected.around[use.unit])
                yield list(dict.fromkeys((*around, use.unit, *(each.unit for each in window))))

    def staging(self) -> Iterator[list[int]]:
        """Units whose gradients are staged when each of them gets its first one."""
        order, sizes = self.expected.forward, self.staged
        first_place = {unit: place for place, unit in reversed(list(enumerate(order)))}
        in_flight: deque[int] = deque()
        num_elements = 0
        taken: dict[int, None] = {}
        for place, unit in reversed(list(enumerate(order))):
            for each in (*sorted(self.expected.around[unit]), unit):
                if each in taken:
                    continue
                while in_flight and self.limit.is_exceeded(
                    len(in_flight), num_elements, sizes[each]
                ):
                    num_elements -= sizes[in_flight[0]]
                    taken.pop(in_flight.popleft(), None)
                taken[each] = None
            yield list(taken)
            if place == first_place[unit]:
                in_flight.append(unit)
                num_elements += sizes[unit]
