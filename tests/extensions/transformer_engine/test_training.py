"""Transposes of Transformer Engine's weights, and the comparison of bytes itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_training import (
    CUT,
    TRANSPOSED,
    Watch,
    assert_all_same,
    counting,
    same_at,
    scenario_of,
    watched,
)
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough


def counting_transposes() -> Any:
    te_on_cpu.load()
    import transformer_engine_torch as tex

    return counting(tex, "fp8_transpose")


@pytest.mark.parametrize("pair", FEW_PAIRS, ids=FEW_PAIR_NAMES)
@on_ranks(4)
def test_transposes_are_never_stale_and_are_made_once_where_they_are_kept(
    pair: tuple[str, str],
) -> None:
    cuts = pair[0] == CUT
    for recipe, keeps in itertools.product(TRANSPOSED, (False, True)):
        if not cuts and recipe == "delayed":
            continue
        config = fe.DistributedDataParallelConfig(
            fp8_param_gather=True, keep_fp8_transpose_cache=keeps
        )
        scenario = scenario_of(recipe, pair=pair, mesh=mesh_of(2, 2), options={"config": config})
        watch = Watch(*scenario.sharded_model())
        with counting_transposes() as transpose:
            watch.train(scenario)
        # For each backward, or after each step.
        times = 3 * 2 if cuts and not keeps else 3
        assert transpose.call_count == times * len(watch.layers), recipe
        for weight in watch.weights.values():
            has_columns = te_on_cpu.encodings(weight).column_bytes is not None
            assert has_columns == (keeps or not cuts), recipe


@on_ranks(2)
def test_where_rows_serve_backward_nothing_is_transposed_and_training_is_the_same() -> None:
    for recipe in ("delayed", "current"):
        runs = [run for run, _ in same_at(("optim", CUT), scenario_of(recipe))]
        with te_on_cpu.native_tn(), counting_transposes() as transpose:
            runs += [run for run, _ in same_at(("optim", CUT), scenario_of(recipe))]
        assert_all_same(runs)
        assert not transpose.called


@on_ranks(2)
def test_the_comparison_sees_a_stale_transpose_and_stale_bytes() -> None:
    config = fe.DistributedDataParallelConfig(fp8_param_gather=True, keep_fp8_transpose_cache=True)
    for level, what in itertools.product(("optim", CUT), ("columns", "rows")):
        scenario = scenario_of(
            "current", pair=(level, "no_shard"), options={"config": config}, steps=1
        )
        _, watch = watched(scenario)
        with pytest.MonkeyPatch.context() as patch:
            if what == "rows":
                patch.setattr(TransformerEngineCodec, "encode", lambda *args: iter(()))
            else:
                patch.setattr(TransformerEngineCodec, "_drop_columns", reference.nothing)
                weight = next(iter(watch.weights.values()))
                patch.setattr(type(weight), "_create_transpose", reference.nothing)
            with pytest.raises(AssertionError, match=f"{what} of"):
                watch.train(scenario)
