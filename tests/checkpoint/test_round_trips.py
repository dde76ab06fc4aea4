"""Checkpoints load bit by bit on other ranks, levels and meshes, in every format.

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
from torch import Tensor

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
    trained,
    two_groups,
)
from tests.pairs import PAIRS
from tests.pool import Ranks

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
    """Loads the checkpoint of one config into another one, in every way; what differs."""
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
            # Other compute weights over main weights of the same dtype.
            target["param_dtype"] = torch.float64
        # In the thorough part every source is loaded at every world size.
        count = 1 if every > 1 else max(2, math.ceil(len(sources) / len(targets)))
        pairs = [(next(turn), target) for target in targets for _ in range(count)]
        arguments = (load_each, str(tmp_path), pairs, expected)
        results = run_on(ranks, world_size, *arguments, timeout=280)
        assert not any(results), "\n".join(results[0][:10])
    sees_one_bit_and_one_hyperparameter(*list(expected.values())[:: len(sources) - 1])


def sees_one_bit_and_one_hyperparameter(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Whether the comparison above does."""
    assert different(one, one) == []
    assert different(one, other)  # one rank alone has seen other data
    key = next(key for key in one if key.startswith("state.") and key.endswith("exp_avg"))
    nudged = torch.nextafter(one[key], torch.tensor(torch.inf))
    assert len(different({**one, key: nudged}, one)) == 1
    key = next(key for key in one if key.startswith("group."))
    assert len(different({**one, key: {**one[key], "lr": 0.5}}, one)) == 1
    assert {type(value) for value in one.values()} == {Tensor, dict}
    assert one["model.odd.scale"].shape == one["state.odd.scale.exp_avg"].shape == ()
    assert one["state.odd.scale.step"].item() == NUM_STEPS
    assert "state.blocks.3.unused.step" not in one
