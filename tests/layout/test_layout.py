"""Layouts contain integers only, so one process can check every rank of any world."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_engine.layout import ALIGNMENT, Coordinate, Layout, TensorSlot, round_up

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Legal layouts of granule 1, with gaps and a tail of any length."""
    inner, outer = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    slots, end = [], 0
    for index, shape in enumerate(draw(st.lists(SHAPES, max_size=8))):
        offset = round_up(end, ALIGNMENT) + ALIGNMENT * draw(st.integers(0, 2))
        slots.append(TensorSlot(f"tensor{index}", shape, offset))
        end = slots[-1].stop
    shards = ALIGNMENT * inner * outer
    return Layout(
        tuple(slots), round_up(end, shards) + shards * draw(st.integers(0, 2)), inner, outer
    )


def ranks_of(layout: Layout) -> list[Coordinate]:
    """Every rank, in the order of their ranges."""
    return [
        Coordinate(outer, inner)
        for inner in range(layout.inner_size)
        for outer in range(layout.outer_size)
    ]


@given(st.integers(0, 10**9), st.integers(1, 10**6))
@settings(deadline=None)
def test_rounding_up_gives_the_smallest_multiple(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(layouts())
@settings(deadline=None)
def test_slots_are_aligned_apart_and_with_the_gaps_the_whole_line(layout: Layout) -> None:
    end = 0
    covered = [0] * layout.numel
    for slot in layout.slots:
        assert slot.offset >= end
        assert slot.offset % ALIGNMENT == 0
        assert slot.stop - slot.offset == math.prod(slot.shape)
        end = slot.stop
    assert end <= layout.numel
    for start, stop in [*layout.gaps, *((slot.offset, slot.stop) for slot in layout.slots)]:
        for position in range(start, stop):
            covered[position] += 1
    assert covered == [1] * layout.numel
    assert all(start < stop for start, stop in layout.gaps)
    assert layout.padding == sum(stop - start for start, stop in layout.gaps)
    assert layout.num_tensor_elements + layout.padding == layout.numel


@given(layouts())
@settings(deadline=None)
def test_ranges_nest_over_depth_and_tile_the_line_at_each(layout: Layout) -> None:
    for rank in ranks_of(layout):
        outermost, middle, innermost = (layout.range(depth, rank) for depth in (0, 1, 2))
        assert outermost == (0, layout.numel)
        assert outermost[0] <= middle[0] <= innermost[0]
        assert innermost[1] <= middle[1] <= outermost[1]
        assert middle[1] - middle[0] == layout.numel // layout.inner_size
        assert innermost[1] - innermost[0] == layout.shard_numel
        assert layout.shard_numel % ALIGNMENT == 0
    by_inner = [layout.range(1, Coordinate(0, inner)) for inner in range(layout.inner_size)]
    by_rank = [layout.range(2, rank) for rank in ranks_of(layout)]
    for ranges in (by_inner, by_rank):
        assert ranges[0][0] == 0
        assert ranges[-1][1] == layout.numel
        assert all(one[1] == following[0] for one, following in itertools.pairwise(ranges))
    uncut = Layout(layout.slots, layout.numel, layout.inner_size, 1)
    for inner in range(layout.inner_size):  # along an unsharded axis the coordinate has no effect
        found = {uncut.range(2, Coordinate(outer, inner)) for outer in range(5)}
        assert found == {uncut.range(1, Coordinate(0, inner))}


@given(layouts())
@settings(deadline=None)
def test_the_pieces_of_all_ranks_partition_every_tensor_at_each_depth(layout: Layout) -> None:
    whole = [Coordinate(0, 0)]
    inner_parts = [Coordinate(0, inner) for inner in range(layout.inner_size)]
    for index, slot in enumerate(layout.slots):
        for depth, ranks in ((0, whole), (1, inner_parts), (2, ranks_of(layout))):
            elements: list[int] = []
            ends: list[int] = []
            for rank in ranks:
                start, stop = layout.tensor_range(index, depth, rank)
                low, high = layout.range(depth, rank)
                if start < stop:
                    assert low <= slot.offset + start
                    assert slot.offset + stop <= high
                elements += range(start, stop)
                ends += [start, stop]
            assert elements == list(range(slot.numel))
        inner = [at for at in ends if at not in (0, slot.numel)]
        assert layout.boundary_multiple(index) == math.gcd(*inner)


@given(
    st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), st.integers(0, 12), st.integers(1, 6)
)
@settings(deadline=None)
def test_a_layout_is_refused_exactly_when_a_boundary_cuts_a_granule(
    granule: int, num_granules: int, shard_lines: int, line: int, num_shards: int
) -> None:
    granule *= 16
    slot = TensorSlot("weight", (num_granules, granule), line * ALIGNMENT, granule)
    shard, numel = shard_lines * ALIGNMENT, shard_lines * ALIGNMENT * num_shards
    boundaries = range(0, numel, shard)
    cuts = any(slot.offset < at < slot.stop and (at - slot.offset) % granule for at in boundaries)
    if slot.stop > numel or cuts:
        words = "expected" if slot.stop > numel else "weight: expected shard boundaries"
        with pytest.raises(ValueError, match=words):
            Layout((slot,), numel, num_shards)
    else:
        assert Layout((slot,), numel, num_shards).slots == (slot,)


def test_the_worked_example_of_the_module_holds() -> None:
    slots = (TensorSlot("a", (10, 7), 0), TensorSlot("b", (50,), 128))
    layout = Layout(slots, 256, inner_size=2)
    assert [layout.tensor_range(0, 1, Coordinate(0, inner)) for inner in (0, 1)] == [
        (0, 70),
        (70, 70),
    ]
    assert [layout.tensor_range(1, 1, Coordinate(0, inner)) for inner in (0, 1)] == [
        (0, 0),
        (0, 50),
    ]
    assert layout.gaps == ((70, 128), (178, 256))


def test_scalars_and_empty_tensors_have_a_place() -> None:
    slots = (TensorSlot("scale", (), 0), TensorSlot("none", (0, 4), 64), TensorSlot("b", (3,), 64))
    layout = Layout(slots, 128, inner_size=2)
    assert [slot.numel for slot in layout.slots] == [1, 0, 3]
    assert layout.tensor_range(0, 1, Coordinate(0, 0)) == (0, 1)
    assert layout.tensor_range(1, 1, Coordinate(0, 1)) == (0, 0)
    assert layout.gaps == ((1, 64), (67, 128))
    layout = Layout((TensorSlot("none", (0, 4), 0, granule=4),), 0, inner_size=2)
    assert layout.padding == 0
    assert layout.range(2, Coordinate(0, 1)) == (0, 0)


@pytest.mark.parametrize(
    ("slots", "numel", "sizes", "message"),
    [
        (((0, 100), (64, 10)), 128, (1, 1), "t1: expected to start at 100 or later; found 64"),
        (((64, 10), (0, 10)), 128, (1, 1), "t1: expected to start at 74 or later; found 0"),
        (((32, 10),), 128, (1, 1), "t0: expected an offset on a multiple of 64; found 32"),
        (((64, 65),), 128, (1, 1), "numel: expected at least 129; found 128"),
        (((0, 10),), 192, (2, 1), "numel: expected a multiple of 2 shards x 64; found 192"),
        (((0, 10),), 128, (2, 2), "numel: expected a multiple of 4 shards x 64; found 128"),
        (((0, 10),), 128, (0, 1), "expected at least 1; found 0 (inner), 1 (outer)"),
    ],
)
def test_an_illegal_layout_says_what_was_expected_and_found(
    slots: tuple[tuple[int, int], ...], numel: int, sizes: tuple[int, int], message: str
) -> None:
    placed = tuple(TensorSlot(f"t{i}", (size,), at) for i, (at, size) in enumerate(slots))
    with pytest.raises(ValueError, match=re.escape(message)):
        Layout(placed, numel, *sizes)


def test_ranges_of_ranks_in_buffers_of_other_sizes_are_equal() -> None:
    """Shards have 64 or 192 elements, and each of two ranks holds the same 64 elements of ``a``."""
    small = Layout((TensorSlot("a", (128,), 0),), 128, 2, 1)
    large = Layout((TensorSlot("b", (128,), 0), TensorSlot("a", (128,), 128)), 384, 2, 1)
    assert large.tensor_range(1, 1, Coordinate(0, 0)) == (0, 64)
    assert small.ranges_of_ranks(0, 1) == large.ranges_of_ranks(1, 1)


@given(layouts(), st.integers(0, 2))
@settings(deadline=None)
def test_ranges_of_ranks_are_equal_exactly_if_each_rank_has_the_same_range(
    layout: Layout, depth: int
) -> None:
    for one, other in itertools.combinations(range(len(layout.slots)), 2):
        if layout.slots[one].numel != layout.slots[other].numel:
            continue
        ranges = [
            [layout.tensor_range(index, depth, rank) for rank in ranks_of(layout)]
            for index in (one, other)
        ]
        found = [layout.ranges_of_ranks(index, depth) for index in (one, other)]
        held = [[stop - start for start, stop in each] for each in ranges]
        assert (found[0] == found[1]) == (held[0] == held[1])
