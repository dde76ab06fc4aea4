"""``fe.Options``: the checks of its fields, and the limits that follow from them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.options import StagingBudget
from tests.pool import on_ranks

BOOLS = ("pad_shards", "sum_in_fp32", "average_in_collective", "scale_while_copying")
COUNTS = {
    "prefetch_window": 0,
    "staging_limit": 0,
    "bucket_size": 1,
    "num_buckets": 1,
    "min_unit_size": 0,
}


# Fields, the class of the error, and words of its text.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({name: value}, TypeError, f"{name}: expected True or False; found {value!r}")
        for name in BOOLS
        for value in (1, None, "yes")
    ),
    *(
        ({name: least - 1}, ValueError, f"{name}: expected {least} or more; found {least - 1}")
        for name, least in COUNTS.items()
    ),
    *(
        ({name: value}, TypeError, f"{name}: expected an integer of {least} or more; found {value}")
        for name, least in COUNTS.items()
        for value in (1.0, True)
    ),
    ({"granule": 4}, TypeError, "granule: expected a function of a name"),
    ({"bucket_size": 5, "num_buckets": 2}, ValueError, "bucket_size, num_buckets: "),
]


def test_every_field_is_checked() -> None:
    names = {each.name for each in dataclasses.fields(fe.Options)}
    assert names == {*BOOLS, *COUNTS, "granule"}
    for name, least in COUNTS.items():
        assert getattr(fe.Options(**{name: least}), name) == least
    for fields, kind, words in REFUSED:
        with pytest.raises(kind, match=re.escape(words)):
            fe.Options(**fields)


def test_the_text_is_equal_on_all_ranks() -> None:
    assert repr(fe.Options(granule=lambda name, param: 1)) == repr(fe.Options())


def test_buckets_close_at_forty_million_elements_or_a_million_for_each_rank() -> None:
    for num_ranks, size in ((1, 40_000_000), (40, 40_000_000), (41, 41_000_000)):
        assert fe.Options().closing_size(num_ranks) == size
        assert fe.Options(bucket_size=7).closing_size(num_ranks) == 7


def test_window_and_limit_follow_the_mean_unit_unless_they_are_given() -> None:
    assert fe.Options().budgets([4, 6], [1]) == (5, StagingBudget(10, 1))
    assert fe.Options().budgets([], [2]) == (2, StagingBudget(4, 1))
    assert fe.Options().budgets([], []) == (0, StagingBudget(0, 1))
    assert fe.Options(prefetch_window=3).budgets([4], []) == (3, StagingBudget(8, 1))
    assert fe.Options(staging_limit=3).budgets([4], []) == (4, StagingBudget(3, 0))


@on_ranks(world_size=2)
def test_shard_refuses_other_objects() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"options: expected an fe.Options or None; found \{\}"):
        fe.shard(model, options={})  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter
    engine = fe.shard(model, options=fe.Options(prefetch_window=3))
    assert (engine.options.prefetch_window, engine.budget) == (3, 3)
    assert torch.is_tensor(model(torch.ones(1, 2)))
