"""Choice of the rank that owns, and steps, each parameter."""

from __future__ import annotations

import random

import pytest

from fsdp_engine.extensions.whole_tensor_optimizers.ownership import (
    Item,
    assign_owners,
    least_share,
    numel_held,
    shares_of,
    step_work,
)


def test_work_of_matrices_and_of_elements() -> None:
    assert step_work((3, 5), multiplies=True) == 45
    assert step_work((5, 3), multiplies=True) == 45
    assert step_work((4, 2, 3), multiplies=True) == 24 * 4
    assert step_work((7,), multiplies=True) == step_work((7,), multiplies=False) == 7
    assert step_work((3, 5), multiplies=False) == 15
    assert step_work((), multiplies=True) == 1


@pytest.mark.parametrize(
    ("work", "num_ranks", "least"),
    [
        ([4, 4, 4, 4], 2, 8),  # the mean
        ([9, 1, 1, 1], 2, 9),  # the largest
        ([4, 4, 4], 2, 8),  # a rank has two of three
        ([4] * 7 + [1], 3, 12),  # a rank has three of seven
        ([5], 3, 5),
    ],
)
def test_the_least_share(work: list[float], num_ranks: int, least: float) -> None:
    assert least_share(work, num_ranks) == least


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_shares_are_near_the_least(num_ranks: int) -> None:
    draw = random.Random(num_ranks)
    sides = [(draw.randint(1, 64), draw.randint(1, 64)) for _ in range(40 * num_ranks)]
    items = [Item(step_work(side, multiplies=True), side[0] * side[1]) for side in sides]
    owners = assign_owners(items, num_ranks)
    shares = shares_of(items, owners, num_ranks)
    work, numel = ([each[n] for each in items] for n in (0, 1))
    assert max(share.work for share in shares) <= 1.02 * least_share(work, num_ranks)
    assert max(share.numel for share in shares) <= 1.02 * least_share(numel, num_ranks)
    assert owners == assign_owners(items, num_ranks)


def test_parameters_of_one_rank_stay_there_and_cut_ones_make_it_even() -> None:
    """Blocks of a transformer, each cut in the middle of its fifth matrix."""
    block = [Item(1, 1, (0,), 1)] * 4 + [Item(4, 4, (1,), 2), Item(4, 4, (1,), 4)]
    items = block * 4
    owners = assign_owners(items, 2)
    assert {share.work for share in shares_of(items, owners, 2)} == {24}
    assert numel_held(items, owners) == 4 * (4 + 4) + 2 * 2


def test_balance_comes_before_messages() -> None:
    items = [Item(1, 1, (0,), 1)] * 8
    assert sorted(assign_owners(items, 2)) == [0] * 4 + [1] * 4
