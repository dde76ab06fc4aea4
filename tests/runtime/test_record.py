"""The record of a microbatch, and the windows that follow each use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_engine.runtime.schedule import (
    Record,
    Step,
    Use,
    first_use_order,
    order_digest,
    prefetch_windows,
)
from fsdp_engine.runtime.unit import BACKWARD, FORWARD

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """An order (units repeat, some are missing), sizes, a budget."""
    sizes = draw(SIZES)
    order = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=14))
    return order, sizes, draw(st.integers(0, 120))


def forward(order: list[int]) -> list[Use]:
    return [Use(unit, FORWARD) for unit in order]


def windows(order: list[int], sizes: list[int], budget: int) -> list[tuple[int, ...]]:
    found = prefetch_windows(forward(order), sizes, budget)
    assert all(use.phase == FORWARD for window in found for use in window)
    return [tuple(use.unit for use in window) for window in found]


def record_of(order: list[int], sizes: list[int] | None = None, budget: int = 1) -> Record:
    """A record of units one after another, that has begun a forward."""
    record = Record(order, order[::-1], sizes or [10] * (max(order) + 1), budget)
    record.begin_forward()
    return record


def step(ahead: list[int], phase: int = FORWARD, *, expected: bool = True) -> Step:
    return Step(phase, tuple(Use(unit, phase) for unit in ahead), expected)


def test_the_windows_of_the_docstring_and_what_is_gathered_for_its_first_use() -> None:
    assert windows([0, 1, 2, 3], [10] * 4, 20) == [(1, 2), (2, 3), (3,), ()]
    uses = [Use(0, BACKWARD), Use(1, FORWARD), Use(1, BACKWARD)]
    assert prefetch_windows(uses, [10, 10], 1000)[0] == (Use(1, FORWARD),)


@given(walks())
@settings(max_examples=200, deadline=None)
def test_a_window_is_at_least_one_unit_and_never_more_than_one_over_the_budget(
    walk: tuple[list[int], list[int], int],
) -> None:
    order, sizes, budget = walk
    found = windows(order, sizes, budget)
    record = Record(order, order[::-1], sizes, budget)
    for _ in range(2):  # uses of a repeated microbatch are expected
        record.begin_forward()
        given_steps = [record.use(unit, FORWARD) for unit in order]
        assert [tuple(use.unit for use in each.window) for each in given_steps] == found
        assert all(each.expected for each in given_steps)
        record.end_forward()
    assert len(found) == len(order)
    for place, window in enumerate(found):
        ahead = order[place + 1 :]
        wanted = list(dict.fromkeys(u for u in ahead if u != order[place] and sizes[u]))
        # The window contains the next units, each once, without a gap.
        assert list(window) == wanted[: len(window)]
        assert bool(window) == bool(budget and wanted)
        # Without its last unit the window is below the budget. The whole window is below it only if
        # no unit is left.
        assert not window or sum(sizes[unit] for unit in window[:-1]) < budget
        if len(window) < len(wanted):
            assert sum(sizes[unit] for unit in window) >= budget


# By name: the order, and for each use the unit, the units ahead, and whether it was expected.
USES: dict[str, tuple[list[int], list[tuple[int, list[int], bool]]]] = {
    "continues after a unit that came too early": (
        [0, 1, 2, 3, 4],
        [(0, [1], True), (3, [4], False), (4, [], True)],
    ),
    "looks further on before it looks from the start": (
        [0, 1, 0, 2],
        [(1, [0], False), (0, [2], True), (0, [1], False)],
    ),
    "stays at its place when a unit is unknown": ([0, 1], [(2, [], False), (0, [1], True)]),
}


@pytest.mark.parametrize("name", USES)
def test_execution(name: str) -> None:
    order, uses = USES[name]
    record = record_of(order, [10] * 5)
    for unit, ahead, expected in uses:
        assert record.use(unit, FORWARD) == step(ahead, expected=expected)


def test_the_next_forward_and_backward_are_expected_as_they_were_seen() -> None:
    record = record_of([0, 1, 2])
    for unit in (2, 0):
        record.use(unit, FORWARD)
        record.leave(unit)
    record.end_forward()
    assert record.first == (Use(2, FORWARD), Use(0, FORWARD))
    # Backward is not recorded yet: the reverse order of forward is expected.
    record.begin_backward()
    assert record.use(0, BACKWARD) == step([2], BACKWARD)


def test_a_unit_stays_if_its_next_use_is_its_own_or_of_units_in_use() -> None:
    record = record_of([0, 1, 1, 2])
    for unit in (0, 1):
        record.use(unit, FORWARD)
    assert record.next_phase(1, [], has_backward=False) == FORWARD  # it is called once more
    record.use(1, FORWARD)
    assert record.next_phase(1, [], has_backward=True) == 0
    record.use(2, FORWARD)
    assert record.next_phase(2, [], has_backward=True) == BACKWARD
    assert record.next_phase(2, [], has_backward=False) == 0
    record = Record([0, 1, 2], [0, 1, 2], [10] * 3, 1)  # 0 contains 1, which contains 2
    record.begin_forward()
    for unit in (0, 1, 2):
        record.use(unit, FORWARD)
    for unit, in_use in ((2, [0, 1]), (1, [0]), (0, [])):
        assert record.next_phase(unit, in_use, has_backward=True) == BACKWARD
    record = record_of([0])
    record.begin_backward()
    record.use(0, BACKWARD)
    assert record.next_phase(0, [], has_backward=True) == 0  # nothing follows a backward


def test_a_unit_that_was_not_used_comes_after_the_one_before_it() -> None:
    assert first_use_order([2, 0, 2], 4) == [2, 3, 0, 1]
    assert first_use_order([1], 3) == [0, 1, 2]
    assert first_use_order([], 2) == [0, 1]


def test_orders_differ_when_their_digests_do() -> None:
    orders = [*itertools.permutations(range(4)), (11,), (1, 1)]
    digests = [order_digest(list(order)) for order in orders]
    assert len(set(digests)) == len(orders)
    assert {len(digest) for digest in digests} == {8}
    assert order_digest([2, 0]) == order_digest([2, 0])
