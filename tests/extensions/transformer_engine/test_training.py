"""Training with Transformer Engine's weights, over stand-ins of its kernels, is at every pair of
levels what one process does whose weights Transformer Engine quantises unsharded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.extensions.transformer_engine.quantized_codec import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import RECIPES
from tests.extensions.transformer_engine.te_training import (
    CUT,
    TRANSPOSED,
    Alone,
    Watch,
    counting,
    make_batch,
    make_stack,
    scenario_of,
    watched,
)
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import OPTIMIZERS, mesh_of

pytestmark = pytest.mark.thorough

NUM_STEPS, NUM_MICRO = 3, 2
every_pair = pytest.mark.parametrize("pair", FEW_PAIRS, ids=FEW_PAIR_NAMES)


def train_as_alone(
    pair: tuple[str, str], shape: tuple[int, ...], recipe: str, optimizer: str = "sgd"
) -> dict[str, Tensor]:
    """Compares each step with one process; the scales in the end. That process takes over main
    weights after each step, since all that follows would differ once one element is rounded to its
    other neighbour."""
    model = make_stack(recipe)
    make = reference.once(OPTIMIZERS[optimizer])
    alone = Alone(make_stack(recipe), OPTIMIZERS[optimizer])
    watch = Watch(model, fe.shard(model, mesh_of(*shape), *pair))
    watch.expect()
    for step in reference.make_data(make_batch, NUM_STEPS, NUM_MICRO, dist.get_world_size()):
        expected = alone.step(step)
        (found,) = reference.train_sharded(model, watch.engine, [step], make)
        lines = reference.differences([found], [expected], 2e-5)
        assert not lines, "\n".join([f"{pair}, {recipe}, {optimizer}:", *lines[:8]])
        alone.take(found.weights)
        model.update_scales()
        watch.expect(found.weights)
    count = NUM_STEPS * NUM_MICRO * len(watch.layers)
    assert watch.looks == {"rows": count, "columns": count}
    return watch.scales()


def train_pair(pair: tuple[str, str]) -> dict[str, Tensor]:
    # AdamW with one recipe at each pair: it does not depend on how weights travel.
    adamw = RECIPES[FEW_PAIRS.index(pair) % len(RECIPES)]
    return {
        f"{recipe} {optimizer} {name}": scale
        for recipe, optimizer in [*((each, "sgd") for each in RECIPES), (adamw, "adamw")]
        for name, scale in train_as_alone(pair, (2, 2), recipe, optimizer).items()
    }


@every_pair
def test_a_pair_of_levels_trains_as_one_process_and_all_ranks_have_its_scales(
    ranks: Ranks, pair: tuple[str, str]
) -> None:
    first, *others = ranks.run(train_pair, pair)
    assert len(first) >= 4 * 5
    for scales in others:
        assert scales.keys() == first.keys()
        assert all(torch.equal(scale, first[name]) for name, scale in scales.items())


def counting_transposes() -> Any:
    te_on_cpu.load()
    import transformer_engine_torch as tex

    return counting(tex, "fp8_transpose")


@every_pair
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
    for recipe, level in itertools.product(("delayed", "current"), ("optim", CUT)):
        with te_on_cpu.native_tn(), counting_transposes() as transpose:
            train_as_alone((level, "no_shard"), (2,), recipe)
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
