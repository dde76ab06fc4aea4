"""The placement of tensors: granules stay whole, whatever is requested, with little padding."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_engine.layout import ALIGNMENT, BLOCK, MIN_BLOCK_NUMEL, Layout, round_up
from fsdp_engine.layout.placement import PERCENT_PER_BUFFER, TensorRequest, plan_layouts

ROWS = st.sampled_from([1, 2, 3, 4, 6, 27, 48, 64, 96, 100, 128, 192, 320])
WORLDS = st.tuples(st.integers(1, 40), st.integers(1, 5))


@st.composite
def requests_with_granules(draw: st.DrawFn) -> list[TensorRequest]:
    """Matrices, vectors, scalars and empty tensors; granules are rows, blocks of rows or whole
    tensors."""
    found = []
    for index in range(draw(st.integers(1, 12))):
        shape: tuple[int, ...] = draw(
            st.one_of(
                st.just(()),
                st.tuples(st.integers(0, 300)),
                st.tuples(st.integers(0, 40), ROWS),
                st.tuples(st.integers(1, 4), st.integers(1, 10), ROWS),
            )
        )
        rows, row = math.prod(shape[:-1]), math.prod(shape[-1:])
        blocks = [row * block for block in (1, 4) if rows % block == 0]
        granules = [1, max(1, rows * row), *(block for block in blocks if block)]
        found.append(TensorRequest(f"tensor{index}", shape, draw(st.sampled_from(granules))))
    return found


def granule_of(request: TensorRequest, num_shards: int) -> int:
    """Elements that stay together: the requested granule, or a block of a large tensor."""
    has_blocks = num_shards > 1 and request.granule == 1 and request.numel >= MIN_BLOCK_NUMEL
    return BLOCK if has_blocks else request.granule


def padding_of_the_lcm_rule(requests: Sequence[TensorRequest], num_shards: int) -> int:
    """One buffer. Shards are a multiple of all granules; tensors start at multiples of theirs."""
    filled = [request for request in requests if request.numel]
    steps = [math.lcm(ALIGNMENT, granule_of(request, num_shards)) for request in filled]
    end = 0
    for request, step in zip(filled, steps, strict=True):
        end = round_up(end, step) + request.numel
    shard = round_up(-(-end // num_shards), math.lcm(ALIGNMENT, *steps))
    return shard * num_shards - sum(request.numel for request in requests)


def padding(layouts: Sequence[Layout]) -> int:
    return sum(layout.padding for layout in layouts)


def assert_no_boundary_cuts_a_granule(layout: Layout) -> None:
    """Check every shard boundary inside every tensor, independent of the checks of ``Layout``."""
    for slot in layout.slots:
        if slot.numel:
            first = round_up(slot.offset + 1, layout.shard_numel)
            cuts = range(first, slot.stop, layout.shard_numel)
            granule = granule_of(
                TensorRequest(slot.name, slot.shape, slot.granule), layout.num_shards
            )
            assert all((cut - slot.offset) % granule == 0 for cut in cuts)


@given(requests_with_granules(), WORLDS)
@settings(max_examples=300, deadline=None)
def test_every_request_is_placed_once_no_granule_is_cut_and_little_is_padded(
    requests: list[TensorRequest], world: tuple[int, int]
) -> None:
    layouts = plan_layouts(requests, inner_size=world[0], outer_size=world[1])
    slots = [slot for layout in layouts for slot in layout.slots]
    placed = {slot.name: TensorRequest(slot.name, slot.shape, slot.granule) for slot in slots}
    assert len(slots) == len(requests)
    assert placed == {request.name: request for request in requests}
    for layout in layouts:
        assert (layout.inner_size, layout.outer_size) == world
        assert_no_boundary_cuts_a_granule(layout)
    assert padding(layouts) <= padding_of_the_lcm_rule(requests, math.prod(world))
    granules = {r.name: granule_of(r, math.prod(world)) for r in requests if r.numel}
    classes = set(granules.values())
    assert 1 <= len(layouts) <= max(1, len(classes))
    # Tensors of equal granules are in one buffer: two buffers would only need more padding.
    for granule in classes:
        holders = [
            layout
            for layout in layouts
            if any(granules.get(slot.name) == granule for slot in layout.slots)
        ]
        assert len(holders) == 1
    # The plan depends only on the number of shards, and is reproducible.
    for inner, outer in (world, (math.prod(world), 1), (1, math.prod(world))):
        again = plan_layouts(list(requests), inner_size=inner, outer_size=outer)
        assert [(each.numel, each.slots) for each in again] == [
            (each.numel, each.slots) for each in layouts
        ]


@given(requests_with_granules(), WORLDS)
@settings(max_examples=200, deadline=None)
def test_without_granules_order_is_kept_in_the_shortest_aligned_buffer(
    requests: list[TensorRequest], world: tuple[int, int]
) -> None:
    free = [TensorRequest(request.name, request.shape) for request in requests]
    (layout,) = plan_layouts(free, inner_size=world[0], outer_size=world[1])
    assert [slot.name for slot in layout.slots] == [request.name for request in requests]
    end, num_shards = 0, math.prod(world)
    steps = [math.lcm(ALIGNMENT, granule_of(request, num_shards)) for request in free]
    for slot, step in zip(layout.slots, steps, strict=True):
        assert slot.offset == round_up(end, step)
        end = slot.stop
    assert layout.numel == round_up(end, num_shards * max(steps))


def shortest_shard(requests: Sequence[TensorRequest], num_shards: int, limit: int) -> int:
    """The shortest shard below ``limit`` that takes all requests in some order, else ``limit``."""

    def first_start(request: TensorRequest, start: int, size: int) -> int | None:
        for offset in range(start, start + 2 * size, ALIGNMENT):
            cuts = range(round_up(offset + 1, size), offset + request.numel, size)
            if all((cut - offset) % request.granule == 0 for cut in cuts):
                return offset
        return None

    def fits(order: Sequence[TensorRequest], size: int) -> bool:
        end = 0
        for request in order:
            # The first legal start leaves most room for later tensors.
            start = first_start(request, round_up(end, ALIGNMENT), size)
            if start is None or start + request.numel > size * num_shards:
                return False
            end = start + request.numel
        return True

    least = round_up(-(-sum(request.numel for request in requests) // num_shards), ALIGNMENT)
    orders = list(itertools.permutations(requests))
    for size in range(least, limit, ALIGNMENT):
        if any(fits(order, size) for order in orders):
            return size
    return limit


def test_one_buffer_is_mostly_as_short_as_an_exhaustive_search_over_orders_finds() -> None:
    generator = random.Random(0)
    longer, num_compared = 0.0, 0
    while num_compared < 60:
        requests = []
        for index in range(4):
            row, rows = generator.choice([64, 96, 128, 192, 256, 320]), generator.randint(1, 12)
            granule = generator.choice([1, row, row, row * rows])
            requests.append(TensorRequest(f"tensor{index}", (rows, row), granule))
        num_shards = generator.choice([2, 3, 4, 8])
        layouts = plan_layouts(requests, inner_size=num_shards, outer_size=1)
        if len(layouts) > 1:
            continue
        found = layouts[0].shard_numel
        longer += found / shortest_shard(requests, num_shards, found) - 1
        num_compared += 1
    assert longer / num_compared < 0.01


def test_the_worked_example_of_the_module_holds() -> None:
    requests = [
        TensorRequest("a", (10, 320), 320),
        TensorRequest("b", (11, 256), 256),
        TensorRequest("c", (128,)),
    ]
    (layout,) = plan_layouts(requests, inner_size=4, outer_size=1)
    assert [(slot.name, slot.offset) for slot in layout.slots] == [
        ("a", 0),
        ("b", 3264),
        ("c", 6080),
    ]
    assert layout.shard_numel == 1600
    assert layout.padding / layout.num_tensor_elements == pytest.approx(0.042, abs=5e-4)
    assert padding_of_the_lcm_rule(requests, 4) == 4 * 2560 - 6144


def llama_3_8b_block() -> list[TensorRequest]:
    matrices = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    matrices |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    rows = [TensorRequest(name, shape, shape[1]) for name, shape in matrices.items()]
    return [TensorRequest("norm1", (4096,)), *rows, TensorRequest("norm2", (4096,))]


def test_a_llama_block_on_1024_ranks_is_split_by_rows_as_the_module_says() -> None:
    requests = llama_3_8b_block()
    num_elements = sum(request.numel for request in requests)
    layouts = plan_layouts(requests, inner_size=1024, outer_size=1)
    by_granule = {slot.granule: layout for layout in layouts for slot in layout.slots}
    assert len(layouts) == 3
    assert by_granule[4096].shard_numel == 38 * 4096
    assert by_granule[14336].shard_numel == 4 * 14336
    assert by_granule[1].shard_numel == BLOCK
    assert padding(layouts) / num_elements == pytest.approx(0.0012, abs=5e-5)
    assert padding_of_the_lcm_rule(requests, 1024) / num_elements == pytest.approx(0.077, abs=5e-4)


@pytest.mark.parametrize("num_shards", [8, 64, 512, 1024, 2048, 4096])
def test_an_extra_buffer_saves_at_least_its_price(num_shards: int) -> None:
    requests = llama_3_8b_block()
    layouts = plan_layouts(requests, inner_size=num_shards, outer_size=1)
    price = PERCENT_PER_BUFFER / 100 * sum(request.numel for request in requests)
    saved = padding_of_the_lcm_rule(requests, num_shards) - padding(layouts)
    assert saved >= price * (len(layouts) - 1)


def test_dearer_buffers_are_fewer_and_free_ones_pad_least() -> None:
    def plan(percent: float) -> tuple[Layout, ...]:
        requests = llama_3_8b_block()
        return plan_layouts(requests, inner_size=512, outer_size=1, percent_per_buffer=percent)

    plans = [plan(percent) for percent in (0, 0.25, 1, 100)]
    assert [len(layouts) for layouts in plans] == [3, 3, 1, 1]
    assert padding(plans[0]) <= padding(plans[1]) < padding(plans[2]) == padding(plans[3])


def test_granule_one_fills_the_space_that_rows_leave() -> None:
    requests = [TensorRequest("weight", (5, 128), 128), TensorRequest("bias", (100,))]
    (layout,) = plan_layouts(requests, inner_size=2, outer_size=1)
    assert layout.numel == 2 * 3 * 128
    assert {slot.name for slot in layout.slots} == {"weight", "bias"}


@pytest.mark.parametrize(
    ("all_rows", "shard_rows"), [((5, 4, 3, 3, 3), 9), ((5, 5, 5), 10), ((7, 6, 6), 12), ((8,), 8)]
)
def test_a_granule_of_the_whole_tensor_keeps_it_in_one_shard_as_short_as_can_be(
    all_rows: tuple[int, ...], shard_rows: int
) -> None:
    requests = [
        TensorRequest(f"weight{index}", (rows, 64), rows * 64)
        for index, rows in enumerate(all_rows)
    ]
    (layout,) = plan_layouts(requests, inner_size=2, outer_size=1)
    assert layout.shard_numel == shard_rows * 64
    for slot in layout.slots:
        assert slot.offset // layout.shard_numel == (slot.stop - 1) // layout.shard_numel


def test_a_granule_longer_than_an_even_share_lengthens_the_shards() -> None:
    (layout,) = plan_layouts([TensorRequest("weight", (10, 10), 100)], inner_size=8, outer_size=1)
    assert layout.shard_numel == 128


def test_only_empty_tensors_need_no_elements() -> None:
    (layout,) = plan_layouts([TensorRequest("none", (0, 7), 7)], inner_size=4, outer_size=1)
    assert layout.numel == 0
    assert plan_layouts([], inner_size=4, outer_size=2) == ()
    (layout,) = plan_layouts(llama_3_8b_block(), inner_size=1, outer_size=1)
    assert layout.padding == 0  # one rank needs none for granules


def test_many_row_sizes_make_a_plan() -> None:
    rows = [64 * prime for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)]
    requests = [TensorRequest(f"weight{row}", (2048, row), row) for row in rows]
    layouts = plan_layouts(requests, inner_size=256, outer_size=1)
    assert 1 < len(layouts) <= len(rows)
    assert padding(layouts) < padding_of_the_lcm_rule(requests, 256) / 100
    for layout in layouts:
        assert_no_boundary_cuts_a_granule(layout)


WEIGHT = TensorRequest("weight", (4,))
REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: request(0), ValueError, "granule of weight: expected at least 1; found 0"),
    (lambda: request(-6), ValueError, "granule of weight: expected at least 1; found -6"),
    (lambda: request(5), ValueError, "a divisor of its 24 elements (shape (4, 6)); found 5"),
    (lambda: request(2, ()), ValueError, "weight: expected a divisor of its 1 elements (shape ())"),
    (lambda: request(6.0), TypeError, "granule of weight: expected an integer; found 6.0"),
    (lambda: request(None), TypeError, "granule of weight: expected an integer; found None"),
    (lambda: plan([WEIGHT, WEIGHT]), ValueError, "weight: expected one request of this name"),
    (lambda: plan([WEIGHT], inner=0), ValueError, "inner_size: expected at least 1; found 0"),
    (lambda: plan([WEIGHT], outer=0), ValueError, "outer_size: expected at least 1; found 0"),
    (lambda: plan([], percent=-1), ValueError, "percent_per_buffer: expected at least 0; found"),
    (lambda: plan([], percent=math.nan), ValueError, "percent_per_buffer: expected at least 0;"),
]


def request(granule: Any, shape: tuple[int, ...] = (4, 6)) -> TensorRequest:
    return TensorRequest("weight", shape, granule)


def plan(requests: Any, inner: int = 1, outer: int = 1, percent: float = 0) -> tuple[Layout, ...]:
    return plan_layouts(requests, inner_size=inner, outer_size=outer, percent_per_buffer=percent)


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_bad_granules_names_sizes_and_prices_are_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
