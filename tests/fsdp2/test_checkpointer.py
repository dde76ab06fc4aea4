"""Checkpoints of the engine for models of ``fully_shard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.fsdp2 import engine_of, fully_shard
from tests import reference
from tests.checkpoint.scene import Ema
from tests.models import Mlp
from tests.pool import Ranks, on_ranks


def make(seed: int, level: str = "optim_grads_params", device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        model = nn.Sequential(Mlp(), Mlp())
    for block in model:
        fully_shard(block, strategy=level)
    fully_shard(model, strategy=level)
    if device == "meta":
        model.to_empty(device="cpu")
    return model


def step(model: nn.Sequential, optimizer: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, model[0].up.in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def begin(folder: str, model: nn.Sequential) -> tuple[Any, Ema, fe.Checkpointer]:
    engine = engine_of(model)
    assert engine_of(model) is engine
    optimizer, ema = torch.optim.AdamW(model.parameters(), lr=1e-2), Ema(model)
    return optimizer, ema, fe.Checkpointer(folder, engine, optimizer, extra={"ema": ema})


def save(folder: str, level: str) -> list[Tensor]:
    model = make(0, level)
    optimizer, ema, checkpointer = begin(folder, model)
    for seed in range(2):
        step(model, optimizer, seed)
        ema.update()
    checkpointer.save(2)
    return after_a_step(model, optimizer, ema)


def after_a_step(model: nn.Sequential, optimizer: Any, ema: Ema) -> list[Tensor]:
    averages = [reference.full(each) for each in ema.shadow.values()]
    step(model, optimizer, 2)
    return [*averages, *reference.full_weights(model).values()]


def load(folder: str, level: str, device: str, expected: list[Tensor]) -> None:
    model = make(1, level, device)
    optimizer, ema, checkpointer = begin(folder, model)
    checkpointer.load()
    found = after_a_step(model, optimizer, ema)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_model_of_fully_shard_is_saved_and_loaded_by_any_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks.run(save, str(tmp_path), "optim_grads_params", world_size=2)[0]
    for world_size, level, device in ((2, "optim_grads_params", "meta"), (1, "no_shard", "cpu")):
        ranks.run(load, str(tmp_path), level, device, expected, world_size=world_size)


@on_ranks(2)
def test_what_has_no_engine_is_an_error_that_says_where_engines_are() -> None:
    model = make(0)
    calls: list[tuple[Any, str]] = [
        (lambda: fe.Checkpointer("x", model), r"fsdp2\.engine_of\(model\) for a model of fully_sh"),
        (lambda: fe.Checkpointer("x", {"a": model}), r"engine\['a'\]: expected an engine"),
        (lambda: fe.save_checkpoint("x", model), r"engine: expected an engine.*a FSDPSequential"),
        (lambda: engine_of(nn.Linear(1, 1)), r"model: expected a module on which fully_shard"),
    ]
    for call, message in calls:
        with pytest.raises(TypeError, match=message):
            call()
    engine_of(model)
    with pytest.raises(ValueError, match="model: expected the root module; found a FSDPMlp"):
        engine_of(model[0])
