"""``tests/matrices.py``: the ordinary cases of a matrix have every value."""

from __future__ import annotations

import itertools

import pytest

from tests.matrices import covering, has_spared_pair, values_of


@pytest.mark.parametrize("sizes", [(4, 9), (9, 4), (2, 2), (4, 2, 9), (3, 1, 3), (7,)])
def test_every_value_of_every_parameter_stays_in_as_few_cases_as_its_longest_list(
    sizes: tuple[int, ...],
) -> None:
    cases = list(itertools.product(*map(range, sizes)))
    kept = [cases[number] for number in sorted(covering(cases))]
    for place, size in enumerate(sizes):
        assert {case[place] for case in kept} == set(range(size))
    assert len(kept) == max(sizes)


def test_cases_with_a_hole_keep_every_value_too() -> None:
    cases = [(level, way) for level in range(4) for way in range(4) if (level, way) != (1, 1)]
    kept = [cases[number] for number in covering(cases)]
    assert {level for level, _ in kept} == {way for _, way in kept} == set(range(4))


def test_a_row_of_a_list_is_one_value() -> None:
    mark = pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1), (2, 2)]).mark
    rows = [values_of({"a": a, "b": b}, [mark]) for a in (1, 2) for b in (1, 2)]
    assert covering(rows) == {0, 1, 2, 3}


def test_two_lists_are_two_values() -> None:
    marks = [pytest.mark.parametrize(name, [1, 2]).mark for name in "ab"]
    cases = [values_of({"a": a, "b": b}, marks) for a in (1, 2) for b in (1, 2)]
    assert covering(cases) == {0, 3}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"inner": "no_shard", "outer": "no_shard"}, True),
        ({"strategy": "optim_grads", "outer": "no_shard"}, True),
        ({"pair": ("no_shard", "no_shard")}, True),
        ({"strategy": "optim", "outer": "optim"}, False),
        ({"strategy": "no_shard"}, False),  # one axis
        ({"way": 1}, False),
    ],
)
def test_pairs_are_known_by_their_parameters(params: dict[str, object], expected: bool) -> None:
    assert has_spared_pair(params) == expected
