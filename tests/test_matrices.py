"""``tests/matrices.py``: the ordinary cases of a matrix have every value."""

from __future__ import annotations

import itertools

import pytest

from tests.matrices import covering, has_spared_pair, values_of


def test_every_value_of_every_parameter_stays_in_as_few_cases_as_its_longest_list() -> None:
    for sizes in [(4, 9), (9, 4), (2, 2), (4, 2, 9), (3, 1, 3), (7,)]:
        cases = list(itertools.product(*map(range, sizes)))
        kept = [cases[number] for number in sorted(covering(cases))]
        for place, size in enumerate(sizes):
            assert {case[place] for case in kept} == set(range(size))
        assert len(kept) == max(sizes)
    with_a_hole = [(level, way) for level in range(4) for way in range(4) if (level, way) != (1, 1)]
    kept = [with_a_hole[number] for number in covering(with_a_hole)]
    assert {level for level, _ in kept} == {way for _, way in kept} == set(range(4))


def test_a_row_of_a_list_is_one_value_and_two_lists_are_two() -> None:
    pairs = [(a, b) for a in (1, 2) for b in (1, 2)]
    rows = [pytest.mark.parametrize(("a", "b"), pairs).mark]
    lists = [pytest.mark.parametrize(name, [1, 2]).mark for name in "ab"]
    for marks, kept in ((rows, {0, 1, 2, 3}), (lists, {0, 3})):
        assert covering([values_of({"a": a, "b": b}, marks) for a, b in pairs]) == kept


def test_pairs_are_known_by_their_parameters() -> None:
    for params, expected in (
        ({"inner": "no_shard", "outer": "no_shard"}, True),
        ({"strategy": "optim_grads", "outer": "no_shard"}, True),
        ({"pair": ("no_shard", "no_shard")}, True),
        ({"strategy": "optim", "outer": "optim"}, False),
        ({"strategy": "no_shard"}, False),  # one axis
        ({"way": 1}, False),
    ):
        assert has_spared_pair(params) == expected, params
