"""What is there together in a step, from units and their sizes alone.

Units are numbered in module order, the root first. A *moment* is the units that have something at
one time: full parameters, or staged gradients. Where memory has to be counted or made before a step
has run, this is the step, as forward in module order and a backward that reverses it would have it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from fsdp_engine.runtime.order import prefetch_windows
from fsdp_engine.runtime.unit import Unit


def moments_of(units: Sequence[Unit], budget: int) -> dict[str, list[list[int]]]:
    """By role of transient memory ("full", "staging"), all moments of a step.

    Args:
        units: by number.
        budget: elements that may be gathered ahead, and that may be staged.
    """
    parts = [part.index for part in units[0].parts]
    around = [[*outer, *parts] for outer in around_each([unit.name for unit in units])]
    elements = [unit.num_elements if unit.reshards else 0 for unit in units]
    return {
        "full": list(full_moments(around, elements, budget)),
        "staging": list(staged_moments(around, [unit.num_staged for unit in units], budget)),
    }


def around_each(names: Sequence[str]) -> list[list[int]]:
    """For each unit itself and those that contain it, from the names of their modules.

    Example: ``["", "a", "a.b", "c"]`` gives ``[[0], [0, 1], [0, 1, 2], [0, 3]]``.
    """
    return [
        [
            other
            for other, outer in enumerate(names)
            if outer in ("", name) or name.startswith(f"{outer}.")
        ]
        for name in names
    ]


def full_moments(
    around: Sequence[Sequence[int]], elements: Sequence[int], budget: int
) -> Iterator[list[int]]:
    """Units that are full while each of them computes, in forward and in backward.

    Args:
        around: by unit, itself and those that are full around it.
        elements: by unit, what is gathered of it.
        budget: elements that are gathered ahead.
    """
    for step in (1, -1):
        windows = prefetch_windows(range(len(around)), elements, budget, step)
        for unit, window in enumerate(windows):
            yield sorted({*around[unit], *window})


def staged_moments(
    around: Sequence[Sequence[int]], staged: Sequence[int], budget: int
) -> Iterator[list[int]]:
    """Units whose gradients are staged when each of them gets its first one, if no reduction were
    done before somebody waits for it.

    Args:
        around: by unit, itself and those that get gradients until its backward is over.
        staged: by unit, elements of its staging.
        budget: elements that may be staged.
    """
    in_flight: deque[int] = deque()
    num_in_flight = 0
    for unit in range(len(around) - 1, 0, -1):
        while in_flight and num_in_flight + staged[unit] > max(budget, staged[unit]):
            num_in_flight -= staged[in_flight.popleft()]
        in_flight.append(unit)
        num_in_flight += staged[unit]
        yield sorted({*in_flight, *around[unit]})
    yield [0]
