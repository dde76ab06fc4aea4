"""Sharded training with Transformer Engine's weights is, bit by bit, training without an engine by
Transformer Engine's own ``quantize_master_weights``. ``gpu/test_transformer_engine.py`` runs the
same with its modules and kernels."""

from __future__ import annotations

import pytest

from tests.extensions.transformer_engine import te_unsharded
from tests.extensions.transformer_engine.te_on_cpu import RECIPES
from tests.extensions.transformer_engine.te_training import CUT, LEVELS
from tests.matrices import thorough_but
from tests.pairs import FEW_PAIRS
from tests.pool import Ranks

ONE_AXIS = [(world, (level, None)) for world in (1, 2) for level in LEVELS]


@pytest.mark.parametrize(
    "case", thorough_but([(2, (CUT, None))], [*ONE_AXIS, *((4, pair) for pair in FEW_PAIRS)])
)
def test_sharded_training_is_training_by_transformer_engine_alone(
    ranks: Ranks, case: tuple[int, tuple[str, str | None]]
) -> None:
    world, pair = case
    for recipe in RECIPES:
        ranks.run(te_unsharded.train_both, "imitation", recipe, *pair, world_size=world)
        if world == 2:
            ranks.run(te_unsharded.train_apart, "imitation", recipe, pair[0], world_size=world)
