"""The record of a microbatch, and what follows from a place in it."""

from __future__ import annotations

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
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD

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


# Order, sizes, budget, windows.
WINDOWS: list[tuple[list[int], list[int], int, list[tuple[int, ...]]]] = [
    ([0, 1, 2, 3], [10] * 4, 20, [(1, 2), (2, 3), (3,), ()]),  # the example of the docstring
    ([0, 1, 2], [10, 20, 30], 1, [(1,), (2,), ()]),  # a budget of one element: one unit
    ([0, 1, 2, 3], [10, 50, 10, 10], 20, [(1,), (2, 3), (3,), ()]),  # below the first unit
    ([0, 1, 2, 3], [10, 0, 0, 10], 1, [(3,), (3,), (3,), ()]),  # some need no gathering
    ([0, 1, 0, 1, 2], [10] * 3, 1000, [(1, 2), (0, 2), (1, 2), (2,), ()]),  # each once
]


@pytest.mark.parametrize(("order", "sizes", "budget", "expected"), WINDOWS)
def test_windows(
    order: list[int], sizes: list[int], budget: int, expected: list[tuple[int, ...]]
) -> None:
    assert windows(order, sizes, budget) == expected


def test_what_is_gathered_ahead_is_gathered_for_its_first_use() -> None:
    uses = [Use(0, BACKWARD), Use(1, FORWARD), Use(1, BACKWARD)]
    assert prefetch_windows(uses, [10, 10], 1000)[0] == (Use(1, FORWARD),)


@given(walks())
@settings(max_examples=200, deadline=None)
def test_a_window_is_at_least_one_unit_and_never_more_than_one_over_the_budget(
    walk: tuple[list[int], list[int], int],
) -> None:
    order, sizes, budget = walk
    found = windows(order, sizes, budget)
    assert len(found) == len(order)
    for place, window in enumerate(found):
        ahead = order[place + 1 :]
        wanted = list(dict.fromkeys(u for u in ahead if u != order[place] and sizes[u]))
        # The nearest ones, each once, without a gap.
        assert list(window) == wanted[: len(window)]
        assert bool(window) == bool(budget and wanted)
        # Without the last one the window is below the budget; with one more it was full before.
        assert not window or sum(sizes[unit] for unit in window[:-1]) < budget
        if len(window) < len(wanted):
            assert sum(sizes[unit] for unit in window) >= budget


@given(walks())
@settings(max_examples=100, deadline=None)
def test_a_record_that_is_followed_gives_each_window_in_turn(
    walk: tuple[list[int], list[int], int],
) -> None:
    order, sizes, budget = walk
    record = Record(order, order[::-1], sizes, budget)
    ahead = prefetch_windows(forward(order), sizes, budget)
    for _ in range(2):
        record.begin_forward()
        steps = [record.use(unit, FORWARD) for unit in order]
        assert steps == [Step(FORWARD, window, True) for window in ahead]
        record.end_forward()


def test_execution_goes_on_from_a_unit_that_came_too_early() -> None:
    record = record_of([0, 1, 2, 3, 4])
    assert record.use(0, FORWARD) == step([1])
    assert record.use(3, FORWARD) == step([4], expected=False)
    assert record.use(4, FORWARD) == step([])


def test_a_unit_is_looked_for_further_on_before_it_is_looked_for_from_the_start() -> None:
    record = record_of([0, 1, 0, 2])
    assert record.use(1, FORWARD) == step([0], expected=False)
    assert record.use(0, FORWARD) == step([2])
    assert record.use(0, FORWARD) == step([1], expected=False)


def test_the_place_stays_when_a_unit_is_unknown() -> None:
    record = record_of([0, 1], [10] * 3)
    assert record.use(2, FORWARD) == step([], expected=False)
    assert record.use(0, FORWARD) == step([1])


def test_another_order_is_expected_from_the_next_forward_on() -> None:
    record = record_of([0, 1, 2])
    for unit in (2, 0):
        record.use(unit, FORWARD)
        record.leave(unit)
    record.end_forward()
    assert record.units_in_forward == [2, 0]
    assert record.first == (Use(2, FORWARD), Use(0, FORWARD))
    record.begin_backward()  # not seen yet: as forward left them, from the end
    assert record.use(0, BACKWARD) == step([2], BACKWARD)


def test_backward_is_expected_as_it_was_seen() -> None:
    record = record_of([0, 1, 2])
    for seen in ([2, 0, 1], [2, 0, 1], [2, 0], [2, 0, 1]):
        record.begin_backward()
        steps = [record.use(unit, BACKWARD) for unit in seen]
        record.end_backward()
    # A backward that was only a part of it has changed nothing.
    assert steps == [step([0], BACKWARD), step([1], BACKWARD), step([], BACKWARD)]


def test_forward_within_its_own_backward_makes_it_one_use_of_both_kinds() -> None:
    record = record_of([0, 1])
    for unit in (0, 1):
        record.use(unit, FORWARD)
        record.leave(unit)
    record.end_forward()
    for _ in range(2):
        record.begin_backward()
        first = record.use(1, BACKWARD)
        record.repeats(1)
        record.use(0, BACKWARD)
        record.end_backward()
    assert first.phase == BOTH
    assert first.expected


def test_a_unit_stays_if_its_next_use_is_its_own() -> None:
    record = record_of([0, 1, 1, 2])
    for unit in (0, 1):
        record.use(unit, FORWARD)
    assert record.next_phase(1, [], has_backward=False) == FORWARD  # it is called once more
    record.use(1, FORWARD)
    assert record.next_phase(1, [], has_backward=True) == 0
    record.use(2, FORWARD)
    assert record.next_phase(2, [], has_backward=True) == BACKWARD
    assert record.next_phase(2, [], has_backward=False) == 0


def test_units_in_use_are_passed_over_when_the_next_use_is_looked_for() -> None:
    record = Record([0, 1, 2], [0, 1, 2], [10] * 3, 1)  # 0 contains 1, which contains 2
    record.begin_forward()
    for unit in (0, 1, 2):
        record.use(unit, FORWARD)
    assert record.next_phase(2, [0, 1], has_backward=True) == BACKWARD
    assert record.next_phase(1, [0], has_backward=True) == BACKWARD
    assert record.next_phase(0, [], has_backward=True) == BACKWARD


def test_nothing_is_expected_to_follow_the_end_of_backward() -> None:
    record = record_of([0])
    record.begin_backward()
    record.use(0, BACKWARD)
    assert record.next_phase(0, [], has_backward=True) == 0


def test_a_unit_that_was_not_used_comes_after_the_one_before_it() -> None:
    assert first_use_order([2, 0, 2], 4) == [2, 3, 0, 1]
    assert first_use_order([1], 3) == [0, 1, 2]
    assert first_use_order([], 2) == [0, 1]


@given(st.lists(st.permutations(range(6)), min_size=2, max_size=2))
@settings(deadline=None)
def test_orders_differ_when_their_digests_do(orders: list[list[int]]) -> None:
    first, second = orders
    assert (order_digest(first) == order_digest(second)) == (first == second)
    assert len(order_digest(first)) == 8


def test_a_digest_tells_eleven_from_one_and_one() -> None:
    assert order_digest([11]) != order_digest([1, 1])
