"""Training with Transformer Engine's weights, over stand-ins of its kernels, is at every pair of
levels what one process does with the reference's quantisation of the same main weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.codecs import TransformerEngineCodec
from tests import reference
from tests.extensions.transformer_engine import te_on_cpu
from tests.extensions.transformer_engine.te_on_cpu import RECIPES
from tests.extensions.transformer_engine.te_reference import dequantise
from tests.extensions.transformer_engine.te_training import (
    TRANSPOSED,
    Alone,
    Watch,
    make_batch,
    make_stack,
    quantised_layers,
    train_watched,
)
from tests.pairs import FEW_PAIR_NAMES, FEW_PAIRS
from tests.pool import Ranks, on_ranks
from tests.training import OPTIMIZERS, mesh_of

pytestmark = pytest.mark.thorough

NUM_STEPS, NUM_MICRO = 3, 2
CUT = ("optim_grads_params", "no_shard")
Config = fe.DistributedDataParallelConfig


def train_as_alone(
    inner: str, outer: str, shape: tuple[int, ...], recipe: str, optimizer: str = "sgd"
) -> tuple[list[str], dict[str, Tensor]]:
    """Differences from one process, and scales in the end. That process takes over main weights
    after each step: or where one element is rounded to its other neighbour, all that follows would
    differ."""
    model = make_stack(recipe)
    alone = Alone(model)
    engine = fe.shard(model, mesh_of(*shape), inner, outer)
    watch = Watch(model, engine)
    watch.expect()
    make, make_alone = (reference.once(OPTIMIZERS[optimizer]) for _ in range(2))
    lines = []
    for step in reference.make_data(make_batch, NUM_STEPS, NUM_MICRO, dist.get_world_size()):
        expected = reference.train(alone, [step], make_alone, split=True)
        found = reference.train_sharded(model, engine, [step], make)
        lines += reference.differences(found, expected, 1e-4, first=2e-5)
        with torch.no_grad():
            for name, param in alone.named_parameters():
                param.copy_(found[0].weights[name])
        model.update_scales()
        alone.update_scales()
        watch.expect(found[0].weights)
    count = NUM_STEPS * NUM_MICRO * len(watch.layers)
    assert watch.looks == {"rows": count, "columns": count}
    return lines, watch.scales()


def train_pair(inner: str, outer: str) -> tuple[list[str], dict[str, Tensor]]:
    found, scales = [], {}
    # AdamW with one recipe at each pair: it does not see how weights travel.
    adamw = RECIPES[FEW_PAIRS.index((inner, outer)) % len(RECIPES)]
    for recipe, optimizer in [*((recipe, "sgd") for recipe in RECIPES), (adamw, "adamw")]:
        lines, own = train_as_alone(inner, outer, (2, 2), recipe, optimizer)
        found += [f"{recipe}, {optimizer}: {line}" for line in lines]
        scales |= {f"{recipe} {optimizer} {name}": scale for name, scale in own.items()}
    return found, scales


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_a_pair_of_levels_trains_as_one_process_and_all_ranks_have_its_bytes_and_scales(
    ranks: Ranks, inner: str, outer: str
) -> None:
    answers = ranks.run(train_pair, inner, outer)
    first = answers[0][1]
    assert len(first) >= 4 * 5
    for lines, scales in answers:
        assert not lines, "\n".join(lines[:8])
        assert scales.keys() == first.keys()
        for name, scale in scales.items():
            assert torch.equal(scale, first[name]), name


@on_ranks(1)
def test_one_rank_trains_bit_by_bit_as_transformer_engine_does_alone() -> None:
    for recipe, level in itertools.product(RECIPES, ("no_shard", "optim_grads_params")):
        plain, model = make_stack(recipe), make_stack(recipe)
        engine = fe.shard(model, strategy=level)
        mains = {}
        for name, param in plain.named_parameters():
            preserved = getattr(param, "_high_precision_init_val", param.detach())
            mains[name] = torch.nn.Parameter(preserved.float())
        optimizer = reference.adamw(mains.values())
        ours = reference.adamw(model.parameters())
        layers = quantised_layers(model)
        for step in range(3):
            losses = [each(*make_batch(4, step)) for each in (plain, model)]
            for loss in losses:
                loss.backward()
            assert losses[0].item() == losses[1].item(), (recipe, level, step)
            for name, param in plain.named_parameters():
                assert param.grad is not None
                mains[name].grad, param.grad = param.grad.float(), None
            gradients = reference.full_gradients(model)
            for name, main in mains.items():
                assert torch.equal(gradients[name], main.grad), (recipe, level, step, name)
            for each in (optimizer, ours):
                each.step()
                each.zero_grad()
            for each in (plain, model):
                each.update_scales()
            with torch.no_grad():
                for name, param in plain.named_parameters():
                    # Quantised by Transformer Engine itself, the whole weight at once.
                    param.copy_(mains[name].bfloat16() if name in layers else mains[name])
        for name, found in engine.full_state_dict().items():
            assert name not in mains or torch.equal(found, mains[name]), (recipe, level, name)


# Transposes.


@contextlib.contextmanager
def counting_transposes() -> Iterator[list[int]]:
    te_on_cpu.load()
    import transformer_engine_torch as tex

    count, real = [0], tex.fp8_transpose

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tex, "fp8_transpose", counted)
        yield count


def has_columns(weight: Any) -> bool:
    return te_on_cpu.encodings(weight).column_bytes is not None


def transposes_of_pair(inner: str, outer: str) -> None:
    cuts = inner == CUT[0]
    for recipe, keeps in itertools.product(TRANSPOSED, (False, True)):
        if not cuts and recipe == "delayed":
            continue
        model = make_stack(recipe)
        config = Config(fp8_param_gather=True, keep_fp8_transpose_cache=keeps)
        engine = fe.shard(model, mesh_of(2, 2), inner, outer, config=config)
        watch = Watch(model, engine)
        with counting_transposes() as count:
            train_watched(model, engine, watch, num_steps=3)
        once_each = 3 * len(watch.layers)
        if cuts and not keeps:
            # In each microbatch, for backward.
            assert count == [2 * once_each], (recipe, count, once_each)
        else:
            assert count == [once_each], recipe
        for weight in watch.weights.values():
            assert has_columns(weight) == (keeps or not cuts), recipe
        assert watch.looks["columns"] == 2 * once_each


@pytest.mark.parametrize(("inner", "outer"), FEW_PAIRS, ids=FEW_PAIR_NAMES)
def test_transposes_are_never_stale_and_are_made_once_where_they_are_kept(
    ranks: Ranks, inner: str, outer: str
) -> None:
    ranks.run(transposes_of_pair, inner, outer)


@on_ranks(2)
def test_where_rows_serve_backward_nothing_is_transposed_and_training_is_the_same() -> None:
    for recipe, level in itertools.product(("delayed", "current"), ("optim", CUT[0])):
        with te_on_cpu.native_tn(), counting_transposes() as count:
            lines, _ = train_as_alone(level, "no_shard", (2,), recipe)
        assert not lines, lines
        assert count == [0]


@on_ranks(2)
def test_the_comparison_sees_a_stale_transpose_and_stale_bytes() -> None:
    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    def no_encoding(*args: Any) -> Any:
        yield from ()

    for level in ("optim", CUT[0]):
        for name, expected in (("_drop_columns", "columns of"), ("encode", "rows of")):
            model = make_stack("current")
            config = Config(fp8_param_gather=True, keep_fp8_transpose_cache=True)
            engine = fe.shard(model, strategy=level, config=config)
            watch = Watch(model, engine)
            name_of = next(iter(watch.layers))
            train_watched(model, engine, watch, num_steps=1)
            with pytest.MonkeyPatch.context() as patch:
                if name == "encode":
                    patch.setattr(TransformerEngineCodec, name, no_encoding)
                else:
                    patch.setattr(TransformerEngineCodec, name, nothing)
                    patch.setattr(type(watch.weights[name_of]), "_create_transpose", nothing)
                with pytest.raises(AssertionError, match=expected):
                    train_watched(model, engine, watch, num_steps=1)


@on_ranks(2)
def test_columns_of_mxfp8_are_those_of_main_weights_where_rows_mean_something_else() -> None:
    model = make_stack("mxfp8")
    engine = fe.shard(model)
    watch = Watch(model, engine)
    train_watched(model, engine, watch)
    for each in watch.expected.values():
        assert each.column_bytes is not None
        assert each.column_scale_inv is not None
        rows = dequantise(each.row_bytes, each.row_scale_inv)
        assert not torch.equal(rows, dequantise(each.column_bytes, each.column_scale_inv))
    assert watch.looks["columns"] == 2 * 2 * len(watch.layers)
