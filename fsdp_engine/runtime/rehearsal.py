"""Predicts from the sizes of units which of them hold transient memory at the same time.

The prediction is used where memory must be counted or allocated before a step has run. It assumes
that units are used in the order in which their modules were registered
(:class:`~fsdp_engine.units.assignment.Expected`). A prediction is a sequence of *moments*. A moment
is the list of the units that have full parameters, or staged gradients, at one time.
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
    """A step in which each reduction is in flight until the engine has to wait for it.

    Attributes:
        expected: The expected order of uses. A unit that contains others, or is used several times,
            gets gradients until the end of its last use in backward.
        gathered: Number of elements that are gathered for each unit.
        staged: Number of elements of staged gradients of each unit.
        window: The prefetch window in elements.
        limit: The limit on staged gradients.
    """

    expected: Expected
    gathered: Sequence[int]
    staged: Sequence[int]
    window: int
    limit: StagingBudget

    def full(self) -> Iterator[list[int]]:
        """Yield, for each use in forward and in backward, the units that are full at that time, in
        the order in which they were gathered."""
        for order in (self.expected.forward, self.expected.backward):
            uses = [Use(unit, FORWARD) for unit in order]
            windows = prefetch_windows(uses, self.gathered, self.window)
            for use, window in zip(uses, windows, strict=True):
                around = sorted(self.expected.around[use.unit])
                yield list(dict.fromkeys((*around, use.unit, *(each.unit for each in window))))

    def staging(self) -> Iterator[list[int]]:
        """Yield, for each use in backward, the units that have staging buffers at that time, in the
        order in which these were allocated."""
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
