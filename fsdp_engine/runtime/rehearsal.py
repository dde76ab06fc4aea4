"""The units that hold transient memory at one time, predicted from units and their sizes alone.

A *moment* is the units that have full parameters, or staged gradients, at one time, in the order in
which they get them. Where memory has to be counted or allocated before a step has run, units are
taken to be used as their modules were registered
(:class:`~fsdp_engine.units.assignment.Expected`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from fsdp_engine.options import StagingBudget
from fsdp_engine.runtime.schedule import Use, prefetch_windows
from fsdp_engine.runtime.unit import FORWARD, Unit
from fsdp_engine.units.assignment import Expected


def predict_concurrent_units(
    units: Sequence[Unit], expected: Expected, budget: int, staging_budget: StagingBudget
) -> dict[str, list[list[int]]]:
    """Returns all moments of a step by role of transient memory ("full", "staging").

    Args:
        units: by number.
        expected: how they are used.
        budget: elements that may be prefetched.
        staging_budget: The budget of staged gradients.
    """
    elements = [unit.num_elements if unit.reshards else 0 for unit in units]
    # In the first forward, loose units are full throughout.
    loose = [unit.index for unit in units if unit.loose]
    moments = full_moments(expected, elements, budget)
    full = [list(dict.fromkeys((*loose, *moment))) for moment in moments]
    return {
        "full": full,
        "staging": list(
            staged_moments(expected, [unit.num_staged for unit in units], staging_budget)
        ),
    }


def full_moments(expected: Expected, elements: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Units that are full while each of them computes, in forward and in backward.

    Args:
        expected: how units are used.
        elements: by unit, those that are gathered.
        budget: elements that are prefetched.
    """
    for order in (expected.forward, expected.backward):
        uses = [Use(unit, FORWARD) for unit in order]
        for use, window in zip(uses, prefetch_windows(uses, elements, budget), strict=True):
            ahead = (each.unit for each in window)
            yield list(dict.fromkeys((*sorted(expected.around[use.unit]), use.unit, *ahead)))


def staged_moments(
    expected: Expected, staged: Sequence[int], budget: StagingBudget
) -> Iterator[list[int]]:
    """Units whose gradients are staged when each of them gets its first one, if every reduction
    took until it is waited for.

    Args:
        expected: how units are used. One that contains others, or is used again further on in
            backward, gets gradients until then.
        staged: by unit, elements of its staging.
        budget: The budget of staged gradients.
    """
    order = expected.forward
    first_place = {unit: place for place, unit in reversed(list(enumerate(order)))}
    in_flight: deque[int] = deque()
    num_elements = 0
    taken: dict[int, None] = {}
    for place, unit in reversed(list(enumerate(order))):
        for each in (*sorted(expected.around[unit]), unit):
            if each in taken:
                continue
            while in_flight and budget.is_exceeded(len(in_flight), num_elements, staged[each]):
                num_elements -= staged[in_flight[0]]
                taken.pop(in_flight.popleft(), None)
            taken[each] = None
        yield list(taken)
        if place == first_place[unit]:
            in_flight.append(unit)
            num_elements += staged[unit]
