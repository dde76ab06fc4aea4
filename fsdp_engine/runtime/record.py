"""One record of a microbatch, and what follows from a place in it. Pure integers.

    f0 f1 .. fn | bn .. b1 b0

Units are numbered. A *use* is a unit with a phase: what its weights are read for. Forward is
recorded as units are entered, a unit called twice standing there twice; backward as gradients
reach them, with what checkpoints compute again in between. The next microbatch is expected to go
the same way, and from its place in the record follows

- what to gather ahead: the uses behind it, within the budget (a *window*). No window reaches from
  forward into backward: the loss lies between, and much memory is taken there;
- whether a unit stays full when it is left: if the next use is its own. So the last block stays
  for its backward, and so does whatever contains it.

Before a backward has been seen it is expected to take units as forward left them, from the end, so
that a unit which contains others comes before them both times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fsdp_engine.codecs.phase import BACKWARD, BOTH, FORWARD


class Use(NamedTuple):
    """One use of a unit: its number, and FORWARD, BACKWARD or BOTH."""

    unit: int
    phase: int


class Step(NamedTuple):
    """What the record says of a use that begins.

    Attributes:
        phase: what the unit is used for, as far as is known.
        window: uses to gather ahead, nearest first.
        expected: it was the next one of the record.
    """

    phase: int
    window: tuple[Use, ...]
    expected: bool


def prefetch_windows(
    uses: Sequence[Use], sizes: Sequence[int], budget: int
) -> list[tuple[Use, ...]]:
    """For each place in ``uses``, what to gather ahead, nearest first.

    Units are taken while the elements taken so far stay below ``budget``: at least one, unless
    the budget is 0, and never more than one unit over it.

    Args:
        uses: in their order.
        sizes: elements of each unit; units of 0 elements need no gathering and are passed over.
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
    """Forward's uses or backward's, and how far execution has come in them."""

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
        """What to gather ahead at a place."""
        return self._steps[place].window

    def advance(self, unit: int, phase: int) -> Step:
        """Go to the use that begins. One out of turn is looked for further on, then from the
        start; one that is not there has no window, and the place stays."""
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
        forward: units in the order that the first forward is expected to enter them in.
        backward: likewise the first backward.
        sizes: see :func:`prefetch_windows`.
        budget: likewise.
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
        """Units as forward enters them."""
        return [use.unit for use in self._forward.uses]

    @property
    def first(self) -> tuple[Use, ...]:
        """What forward begins with: its first use, and the window there."""
        uses = self._forward.uses
        return (uses[0], *self._forward.window(0)) if uses else ()

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
        """Forward of ``unit`` runs again within its backward, which has begun."""
        for place in range(len(self._seen) - 1, -1, -1):
            if self._seen[place].unit == unit:
                self._seen[place] = Use(unit, BOTH)
                return

    def leave(self, unit: int) -> None:
        """A forward of ``unit`` is over, and backward will come back to it."""
        self._left.append(unit)

    def next_phase(self, unit: int, open_units: Collection[int], has_backward: bool) -> int:
        """What ``unit`` is used for next, if the next use is its own; else 0.

        Args:
            unit: it has just been left.
            open_units: units in use, which are passed over.
            has_backward: after forward comes backward.
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
        """A forward of the whole model is over: what was seen is expected from now on."""
        if self._seen != self._forward.uses:
            self._forward = self._half(self._seen)
            self._forward.next = len(self._seen)
            left = self._left or self.units_in_forward  # without autograd nobody comes back
            self._backward = self._half([Use(unit, BACKWARD) for unit in reversed(left)])
            self._half_now = self._forward

    def end_backward(self) -> None:
        """A backward is over: what was seen is expected from now on, unless it was a part of what
        is expected anyway."""
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
    """All units, each once: those of ``order`` by first use, every other right after the one
    before it by number.

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
    """Eight bytes that tell two orders apart."""
    return hashlib.sha256(",".join(map(str, order)).encode()).digest()[:8]
