"""Execution order and what to gather ahead of it. Pure integers.

Units are numbered. An order is a row of units, a unit called twice standing there twice. Forward
walks units as they were entered last time; backward walks them as they were left, from the end,
so that a unit which contains others comes before them both times. For each place in an order a
*window* says which units to gather while the unit there computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def prefetch_windows(
    order: Sequence[int], sizes: Sequence[int], budget: int, step: int
) -> list[tuple[int, ...]]:
    """For each position of ``order``, the units to gather ahead, nearest first.

    Units are taken while the elements taken so far stay below ``budget``: at least one, unless
    the budget is 0, and never more than one unit over it.

    Args:
        order: units by position.
        sizes: elements of each unit; units of 0 elements need no gathering and are passed over.
        budget: elements.
        step: +1 for forward, -1 for backward.

    Example: four units of 10 elements, budget 20, forward: ``[(1, 2), (2, 3), (3,), ()]``.
    """
    windows = []
    for position, unit in enumerate(order):
        window: list[int] = []
        ahead = 0
        following = position + step
        while 0 <= following < len(order) and ahead < budget:
            candidate = order[following]
            following += step
            if candidate != unit and candidate not in window and sizes[candidate]:
                window.append(candidate)
                ahead += sizes[candidate]
        windows.append(tuple(window))
    return windows


class Walk:
    """An order that execution is expected to follow, and how far it has come.

    Args:
        order: units by place.
        sizes: see :func:`prefetch_windows`.
        budget: likewise.
    """

    def __init__(self, order: Sequence[int], sizes: Sequence[int], budget: int) -> None:
        self.order = list(order)
        self._windows = prefetch_windows(self.order, sizes, budget, +1)
        self._places: dict[int, list[int]] = {}
        for place, unit in enumerate(self.order):
            self._places.setdefault(unit, []).append(place)
        self._next = 0

    def restart(self) -> None:
        """Execution begins anew."""
        self._next = 0

    def advance(self, unit: int) -> tuple[tuple[int, ...], bool]:
        """Go to ``unit``: what to gather ahead there, and whether it was expected next.

        A unit out of turn is looked for further on, then from the start; one that is not in the
        order at all has no window, and the walk stays where it is.
        """
        place = self._next
        if place < len(self.order) and self.order[place] == unit:
            self._next = place + 1
            return self._windows[place], True
        places = self._places.get(unit)
        if not places:
            return (), False
        place = next((p for p in places if p >= place), places[0])
        self._next = place + 1
        return self._windows[place], False


def leave_order(names: Sequence[str]) -> list[int]:
    """Units by number as forward would leave them, from their names in module order.

    A unit is left after those that it contains: ``["", "a", "a.b", "c"]`` gives ``[2, 1, 3, 0]``.
    """
    left: list[int] = []
    inside: list[int] = []
    for unit, name in enumerate(names):
        while inside and not (names[inside[-1]] == "" or name.startswith(names[inside[-1]] + ".")):
            left.append(inside.pop())
        inside.append(unit)
    return [*left, *reversed(inside)]


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
