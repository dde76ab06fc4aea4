"""Orders of execution and what is gathered ahead of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_engine.runtime.order import (
    Walk,
    first_use_order,
    leave_order,
    order_digest,
    prefetch_windows,
)

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=9)


@st.composite
def walks(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """An order (units repeat, some are missing), sizes, a budget."""
    sizes = draw(SIZES)
    order = draw(st.lists(st.integers(0, len(sizes) - 1), max_size=14))
    return order, sizes, draw(st.integers(0, 120))


def test_the_example_of_the_docstring() -> None:
    sizes = [10] * 4
    assert prefetch_windows([0, 1, 2, 3], sizes, 20, +1) == [(1, 2), (2, 3), (3,), ()]
    assert prefetch_windows([0, 1, 2, 3], sizes, 20, -1) == [(), (0,), (1, 0), (2, 1)]


def test_a_budget_of_one_element_gathers_one_unit_ahead() -> None:
    assert prefetch_windows([0, 1, 2], [10, 20, 30], 1, +1) == [(1,), (2,), ()]


def test_a_budget_below_the_first_unit_still_takes_it_and_no_more() -> None:
    assert prefetch_windows([0, 1, 2, 3], [10, 50, 10, 10], 20, +1)[0] == (1,)


def test_units_that_need_no_gathering_are_passed_over() -> None:
    assert prefetch_windows([0, 1, 2, 3], [10, 0, 0, 10], 1, +1) == [(3,), (3,), (3,), ()]


def test_a_unit_called_twice_is_gathered_ahead_once() -> None:
    assert prefetch_windows([0, 1, 0, 1, 2], [10] * 3, 1000, +1)[0] == (1, 2)


@given(walks())
@settings(max_examples=100, deadline=None)
def test_a_budget_of_nothing_gathers_nothing_ahead(walk: tuple[list[int], list[int], int]) -> None:
    order, sizes, _ = walk
    assert prefetch_windows(order, sizes, 0, +1) == [()] * len(order)


@given(walks(), st.sampled_from((1, -1)))
@settings(max_examples=200, deadline=None)
def test_a_window_is_at_least_one_unit_and_never_more_than_one_over_the_budget(
    walk: tuple[list[int], list[int], int], step: int
) -> None:
    order, sizes, budget = walk
    windows = prefetch_windows(order, sizes, budget, step)
    assert len(windows) == len(order)
    for place, window in enumerate(windows):
        ahead = order[place + 1 :] if step > 0 else order[:place][::-1]
        wanted = list(dict.fromkeys(u for u in ahead if u != order[place] and sizes[u]))
        # The nearest ones, each once, without a gap.
        assert list(window) == wanted[: len(window)]
        if budget and wanted:
            assert window
        # Without the last one the window is below the budget; with one more it was full before.
        assert not window or sum(sizes[unit] for unit in window[:-1]) < budget
        if len(window) < len(wanted):
            assert sum(sizes[unit] for unit in window) >= budget


@given(walks())
@settings(max_examples=100, deadline=None)
def test_a_walk_that_is_followed_gives_each_window_in_turn(
    walk: tuple[list[int], list[int], int],
) -> None:
    order, sizes, budget = walk
    follower = Walk(order, sizes, budget)
    windows = prefetch_windows(order, sizes, budget, +1)
    for _ in range(2):
        assert [follower.advance(unit) for unit in order] == [(w, True) for w in windows]
        follower.restart()


def test_a_walk_goes_on_from_a_unit_that_came_too_early() -> None:
    walk = Walk([0, 1, 2, 3, 4], [10] * 5, 1)
    assert walk.advance(0) == ((1,), True)
    assert walk.advance(3) == ((4,), False)
    assert walk.advance(4) == ((), True)


def test_a_walk_looks_further_on_before_it_looks_back() -> None:
    walk = Walk([0, 1, 0, 2], [10] * 3, 1)
    assert walk.advance(1) == ((0,), False)
    assert walk.advance(0) == ((2,), True)
    assert walk.advance(0) == ((1,), False)


def test_a_walk_stays_where_it_is_when_a_unit_is_unknown() -> None:
    walk = Walk([0, 1], [10] * 3, 1)
    assert walk.advance(2) == ((), False)
    assert walk.advance(0) == ((1,), True)


def test_units_are_left_after_those_that_they_contain() -> None:
    assert leave_order(["", "a", "a.b", "c"]) == [2, 1, 3, 0]
    assert leave_order(["", "a", "ab"]) == [1, 2, 0]
    assert leave_order([""]) == [0]
    assert leave_order(["", "a", "a.b", "a.b.c", "a.d", "e"]) == [3, 2, 4, 1, 5, 0]


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
