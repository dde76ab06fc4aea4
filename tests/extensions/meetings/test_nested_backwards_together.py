"""Cached losses whose ranks have different numbers of mini-batches."""

from __future__ import annotations

from tests.extensions.nested_backwards.cached_loss import Rows, cached
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_ranks

within_together = cached.but(around=lambda engine: engine.together())


@on_ranks(2)
def test_ranks_have_different_numbers_of_mini_batches() -> None:
    for level in LEVEL_NAMES:
        within_together.but(pair=(level, "no_shard"), batch=Rows(2, 7)).check()


@on_ranks(4)
def test_two_axes() -> None:
    for pair in (("optim_grads_params", "no_shard"), ("optim_grads", "optim")):
        within_together.but(pair=pair, mesh=(2, 2), batch=Rows(2, 6, 4, 3)).check()
