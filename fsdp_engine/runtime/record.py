"""The recorded order of uses of a microbatch. Pure integers.

    f0 f1 .. fn | bn .. b1 b0

Units are numbered. A *use* is a unit and the phase that its weights are read for. Forward is
recorded as units are entered; a unit that is called twice is recorded twice. Backward is recorded
as gradients reach units, with the forwards that checkpoints recompute in between. The next
microbatch is expected to follow the same order, so a place in it determines

- the units to prefetch: the next uses, within the budget (a *prefetch window*). No window reaches
  from forward into backward: the loss is between them, and its memory is the largest of the step;
- whether a unit is kept unsharded when it is left: if the next use is its own. So the last block is
  kept for its backward, and so are the units that contain it.

Before the first backward, units are expected in the reverse of the order in which forward left
them, so that a unit that contains others precedes them both times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

# BOTH: a unit whose forward is recomputed within its own backward.
FORWARD, BACKWARD = 1, 2
BOTH = FORWARD | BACKWARD


class Use(NamedTuple):
    """One use of a unit: its number, and FORWARD, BACKWARD or BOTH."""

    unit: int
    phase: int


class Step(NamedTuple):
    """The place of a use in the recorded order.

    Attributes:
        phase: of the use, as recorded.
        window: uses to prefetch, nearest first.
        expected: it was the next use of the recorded order.
    """

    phase: int
    window: tuple[Use, ...]
    expected: bool


def prefetch_windows(
    uses: Sequence[Use], sizes: Sequence[int], budget: int
) -> list[tuple[Use, ...]]:
    """Returns the prefetch window of each place in ``uses``, nearest uses first.

    Units are taken while the elements taken so far stay below ``budget``: at least one, unless
    the budget is 0, and never more than one unit over it.

    Args:
        uses: in their order.
        sizes: elements of each unit; units of 0 elements are not gathered and are skipped.
        budget: elements.

    Example: forward through four units of 10 elements, budget 20, has windows of the units
    ``[(1, 2), (2, 3), (3,), ()]``.
    """
    windows = []
    for place, (unit, _) in enumerate(uses):
        window: dict[int, Use] = {}
        ahead = 0
        for following in range(place + 1, len(uses)):
            if ahead >= budget:
                break
            use = uses[following]
            if use.unit != unit and use.unit not in window and sizes[use.unit]:
                window[use.unit] = use
                ahead += sizes[use.unit]
        windows.append(tuple(window.values()))
    return windows


class _Half:
    """The uses of forward or of backward, and the number of those that have begun."""

    def __init__(self, uses: Sequence[Use], sizes: Sequence[int], budget: int) -> None:
        self.uses = list(uses)
        windows = prefetch_windows(self.uses, sizes, budget)
        self._steps = [
            Step(use.phase, window, True) for use, window in zip(self.uses, windows, strict=True)
        ]
        self._kinds = [_kind(use) for use in self.uses]
        self._places: dict[tuple[int, bool], list[int]] = {}
        for place, kind in enumerate(self._kinds):
            self._places.setdefault(kind, []).append(place)
        self.next = 0

    def window(self, place: int) -> tuple[Use, ...]:
        """The prefetch window of a place."""
        return self._steps[place].window

    def advance(self, unit: int, phase: int) -> Step:
        """Advance to the use that begins. A use out of order is searched for after the current
        place, then from the start; a use that is not recorded has no window, and the place does not
        change."""
        kind = (unit, phase >= BACKWARD)
        place = self.next
        if place < len(self._kinds) and kind == self._kinds[place]:
            self.next = place + 1
            return self._steps[place]
        places = self._places.get(kind)
        if not places:
            return Step(phase, (), False)
        place = next((each for each in places if each >= place), places[0])
        self.next = place + 1
        return self._steps[place]._replace(expected=False)


def _kind(use: Use) -> tuple[int, bool]:
    return use.unit, use.phase >= BACKWARD


class Record:
    """See the module docstring.

    Args:
        forward: units in the order in which the first forward is expected to enter them.
        backward: the same for the first backward.
        sizes, budget: see :func:`prefetch_windows`.
    """

    def __init__(
        self, forward: Sequence[int], backward: Sequence[int], sizes: Sequence[int], budget: int
    ) -> None:
        self._sizes = sizes
        self._budget = budget
        self._forward = self._half([Use(unit, FORWARD) for unit in forward])
        self._backward = self._half([Use(unit, BACKWARD) for unit in backward])
        self._half_now = self._forward
        self._seen: list[Use] = []
        self._left: list[int] = []

    @property
    def units_in_forward(self) -> list[int]:
        """Units in the order in which forward enters them."""
        return [use.unit for use in self._forward.uses]

    @property
    def first(self) -> tuple[Use, ...]:
        """The first use of forward, and its prefetch window."""
        uses = self._forward.uses
        return (uses[0], *self._forward.window(0)) if uses else ()

    def next_uses(self, num: int) -> Sequence[Use]:
        """The next ``num`` uses of the forward or backward that runs."""
        half = self._half_now
        return half.uses[half.next : half.next + num]

    def begin_forward(self) -> None:
        """A forward begins."""
        self._begin(self._forward)

    def begin_backward(self) -> None:
        """A backward begins."""
        self._begin(self._backward)

    def use(self, unit: int, phase: int) -> Step:
        """A use of ``unit`` begins."""
        self._seen.append(Use(unit, phase))
        return self._half_now.advance(unit, phase)

    def recomputes(self, unit: int) -> None:
        """A forward of ``unit`` is recomputed within its backward."""
        for place in range(len(self._seen) - 1, -1, -1):
            if self._seen[place].unit == unit:
                self._seen[place] = Use(unit, BOTH)
                return

    def leave(self, unit: int) -> None:
        """A forward of ``unit`` is over, and its backward will come."""
        self._left.append(unit)

    def next_phase(self, unit: int, open_units: Collection[int], has_backward: bool) -> int:
        """Returns the phase of the next use, if it is a use of ``unit``; else 0.

        Args:
            unit: the unit that was just left.
            open_units: units in use, which are skipped.
            has_backward: a backward follows the forward.
        """
        uses, place = self._half_now.uses, self._half_now.next
        while True:
            while place < len(uses) and uses[place].unit in open_units:
                place += 1
            if place < len(uses):
                return uses[place].phase if uses[place].unit == unit else 0
            if not has_backward or uses is not self._forward.uses:
                return 0
            uses, place = self._backward.uses, 0

    def end_forward(self) -> None:
        """A forward of the whole model is over: its order is expected from now on."""
        if self._seen != self._forward.uses:
            self._forward = self._half(self._seen)
            self._forward.next = len(self._seen)
            left = self._left or self.units_in_forward  # without autograd no unit is left for it
            self._backward = self._half([Use(unit, BACKWARD) for unit in reversed(left)])
            self._half_now = self._forward

    def end_backward(self) -> None:
        """A backward is over: its order is expected from now on, unless it was the beginning of the
        expected one."""
        if self._seen != self._backward.uses[: len(self._seen)]:
            self._backward = self._half(self._seen)

    def _begin(self, half: _Half) -> None:
        self._half_now = half
        half.next = 0
        self._seen = []
        self._left = []

    def _half(self, uses: Sequence[Use]) -> _Half:
        return _Half(uses, self._sizes, self._budget)


def first_use_order(order: Sequence[int], num_units: int) -> list[int]:
    """Returns all units, each once: those of ``order`` by first use, every other one directly after
    its predecessor by number.

    Example: ``[2, 0, 2]`` of four units, of which 1 and 3 were not used, gives ``[2, 3, 0, 1]``.
    """
    seen = set(order)
    missing: dict[int, list[int]] = {}
    before = -1
    for unit in range(num_units):
        if unit in seen:
            before = unit
        else:
            missing.setdefault(before, []).append(unit)
    result = missing.get(-1, [])
    for unit in dict.fromkeys(order):
        result += [unit, *missing.get(unit, ())]
    return result


def order_digest(order: Sequence[int]) -> bytes:
    """Returns a digest of an order, 8 bytes."""
    return hashlib.sha256(",".join(map(str, order)).encode()).digest()[:8]
