"""Checkpoints of Transformer Engine's weights hold fp32 main weights, and plain tensors for delayed
scaling: any ranks and levels load them, and quantise to the same bytes and scales."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

import fsdp_engine as fe
from fsdp_engine.checkpoint import load_checkpoint, save_checkpoint
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, WEIGHT, QuantisedLinear
from tests.extensions.transformer_engine.te_training import (
    Watch,
    make_batch,
    make_stack,
    quantised_layers,
)
from tests.pool import RankError, Ranks, on_ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough
Config = tuple[tuple[int, ...], str, str]  # mesh, inner and outer level
CUT = "optim_grads_params"
SAVED: list[Config] = [((2, 2), CUT, "optim"), ((4,), "optim", "no_shard")]
LOADED: dict[int, list[Config]] = {
    4: [((2, 2), "no_shard", "no_shard"), ((2, 2), CUT, CUT), ((2, 2), "optim_grads", "optim")],
    2: [((2,), CUT, "no_shard"), ((2,), "optim", "no_shard")],
    1: [((1,), "no_shard", "no_shard")],
}
STATE = "blocks.0.up.weight scaling_fwd.scale"
STATES = [
    f"{direction}.{name}"
    for direction in ("scaling_fwd", "scaling_bwd")
    for name in ("scale", "amax_history")
]


def sharded(recipe: str, config: Config, seed: int = 1) -> tuple[Any, fe.Engine, Any]:
    model = make_stack(recipe, seed=seed)
    shape, inner, outer = config
    engine = fe.shard(model, mesh_of(*shape), inner, outer)
    return model, engine, reference.adamw(model.parameters())


def step(model: Any, optimizer: Any, number: int, rows: int = 8) -> float:
    """One step on data that all ranks share between them."""
    per_rank = rows // dist.get_world_size()
    (x,) = make_batch(rows, number)
    loss = model(x[dist.get_rank() * per_rank :][:per_rank])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.update_scales()
    return loss.item()


def state_of(model: Any, engine: fe.Engine) -> dict[str, Tensor]:
    """The state that training continues from, in full and by name. Collective."""
    found = {
        key: value for key, value in engine.full_state_dict().items() if "_extra_state" not in key
    }
    for name, layer in quantised_layers(model).items():
        if layer.fp8_meta["recipe"].delayed():
            for each in STATES:
                direction, _, kind = each.partition(".")
                found[f"{name} {each}"] = getattr(layer.fp8_meta[direction], kind).clone()
    return found


def quantised(model: Any, engine: fe.Engine) -> dict[str, Tensor]:
    """Bytes and scales of a forward, and of its backward; they are those of the reference."""
    watch = Watch(model, engine)
    watch.expect()
    model(*make_batch(2, 0)).backward()
    engine.zero_grad_buffer()
    assert watch.looks == dict.fromkeys(("rows", "columns"), len(watch.layers))
    return {
        f"{name} {index}": tensor
        for name, each in watch.expected.items()
        for index, tensor in enumerate(each[:4])
        if tensor is not None
    }


def save_each(folder: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found = {}
    for recipe, config in itertools.product(RECIPES, SAVED):
        model, engine, optimizer = sharded(recipe, config)
        for number in range(3):
            step(model, optimizer, number)
        label = f"{recipe}-{SAVED.index(config)}"
        save_checkpoint(f"{folder}/{label}", engine, optimizer)
        state = state_of(model, engine)
        found[label] = (state, quantised(model, engine))
    return found


def load_each(folder: str, expected: Any, configs: list[Config]) -> list[str]:
    lines = []
    for (label, (state, fp8)), config in itertools.product(expected.items(), configs):
        if len(configs) > 1 and (configs.index(config) + int(label[-1])) % 2:
            continue  # each of several loads half of the checkpoint, of every recipe
        model, engine, optimizer = sharded(label.partition("-")[0], config, seed=2)
        step(model, optimizer, 9)  # bytes and transposes of other weights are there
        load_checkpoint(f"{folder}/{label}", engine, optimizer)
        for wanted, found in ((state, state_of(model, engine)), (fp8, quantised(model, engine))):
            assert wanted.keys() == found.keys()
            lines += [f"{label}, {k}" for k in wanted if not torch.equal(wanted[k], found[k])]
    return lines


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: Any) -> tuple[str, Any]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, ranks.run(save_each, folder)[0]


@pytest.mark.parametrize("world_size", LOADED)
def test_other_ranks_and_levels_load_and_quantise_to_the_same_bytes(
    ranks: Ranks, saved: tuple[str, Any], world_size: int
) -> None:
    folder, expected = saved
    arguments = (folder, expected, LOADED[world_size])
    for lines in ranks.run(load_each, *arguments, world_size=world_size):
        assert not lines, lines[:8]


def test_scales_and_histories_are_saved_as_plain_tensors_and_no_pickle_is(
    saved: tuple[str, Any],
) -> None:
    folder, expected = saved
    for recipe in RECIPES:
        entries = FileSystemReader(f"{folder}/{recipe}-0").read_metadata().state_dict_metadata
        extra = {key for key in entries if "_extra_state" in key}
        layers = [f"model.blocks.{n}.{each}" for n in range(2) for each in ("up", "down")]
        if recipe == "delayed":
            states = {f"{layer}._extra_state.{each}" for layer in layers for each in STATES}
            assert extra == states
            assert all(hasattr(entries[key], "size") for key in extra)
            scales = expected["delayed-0"][0][STATE]
            assert scales[WEIGHT] != 1
        else:
            # What the module says: no bytes.
            assert {tuple(entries[key].size) for key in extra} <= {(0,)}
            assert extra <= {f"{layer}._extra_state" for layer in layers}
        for layer in layers:
            assert str(entries[f"{layer}.weight"].properties.dtype) == "torch.float32"
    state = expected["delayed-0"][0]
    for key, value in state.items():
        assert value.dtype == torch.float32, key


def continue_each(folder: str) -> None:
    """Training from a loaded checkpoint continues bit by bit as without interruption."""
    for recipe, config in itertools.product(RECIPES, SAVED):
        label = f"{folder}/{recipe}-{SAVED.index(config)}"
        model, engine, optimizer = sharded(recipe, config)
        losses = [step(model, optimizer, number) for number in range(3)]
        losses += [step(model, optimizer, number) for number in range(3, 6)]
        other, engine_other, optimizer_other = sharded(recipe, config, seed=2)
        step(other, optimizer_other, 9)
        load_checkpoint(label, engine_other, optimizer_other)
        assert [step(other, optimizer_other, number) for number in range(3, 6)] == losses[3:]
        state, found = state_of(model, engine), state_of(other, engine_other)
        for key, value in state.items():
            assert torch.equal(value, found[key]), (label, key)


def test_loaded_training_goes_on_bit_by_bit(ranks: Ranks, saved: tuple[str, Any]) -> None:
    ranks.run(continue_each, saved[0])


def load_into_delayed(folder: str) -> None:
    """A checkpoint of another recipe."""
    _, engine, optimizer = sharded("delayed", SAVED[0])
    load_checkpoint(folder, engine, optimizer)


def test_a_checkpoint_without_delayed_scaling_s_state_is_refused_naming_it(
    ranks: Ranks, saved: tuple[str, Any]
) -> None:
    with pytest.raises(
        RankError, match=r"missing model\.blocks\.0\.up\._extra_state\.scaling_fwd\.scale"
    ):
        ranks.run(load_into_delayed, f"{saved[0]}/current-0")


@on_ranks(2)
def test_the_checkpointer_loads_no_pickle_and_quantisers_read_what_it_loaded() -> None:
    model, engine, optimizer = sharded("delayed", ((2,), CUT, "no_shard"))
    step(model, optimizer, 0)

    def refuse(*args: Any) -> Any:
        raise AssertionError("a pickle")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantisedLinear, "set_extra_state", refuse)
        checkpointer = fe.Checkpointer(shared_folder(), engine, optimizer)
        checkpointer.save(1)
        before = state_of(model, engine)
        for number in (1, 2):
            step(model, optimizer, number)
        assert not torch.equal(before[STATE], state_of(model, engine)[STATE])
        checkpointer.load()
    after = state_of(model, engine)
    for key, value in before.items():
        assert torch.equal(value, after[key]), key
    weights = Watch(model, engine).weights
    for name, layer in quantised_layers(model).items():
        scale = layer.fp8_meta["scaling_fwd"].scale[WEIGHT]
        assert weights[name]._quantizer.scale.data_ptr() == scale.data_ptr()
