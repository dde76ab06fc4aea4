"""The table of levels, their pairing, and their formulas against counted elements."""

from __future__ import annotations

import itertools
import math

import pytest

from fsdp_engine.layout import Coordinate, Layout, TensorSlot
from fsdp_engine.strategies import (
    ALL_STRATEGIES,
    AXIS_BELOW_DEPTH,
    LEVELS,
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS_PARAMS,
    Axis,
    Level,
    Role,
    Strategy,
    level_from_name,
)

PAIRS = list(itertools.product(LEVELS, LEVELS))
LEGAL = [pair for pair in PAIRS if LEVELS[pair[1]].value <= LEVELS[pair[0]].value]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]
each_level = pytest.mark.parametrize("level", LEVELS.values(), ids=lambda level: level.name)
each_strategy = pytest.mark.parametrize("strategy", ALL_STRATEGIES, ids=str)


def test_there_are_ten_strategies_and_each_has_a_name() -> None:
    assert len(ALL_STRATEGIES) == 10
    assert set(ALL_STRATEGIES) == {Strategy.from_names(*pair) for pair in LEGAL}
    assert len({str(strategy) for strategy in ALL_STRATEGIES}) == 10


@pytest.mark.parametrize(("inner", "outer"), ILLEGAL)
def test_an_outer_level_above_the_inner_one_is_refused(inner: str, outer: str) -> None:
    message = (
        f"outer_strategy: expected a level at most that of strategy='{inner}'; found '{outer}'"
    )
    with pytest.raises(ValueError, match=message):
        Strategy.from_names(inner, outer)


@pytest.mark.parametrize("field", ["strategy", "outer_strategy"])
@pytest.mark.parametrize("name", ["zero3", "", None, []])
def test_an_unknown_level_names_the_field_and_the_legal_levels(field: str, name: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected one of ") as caught:
        level_from_name(name, field)  # type: ignore[arg-type]
    assert all(level in str(caught.value) for level in LEVELS)
    assert str(caught.value).endswith(f"found {name!r}")


def test_from_names_names_the_unknown_level() -> None:
    with pytest.raises(ValueError, match=r"^strategy: "):
        Strategy.from_names("ddp")
    with pytest.raises(ValueError, match=r"^outer_strategy: "):
        Strategy.from_names("optim", "ddp")


def test_the_outer_level_is_no_shard_unless_given() -> None:
    assert Strategy.from_names("optim_grads_params") == Strategy(OPTIM_GRADS_PARAMS, NO_SHARD)


def test_each_level_cuts_one_role_more_than_the_one_below() -> None:
    cut = {name: {role for role in Role if level.shards(role)} for name, level in LEVELS.items()}
    assert cut == {
        "no_shard": set(),
        "optim": {Role.OPTIM},
        "optim_grads": {Role.OPTIM, Role.GRAD},
        "optim_grads_params": {Role.OPTIM, Role.GRAD, Role.PARAM},
    }


@each_strategy
def test_depths_nest_and_count_the_axes_that_shard_a_role(strategy: Strategy) -> None:
    depths = [strategy.depth(role) for role in (Role.PARAM, Role.GRAD, Role.OPTIM)]
    assert depths == sorted(depths)
    for role in Role:
        # A role sharded along the outer axis is sharded along the inner one, so its depth suffices.
        cut = [axis for axis in AXIS_BELOW_DEPTH if strategy.shards(role, axis)]
        assert cut == list(AXIS_BELOW_DEPTH[: strategy.depth(role)])


@each_strategy
def test_each_rank_holds_the_fraction_of_the_levels(strategy: Strategy) -> None:
    layout = Layout((TensorSlot("weight", (1000,), 0),), 1024, inner_size=4, outer_size=2)
    sizes = {Axis.INNER: 4, Axis.OUTER: 2}
    for role in Role:
        start, stop = layout.range(strategy.depth(role), Coordinate(1, 2))
        fraction = math.prod(strategy.level(axis).fraction(role, sizes[axis]) for axis in Axis)
        assert stop - start == 1024 * fraction


def test_the_worked_example_of_the_pairing_holds() -> None:
    hfsdp = Strategy(OPTIM_GRADS_PARAMS, OPTIM)
    layout = Layout((TensorSlot("weight", (1024,), 0),), 1024, inner_size=4, outer_size=2)
    at = Coordinate(outer=1, inner=2)
    assert layout.range(hfsdp.depth(Role.PARAM), at) == (512, 768)
    assert layout.range(hfsdp.depth(Role.GRAD), at) == (512, 768)
    assert layout.range(hfsdp.depth(Role.OPTIM), at) == (640, 768)


class Ring:
    """A ring of ranks that moves real lists, chunk by chunk, and counts what rank 0 sends."""

    def __init__(self, size: int, numel: int) -> None:
        assert numel % size == 0
        self.size, self.chunk = size, numel // size
        self.sent = 0

    def part(self, index: int) -> slice:
        start = index % self.size * self.chunk
        return slice(start, start + self.chunk)

    def reduce_scatter(self, buffers: list[list[int]]) -> list[list[int]]:
        """Rank r ends with the sum of chunk r; ``buffers`` are used up."""
        for step in range(1, self.size):
            # Rank r passes on the chunk that ends, after all hops, with the rank of its number.
            sent = [buffers[rank][self.part(rank - step)] for rank in range(self.size)]
            self.sent += len(sent[0])
            for rank, chunk in enumerate(sent):
                target = buffers[(rank + 1) % self.size]
                where = self.part(rank - step)
                target[where] = [a + b for a, b in zip(target[where], chunk, strict=True)]
        return [buffers[rank][self.part(rank)] for rank in range(self.size)]

    def all_gather(self, chunks: list[list[int]]) -> list[list[int]]:
        """Every rank ends with all chunks, in order."""
        buffers = [[0] * (self.size * self.chunk) for _ in chunks]
        for rank, chunk in enumerate(chunks):
            buffers[rank][self.part(rank)] = chunk
        for step in range(self.size - 1):
            sent = [buffers[rank][self.part(rank - step)] for rank in range(self.size)]
            self.sent += len(sent[0])
            for rank, chunk in enumerate(sent):
                buffers[(rank + 1) % self.size][self.part(rank - step)] = chunk
        return buffers


def simulate(level: Level, size: int, numel: int, num_microbatches: int) -> tuple[int, int]:
    """Elements of parameters and of gradients that rank 0 sends in one step of ``level``.

    Derived from each role: full parameters for forward and for backward if they are sharded, and
    the gradient summed over the ranks for the optimizer state.
    """
    params, grads = Ring(size, numel), Ring(size, numel)
    cuts = {role: level.shards(role) for role in Role}
    weights = list(range(numel))
    shards = [weights[params.part(rank)] for rank in range(size)]
    local = [[(rank + 1) * (i + 1) for i in range(numel)] for rank in range(size)]
    total = [sum(buffer[i] for buffer in local) for i in range(numel)]

    for _ in range(num_microbatches):
        if cuts[Role.PARAM]:
            for _pass in ("forward", "backward"):
                assert params.all_gather(shards) == [weights] * size
        if cuts[Role.GRAD]:
            reduced = grads.reduce_scatter([list(buffer) for buffer in local])
            assert [reduced[rank] == total[grads.part(rank)] for rank in range(size)]
    if not cuts[Role.GRAD]:
        reduced = grads.reduce_scatter([list(buffer) for buffer in local])
        assert reduced == [total[grads.part(rank)] for rank in range(size)]
        if not cuts[Role.OPTIM]:
            assert grads.all_gather(reduced) == [total] * size
    if cuts[Role.OPTIM] and not cuts[Role.PARAM]:
        assert params.all_gather(shards) == [weights] * size
    return params.sent, grads.sent


@each_level
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_traffic_formulas_equal_the_counted_elements(
    level: Level, size: int, num_microbatches: int
) -> None:
    numel = 48
    traffic = level.traffic(size)
    params = traffic.params_per_step + num_microbatches * traffic.params_per_microbatch
    grads = traffic.grads_per_step + num_microbatches * traffic.grads_per_microbatch
    assert (params * numel, grads * numel) == pytest.approx(
        simulate(level, size, numel, num_microbatches)
    )


@each_level
def test_an_axis_of_one_rank_costs_nothing(level: Level) -> None:
    traffic = level.traffic(1)
    assert traffic.params_per_step == traffic.params_per_microbatch == 0
    assert traffic.grads_per_step == traffic.grads_per_microbatch == 0
    assert all(level.fraction(role, 1) == 1 for role in Role)
