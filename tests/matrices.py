"""Which cases of a matrix of parameters belong to the ordinary tests, and which are thorough.

A test with one ``parametrize`` of 4 levels and one of 9 ways has 36 cases. Of these 9 are ordinary:
every way once, every level two or three times. The others are thorough. A test with one
``parametrize`` keeps all its cases, and a list of rows keeps all rows; but of pairs of levels,
those in ``SPARED_PAIRS`` are thorough where the test has others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.pairs import SPARED_PAIRS

Case = Sequence[Hashable]


def thorough_but(ordinary: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Values for ``parametrize``; those that are not ``ordinary`` are thorough."""
    thorough = pytest.mark.thorough
    return [pytest.param(each, marks=() if each in ordinary else thorough) for each in values]


def left_of_matrices(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The ordinary tests of ``items`` that a matrix can spare: see the head of this file."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_ordinary = not any(map(item.get_closest_marker, ("gpu", "programs", "thorough")))
        if is_ordinary and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for all_cases in matrices.values():
        spared = [case for case in all_cases if has_spared_pair(case.callspec.params)]
        if len(spared) == len(all_cases):
            spared = []
        yield from spared
        cases = [case for case in all_cases if case not in spared]
        kept = covering(
            [values_of(case.callspec.params, case.iter_markers("parametrize")) for case in cases]
        )
        yield from (case for number, case in enumerate(cases) if number not in kept)


def has_spared_pair(params: Mapping[str, Any]) -> bool:
    """Whether a case is of a pair of levels that the ordinary tests can spare."""
    inner = params.get("inner", params.get("strategy"))
    return params.get("pair", (inner, params.get("outer"))) in SPARED_PAIRS


def values_of(params: Mapping[str, Any], marks: Iterable[pytest.Mark]) -> Case:
    """Returns a value for each ``parametrize``: ids of the case's objects. Cases of one test share
    these objects."""
    left = dict(params)
    values: list[Hashable] = []
    for mark in marks:
        given = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
        values.append(tuple(id(left.pop(name)) for name in names if name in left))
    return [*values, *map(id, left.values())]  # the remaining ids are those of fixtures' parameters


def covering(cases: Sequence[Case]) -> set[int]:
    """Returns positions of cases that have every value of every parameter at least once.

    The choice depends on the order of the cases, and on which values are equal.

    Args:
        cases: the cases of one test: each has a value for every parameter.
    """
    values = [list(enumerate(case)) for case in cases]
    uncovered = {value for case in values for value in case}
    used: Counter[tuple[int, Hashable]] = Counter()
    kept: set[int] = set()
    while uncovered:
        # Choose the case with the most new values; among several, the one whose values are rarest
        # so far.
        best = min(
            range(len(cases)),
            key=lambda number: (
                -sum(value in uncovered for value in values[number]),
                sum(used[value] for value in values[number]),
            ),
        )
        kept.add(best)
        uncovered.difference_update(values[best])
        used.update(values[best])
    return kept
