"""Sharded training with Transformer Engine's weights is, bit by bit, training without an engine by
Transformer Engine's own ``quantize_master_weights``. ``gpu/test_transformer_engine.py`` runs the
same with its modules and kernels."""

from __future__ import annotations

import pytest
import torch

from tests.extensions.transformer_engine import te_unsharded
from tests.extensions.transformer_engine.te_on_cpu import RECIPES
from tests.extensions.transformer_engine.te_unsharded import (
    Encodings,
    Trained,
    assert_changes,
    assert_same,
)
from tests.pool import Ranks

pytestmark = pytest.mark.thorough

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("level", LEVELS)
def test_sharded_training_is_training_by_transformer_engine_alone(
    ranks: Ranks, level: str, world: int
) -> None:
    for recipe in RECIPES:
        ranks.run(te_unsharded.train_both, "imitation", recipe, level, world_size=world)


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_with_data_of_their_own_have_the_same_bytes_and_scales(
    ranks: Ranks, level: str
) -> None:
    for recipe in RECIPES:
        ranks.run(te_unsharded.train_apart, "imitation", recipe, level, world_size=2)


def test_one_other_byte_scale_or_weight_is_a_difference() -> None:
    data, scale = torch.arange(6, dtype=torch.uint8), torch.ones(1)
    first = Trained([0.5], [Encodings("forward", "w", data, scale)], {"w": torch.zeros(2)})
    assert_same(first, first)
    other = data.clone()
    other[3] ^= 1
    for changed, what in (
        (first._replace(seen=[Encodings("forward", "w", other, scale)]), "bytes of w in forward"),
        (first._replace(seen=[Encodings("forward", "w", data, scale * 2)]), "scales of w"),
        (first._replace(main={"w": torch.full((2,), 1e-45)}), "main weights of w"),
        (first._replace(losses=[0.25]), r"\[0.25\]"),
    ):
        with pytest.raises(AssertionError, match=what):
            assert_same(changed, first)
    with pytest.raises(AssertionError):
        assert_changes(first._replace(seen=first.seen * 6))
