"""Execution order and what to gather ahead of it. Pure integers.

Units are numbered. An order is the row of units as forward entered them, a unit called twice
standing there twice; backward walks it from the end. For each position a *window* says which
units to gather while the unit there computes.
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


def first_use_order(order: Sequence[int], num_units: int) -> list[int]:
    """All units, those of ``order`` first, each once, the others after them by number."""
    seen = dict.fromkeys(order)
    return [*seen, *(unit for unit in range(num_units) if unit not in seen)]


def order_digest(order: Sequence[int]) -> bytes:
    """Eight bytes that tell two orders apart."""
    return hashlib.sha256(",".join(map(str, order)).encode()).digest()[:8]
