"""Addresses planned from who was filled together with whom: pure integers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_engine.codecs.phase import FORWARD
from fsdp_engine.devices.address_plan import (
    ALIGNMENT,
    SLACK,
    AddressPlan,
    Overlaps,
    Recorder,
    aligned,
    members,
    plan_addresses,
)
from fsdp_engine.runtime.record import Use, prefetch_windows

# (storage, whether it is filled); what does not change anything is passed over.
Events = list[tuple[int, bool]]


def recorded(sizes: list[int], events: Events) -> tuple[Overlaps, list[set[int]]]:
    """What a recorder says of events, and which storages were filled after each of them."""
    recorder, filled, moments = Recorder(), set[int](), []
    for number, size in enumerate(sizes):
        assert recorder.add(size) == number
    for number, fills in events:
        if fills != (number in filled):
            (recorder.fill if fills else recorder.drain)(number)
            filled ^= {number}
        moments.append(set(filled))
    return recorder.take(), moments


def overlap(plan: AddressPlan, sizes: list[int], first: int, second: int) -> bool:
    starts = plan.offsets[first], plan.offsets[second]
    if starts[0] is None or starts[1] is None or first == second:
        return False
    return starts[0] < starts[1] + sizes[second] and starts[1] < starts[0] + sizes[first]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], Events]:
    sizes = draw(st.lists(st.integers(1, 20 * ALIGNMENT), min_size=1, max_size=12))
    event = st.tuples(st.integers(0, len(sizes) - 1), st.booleans())
    return [aligned(size) for size in sizes], draw(st.lists(event, max_size=60))


@settings(max_examples=300, deadline=None)
@given(steps())
def test_what_was_filled_at_one_time_never_overlaps(step: tuple[list[int], Events]) -> None:
    sizes, events = step
    record, moments = recorded(sizes, events)
    plan = plan_addresses(sizes, record, limit=sum(sizes))
    used = set().union(*moments) if moments else set()
    assert plan.is_complete  # nobody needs more than an address of its own
    assert {number for number, offset in enumerate(plan.offsets) if offset is not None} == used
    assert plan.num_bytes <= sum(sizes[number] for number in used)
    load = max((sum(sizes[number] for number in moment) for moment in moments), default=0)
    assert record.load == load <= plan.num_bytes
    for moment in moments:
        for first in moment:
            assert not any(overlap(plan, sizes, first, second) for second in moment)
    for number, offset in enumerate(plan.offsets):
        assert offset is None or offset % ALIGNMENT == 0
        assert set(members(plan.rivals[number])) == {
            other for other in range(len(sizes)) if overlap(plan, sizes, number, other)
        }


@settings(max_examples=200, deadline=None)
@given(steps(), st.integers(0, 40 * ALIGNMENT))
def test_a_limit_is_kept_and_who_finds_no_room_has_no_address(
    step: tuple[list[int], Events], limit: int
) -> None:
    sizes, events = step
    record, moments = recorded(sizes, events)
    for most in (limit, None):
        plan = plan_addresses(sizes, record, most)
        bound = aligned(int(SLACK * record.load)) if most is None else most
        assert plan.num_bytes <= bound
        placed = [offset is not None for offset in plan.offsets]
        assert plan.is_complete == (sum(placed) == len(record.order))
        for moment in moments:
            for first in moment:
                assert not any(overlap(plan, sizes, first, second) for second in moment)


@settings(max_examples=200, deadline=None)
@given(steps(), steps())
def test_records_join_and_contain_each_other(
    one: tuple[list[int], Events], two: tuple[list[int], Events]
) -> None:
    sizes = one[0]
    first, _ = recorded(sizes, one[1])
    second, _ = recorded(sizes, [(number % len(sizes), fills) for number, fills in two[1]])
    both = first.joined(second)
    assert first.is_within(both)
    assert second.is_within(both)
    assert first.is_within(first)
    assert both.load == max(first.load, second.load)
    pairs = [{(a, b) for a, others in enumerate(r.both_ways()) for b in members(others)}
             for r in (first, second, both)]  # fmt: skip
    assert pairs[2] == pairs[0] | pairs[1]
    assert first.is_within(second) == (
        pairs[0] <= pairs[1] and first.order.keys() <= second.order.keys()
    )


def walk(order: list[int], elements: list[int], budget: int) -> Events:
    """A step: forward along ``order``, then backward, gathering ahead."""
    events: Events = []
    for direction in (order, order[::-1]):
        uses = [Use(unit, FORWARD) for unit in direction]
        windows = prefetch_windows(uses, elements, budget)
        for unit, window in zip(direction, windows, strict=True):
            events += [(number, True) for number in (unit, *(use.unit for use in window))]
            events.append((unit, False))
    return events


@pytest.mark.parametrize("num_ahead", [0, 1, 2, 3])
def test_equal_units_that_are_gathered_ahead_need_no_more_than_are_full_at_once(
    num_ahead: int,
) -> None:
    """The worked example of the module, and longer rows."""
    for num_units in (1, 2, 3, 7, 40):
        sizes = [ALIGNMENT] * num_units
        record, _ = recorded(sizes, walk(list(range(num_units)), [1] * num_units, num_ahead))
        plan = plan_addresses(sizes, record)
        assert plan.is_complete
        assert plan.num_bytes == record.load == min(1 + num_ahead, num_units) * ALIGNMENT
    if num_ahead == 1:
        record, _ = recorded([ALIGNMENT] * 3, walk([0, 1, 2], [1] * 3, 1))
        assert plan_addresses([ALIGNMENT] * 3, record).offsets == (0, ALIGNMENT, 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(2, 40), st.integers(1, 4), st.booleans())
def test_units_of_all_sizes_need_little_more_than_is_full_at_once(
    seed: int, num_units: int, num_ahead: int, has_root: bool
) -> None:
    choose = random.Random(seed)
    elements = [choose.randint(1, 60) for _ in range(num_units)]
    sizes = [number * ALIGNMENT for number in elements]
    order = choose.sample(range(1, num_units), num_units - 1)
    budget = num_ahead * sum(elements) // num_units
    events = walk(order, elements, budget)
    if has_root:
        events = [(0, True), *events, (0, False)]
    record, _ = recorded(sizes, events)
    plan = plan_addresses(sizes, record, limit=sum(sizes))
    assert record.load <= plan.num_bytes <= 1.6 * record.load


def test_a_step_that_is_known_beforehand_has_the_record_that_it_would_leave() -> None:
    elements = [3, 1, 4, 1, 5, 9, 2, 6]
    sizes = [number * ALIGNMENT for number in elements]
    record, moments = recorded(sizes, walk(list(range(8)), elements, 5))
    known = Overlaps.of_moments([sorted(moment) for moment in moments], sizes)
    assert known.both_ways() == record.both_ways()
    assert known.load == record.load
    assert known.order.keys() == record.order.keys()
