"""Checkpoints load bit by bit on other ranks, levels and meshes, in every format, to and from FSDP2
and unsharded models, and from earlier versions of the engine.

Values are saved in one call of the pool and loaded in another, so that nothing but the folder
connects the two. Saved values are passed from call to call as full tensors (:func:`contents`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_engine as fe
from tests.checkpoint.scene import (
    NUM_STEPS,
    TIED,
    Config,
    Everything,
    all_configs,
    contents,
    different,
    exported,
    label,
    run_on,
    shard,
    step,
    train,
    trained,
    two_groups,
    update,
)
from tests.models import Transformer, token_batch
from tests.pairs import PAIRS
from tests.pool import Ranks, on_few_ranks

WAYS = ("folder", "run", "weights")


def save_each(folder: str, configs: list[Config]) -> list[dict[str, Any]]:
    """Trains once for each config and saves in every way; returns the saved values."""
    found = []
    for number, config in enumerate(configs):
        model, engine, optimizer = trained(config)
        root = f"{folder}/{label(config)}"
        extra = {"config": config, "empty": {}, 3: (1, None), "tensor": torch.arange(3)}
        fe.save_checkpoint(f"{root}/folder", engine, optimizer, extra)
        fe.export_safetensors(engine, f"{root}/weights", max_shard_size="3KB")
        found.append(contents(model, optimizer))
        checkpointer = fe.Checkpointer(f"{root}/run", engine, optimizer)
        if number % 2:
            checkpointer.save_async(7)
            for parameter in model.parameters():
                parameter.data.zero_()
        else:
            checkpointer.save(7)
        checkpointer.close()
    return found if dist.get_rank() == 0 else []


def load_each(folder: str, pairs: list[tuple[Config, Config]], expected: Any) -> list[str]:
    """Load the checkpoint of one config into another, in every way; returns the differences."""
    lines = []
    for (source, target), way in itertools.product(pairs, WAYS):
        torch.manual_seed(2)
        model = Everything()
        engine = shard(model, target)
        optimizer = two_groups(model, swap=True, lr=5e-2)
        if target.get("wrap"):
            fe.shard_optimizer(optimizer)
        wanted = expected[label(source)]
        place = f"{folder}/{label(source)}/{way}"
        if way == "weights":
            fe.load_safetensors(engine, place)
            found = weights_of(contents(model, whole=False))
            wanted = {name: wanted[name] for name in found}
        else:
            if way == "folder":
                extra = fe.load_checkpoint(place, engine, optimizer)
                assert extra.pop("tensor").tolist() == [0, 1, 2]
                assert extra == {"config": source, "empty": {}, 3: (1, None)}
            else:
                report = fe.Checkpointer(place, engine, optimizer).load(verify=True)
                assert (report.step, report.problems) == (7, [])
            found = contents(model, optimizer, whole=False)
        lines += [
            f"{way}: {label(source)} -> {label(target)}: {line}"
            for line in different(found, wanted)
        ]
        if "param_dtype" not in target:
            assert math.isfinite(step(model, optimizer, 9))
    return lines


def weights_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the entries of :func:`contents` that are tensors of the model."""
    return {
        key: value
        for key, value in values.items()
        if key.startswith("model.") and isinstance(value, Tensor)
    }


@pytest.mark.timeout(400)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.thorough)])
def test_any_ranks_and_levels_load_what_others_saved_bit_for_bit(
    ranks: Ranks, tmp_path: Path, every: int
) -> None:
    configs = {world_size: each[::-every] for world_size, each in all_configs().items()}
    assert every > 1 or {(c["strategy"], c["outer"]) for c in configs[4]} == set(PAIRS)
    expected: dict[str, Any] = {}
    for world_size, each in configs.items():
        saved = run_on(ranks, world_size, save_each, str(tmp_path), each, timeout=280)[0]
        expected |= dict(zip(map(label, each), saved, strict=True))
    for name, values in expected.items():
        found = {f"model.{k}": v for k, v in exported(tmp_path / name / "weights").items()}
        dropped = {f"model.{key}" for key in TIED}
        wanted = {key: v for key, v in weights_of(values).items() if key not in dropped}
        assert different(found, wanted) == []
    sources = list(itertools.chain(*configs.values()))
    turn: Iterator[Config] = itertools.cycle(sources[::-1])
    for world_size, each in configs.items():
        targets = [dict(config) for config in each]
        for target in targets[1::3]:
            # Compute weights in another dtype than the main weights, which keep theirs.
            target["param_dtype"] = torch.float64
        # In the thorough part every source is loaded at every world size.
        count = 1 if every > 1 else max(2, math.ceil(len(sources) / len(targets)))
        pairs = [(next(turn), target) for target in targets for _ in range(count)]
        arguments = (load_each, str(tmp_path), pairs, expected)
        results = run_on(ranks, world_size, *arguments, timeout=280)
        assert not any(results), "\n".join(results[0][:10])
    sees_one_bit_and_one_hyperparameter(*list(expected.values())[:: len(sources) - 1])


def sees_one_bit_and_one_hyperparameter(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that :func:`different` finds one changed bit and one changed hyperparameter."""
    assert different(one, one) == []
    assert different(one, other)  # one process trains on other data than four ranks
    key = next(key for key in one if key.startswith("state.") and key.endswith("exp_avg"))
    nudged = torch.nextafter(one[key], torch.tensor(torch.inf))
    assert len(different({**one, key: nudged}, one)) == 1
    key = next(key for key in one if key.startswith("group."))
    assert len(different({**one, key: {**one[key], "lr": 0.5}}, one)) == 1
    assert {type(value) for value in one.values()} == {Tensor, dict}
    assert one["model.odd.scale"].shape == one["state.odd.scale.exp_avg"].shape == ()
    assert one["state.odd.scale.step"].item() == NUM_STEPS
    assert "state.blocks.3.unused.step" not in one


pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:You are using .torch.load."),
]


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain(seed)
    for module in (*model.blocks, model):
        fully_shard(module)
    return model, two_groups(model)


def plain(seed: int, tied: bool = False) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(num_blocks=1, tied=tied)


def save_here(folder: str, tied: bool) -> dict[str, Any]:
    model = plain(0, tied)
    engine = fe.shard(model)
    optimizer = two_groups(model)
    train(model, optimizer)
    fe.Checkpointer(f"{folder}/run", engine, optimizer).save(2)
    fe.save_checkpoint(f"{folder}/one", engine, optimizer)
    return contents(model, optimizer)


def load_elsewhere(folder: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Load with torch.distributed.checkpoint alone."""
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    return contents(model, optimizer)


def load_into_fsdp2(folder: str) -> dict[str, Any]:
    return load_elsewhere(folder, *fsdp2(1))


def save_elsewhere(folder: str, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=f"{folder}/weights")
    both = {"model": weights, "optimizer": state, "epoch": 3}
    dcp.save(both, checkpoint_id=f"{folder}/optimizer")
    return contents(model, optimizer)


def save_fsdp2(folder: str) -> dict[str, Any]:
    model, optimizer = fsdp2(0)
    train(model, optimizer)
    return save_elsewhere(folder, model, optimizer)


def load_here(folder: str, strategy: str, tied: bool, expected: dict[str, Any]) -> list[str]:
    model = plain(1, tied)
    engine = fe.shard(model, strategy=strategy)
    assert fe.load_checkpoint(f"{folder}/weights", engine) == {}
    weights = {key: value for key, value in expected.items() if key.startswith("model.")}
    lines = different(contents(model), weights)
    optimizer = two_groups(model, swap=True, lr=0.5)
    with pytest.raises(ValueError, match=r"optimizer\.param_groups.*found none"):
        fe.load_checkpoint(f"{folder}/weights", engine, optimizer)
    assert fe.load_checkpoint(f"{folder}/optimizer", engine, optimizer) == {}
    return lines + different(contents(model, optimizer), expected)


@pytest.mark.parametrize("number", [4, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_unsharded_and_an_fsdp2_model_load_what_was_saved_here(
    ranks: Ranks, tmp_path: Path, number: int
) -> None:
    for world_size, tied in ((0, False), (2, True)):
        folder = tmp_path / str(world_size)
        expected = run_on(ranks, world_size, save_here, str(folder), tied)[0]
        for place in (folder / "run" / "step-00000002", folder / "one"):
            model = plain(5, tied)
            found = load_elsewhere(str(place), model, two_groups(model, lr=0.5))
            assert different(found, expected) == []
            call = (load_into_fsdp2, str(place))
            for found in () if tied else ranks.run(*call, world_size=number):
                assert different(found, expected) == []


@pytest.mark.parametrize(
    "strategy", [pytest.param("no_shard", marks=pytest.mark.thorough), "optim_grads_params"]
)
def test_checkpoints_of_unsharded_and_fsdp2_models_are_loaded_here(
    ranks: Ranks, tmp_path: Path, strategy: str
) -> None:
    model = plain(0, tied=True)
    optimizer = two_groups(model)
    update(model(*token_batch(2, 1)), optimizer)
    saved = {
        "plain": save_elsewhere(str(tmp_path / "plain"), model, optimizer),
        "fsdp2": ranks.run(save_fsdp2, str(tmp_path / "fsdp2"), world_size=4)[0],
    }
    for (name, expected), world_size in itertools.product(saved.items(), (0, 2)):
        call = (load_here, str(tmp_path / name), strategy, name == "plain", expected)
        for lines in run_on(ranks, world_size, *call):
            assert lines == []


# Written by commit 2c149ee, the last one in which a unit was one module: two ranks, level 3, after
# two steps of AdamW. Its root held the parameters that are now in the unit of embedding, norm and
# head.
OLDER = Path(__file__).parent / "data" / "before_units_as_sets"
# The losses of token_batch(4, 99) before and after a third step with that batch on all ranks, which
# the program that wrote the checkpoint has printed.
LOSSES = (7.681292533874512, 6.736013889312744)


@on_few_ranks
def test_a_checkpoint_of_an_earlier_version_goes_on() -> None:
    for strategy in ("no_shard", "optim_grads_params"):
        model = Transformer(num_blocks=2, tied=True)
        engine = fe.shard(model, strategy=strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        assert fe.load_checkpoint(str(OLDER), engine, optimizer) == {"step": 2}
        batch = token_batch(4, 99)
        losses = update(model(*batch), optimizer), float(model(*batch).detach())
        assert losses == pytest.approx(LOSSES, rel=1e-5)
