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
    Role,
    Strategy,
    level_from_name,
)

PAIRS = list(itertools.product(LEVELS, LEVELS))
LEGAL = [pair for pair in PAIRS if LEVELS[pair[1]].value <= LEVELS[pair[0]].value]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


def test_there_are_ten_strategies_and_each_has_a_name() -> None:
    assert len(ALL_STRATEGIES) == 10
    assert set(ALL_STRATEGIES) == {Strategy.from_names(*pair) for pair in LEGAL}
    assert len({str(strategy) for strategy in ALL_STRATEGIES}) == 10


def test_names_that_are_none_and_an_outer_level_above_the_inner_one_are_refused() -> None:
    for inner, outer in ILLEGAL:
        message = f"expected a level at most that of strategy='{inner}'; found '{outer}'"
        with pytest.raises(ValueError, match=f"outer_strategy: {message}"):
            Strategy.from_names(inner, outer)
    for field, name in itertools.product(("strategy", "outer_strategy"), ("zero3", "", None, [])):
        with pytest.raises(ValueError, match=f"^{field}: expected one of ") as caught:
            level_from_name(name, field)  # type: ignore[arg-type]
        assert all(level in str(caught.value) for level in LEVELS)
        assert str(caught.value).endswith(f"found {name!r}")
    for names, field in ((("ddp",), "strategy"), (("optim", "ddp"), "outer_strategy")):
        with pytest.raises(ValueError, match=f"^{field}: "):
            Strategy.from_names(*names)
    assert Strategy.from_names("optim_grads_params") == Strategy(OPTIM_GRADS_PARAMS, NO_SHARD)


def test_each_level_cuts_one_role_more_than_the_one_below() -> None:
    cut = {name: {role for role in Role if level.shards(role)} for name, level in LEVELS.items()}
    assert cut == {
        "no_shard": set(),
        "optim": {Role.OPTIM},
        "optim_grads": {Role.OPTIM, Role.GRAD},
        "optim_grads_params": {Role.OPTIM, Role.GRAD, Role.PARAM},
    }


def test_depths_nest_and_each_rank_holds_the_fraction_of_the_levels() -> None:
    layout = Layout((TensorSlot("weight", (1000,), 0),), 1024, inner_size=4, outer_size=2)
    sizes = {Axis.INNER: 4, Axis.OUTER: 2}
    for strategy in ALL_STRATEGIES:
        depths = [strategy.depth(role) for role in (Role.PARAM, Role.GRAD, Role.OPTIM)]
        assert depths == sorted(depths)
        for role in Role:
            # A role that is sharded along the outer axis is always sharded along the inner axis,
            # too. So its depth determines both.
            cut = [axis for axis in AXIS_BELOW_DEPTH if strategy.shards(role, axis)]
            assert cut == list(AXIS_BELOW_DEPTH[: strategy.depth(role)])
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


# Number of all-gathers or reduce-scatters, each of a full tensor: for parameters in a step and in a
# microbatch, for gradients in a step and in a microbatch. ``tests/runtime/test_counts.py`` compares
# them with the lanes.
COLLECTIVES = {
    "no_shard": (0, 0, 2, 0),
    "optim": (1, 0, 1, 0),
    "optim_grads": (1, 0, 0, 1),
    "optim_grads_params": (0, 2, 0, 1),
}


@pytest.mark.parametrize("name", LEVELS)
def test_traffic_is_a_part_of_the_ranks_less_one_for_each_collective(name: str) -> None:
    for size in (1, 2, 3, 8):
        traffic = LEVELS[name].traffic(size)
        found = (
            traffic.params_per_step,
            traffic.params_per_microbatch,
            traffic.grads_per_step,
            traffic.grads_per_microbatch,
        )
        assert found == pytest.approx([num * (size - 1) / size for num in COLLECTIVES[name]])
    assert all(LEVELS[name].fraction(role, 1) == 1 for role in Role)
