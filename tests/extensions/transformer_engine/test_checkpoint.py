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
from tests.extensions.transformer_engine.te_on_cpu import RECIPES, WEIGHT
from tests.extensions.transformer_engine.te_training import (
    CUT,
    Watch,
    make_batch,
    make_stack,
    quantised_layers,
)
from tests.pool import RankError, Ranks
from tests.training import mesh_of

pytestmark = pytest.mark.thorough
Config = tuple[tuple[int, ...], str, str]  # mesh, inner and outer level
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
State = dict[str, Tensor]


class Trained:
    """A sharded stack and its optimizer, trained on data that all ranks share between them."""

    def __init__(self, recipe: str, config: Config, seed: int = 1) -> None:
        self.model: Any = make_stack(recipe, seed=seed)
        shape, inner, outer = config
        self.engine = fe.shard(self.model, mesh_of(*shape), inner, outer)
        self.optimizer = reference.adamw(self.model.parameters())

    def train(self, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            (x,) = make_batch(8, number)
            loss = self.model(x.chunk(dist.get_world_size())[dist.get_rank()])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.update_scales()
            losses.append(loss.item())
        return losses

    def state(self) -> State:
        """The state that training continues from, in full and by name. Collective."""
        state = self.engine.full_state_dict()
        found = {key: value for key, value in state.items() if "_extra_state" not in key}
        for name, layer in quantised_layers(self.model).items():
            for each in STATES if layer.recipe == "delayed" else ():
                direction, _, kind = each.partition(".")
                found[f"{name} {each}"] = getattr(layer.fp8_meta[direction], kind).clone()
        return found


def save_each(folder: str) -> dict[str, State]:
    found = {}
    for recipe, (index, config) in itertools.product(RECIPES, enumerate(SAVED)):
        run = Trained(recipe, config)
        run.train(*range(3))
        save_checkpoint(f"{folder}/{recipe}-{index}", run.engine, run.optimizer)
        found[f"{recipe}-{index}"] = run.state()
    return found


def loaded(folder: str, label: str, config: Config) -> Trained:
    run = Trained(label.partition("-")[0], config, seed=2)
    run.train(9)  # so that the load must replace bytes and transposes
    load_checkpoint(f"{folder}/{label}", run.engine, run.optimizer)
    return run


def differences(found: State, expected: State) -> list[str]:
    assert found.keys() == expected.keys()
    return [key for key, value in expected.items() if not torch.equal(value, found[key])]


def load_each(folder: str, expected: dict[str, State], configs: list[Config]) -> None:
    for (label, state), (place, config) in itertools.product(expected.items(), enumerate(configs)):
        if len(configs) > 1 and (place + int(label[-1])) % 2:
            continue  # each of several configs loads half of each recipe's checkpoints
        run = loaded(folder, label, config)
        assert not differences(run.state(), state), label
        watch = Watch(run.model, run.engine)
        watch.expect()
        run.model(*make_batch(2, 0)).backward()
        assert watch.looks == dict.fromkeys(("rows", "columns"), len(watch.layers)), label
        for name, layer in watch.layers.items() if label.startswith("delayed") else ():
            scale = layer.fp8_meta["scaling_fwd"].scale[WEIGHT]
            assert watch.weights[name]._quantizer.scale.data_ptr() == scale.data_ptr()


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: Any) -> tuple[str, Any]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return folder, ranks.run(save_each, folder)[0]


@pytest.mark.parametrize("world_size", LOADED)
def test_other_ranks_and_levels_load_and_quantise_to_the_same_bytes(
    ranks: Ranks, saved: tuple[str, Any], world_size: int
) -> None:
    ranks.run(load_each, *saved, LOADED[world_size], world_size=world_size)


def test_scales_and_histories_are_saved_as_plain_tensors_and_no_pickle_is(
    saved: tuple[str, Any],
) -> None:
    folder, expected = saved
    for recipe in RECIPES:
        entries = FileSystemReader(f"{folder}/{recipe}-0").read_metadata().state_dict_metadata
        extra = {key for key in entries if "_extra_state" in key}
        layers = [f"model.blocks.{n}.{each}" for n in range(2) for each in ("up", "down")]
        if recipe == "delayed":
            assert extra == {f"{layer}._extra_state.{each}" for layer in layers for each in STATES}
            assert all(hasattr(entries[key], "size") for key in extra)
        else:
            # The module's own extra state has no bytes.
            assert {tuple(entries[key].size) for key in extra} <= {(0,)}
            assert extra <= {f"{layer}._extra_state" for layer in layers}
        for layer in layers:
            assert str(entries[f"{layer}.weight"].properties.dtype) == "torch.float32"
    state = expected["delayed-0"]
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert state[STATE][WEIGHT] != 1


def load_into_delayed(folder: str) -> None:
    run = Trained("delayed", SAVED[0])
    load_checkpoint(f"{folder}/current-0", run.engine, run.optimizer)


def test_a_checkpoint_without_delayed_scaling_s_state_is_refused_naming_it(
    ranks: Ranks, saved: tuple[str, Any]
) -> None:
    with pytest.raises(
        RankError, match=r"missing model\.blocks\.0\.up\._extra_state\.scaling_fwd\.scale"
    ):
        ranks.run(load_into_delayed, saved[0])
