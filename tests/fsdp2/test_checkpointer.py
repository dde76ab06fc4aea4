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
from tests.models import Mlp, vector_batch
from tests.pool import Ranks, on_ranks


def make(seed: int, level: str = "optim_grads_params", device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        model = nn.Sequential(Mlp(), Mlp())
    for module in (*model, model):
        fully_shard(module, strategy=level)
    return model if device == "cpu" else model.to_empty(device="cpu")


class Training:
    """A model, its optimizer, the average of its weights, and a checkpointer for all three."""

    def __init__(self, folder: str, *made: Any) -> None:
        self.model = make(*made)
        self.engine = engine_of(self.model)
        assert engine_of(self.model) is self.engine
        self.optimizer, self.ema = reference.adamw(self.model.parameters()), Ema(self.model)
        extra = {"ema": self.ema}
        self.checkpointer = fe.Checkpointer(folder, self.engine, self.optimizer, extra=extra)

    def step(self, seed: int) -> None:
        self.model(vector_batch(4, seed)[0]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after_a_step(self) -> list[Tensor]:
        averages = [reference.full(each) for each in self.ema.shadow.values()]
        self.step(2)
        return [*averages, *reference.full_weights(self.model).values()]


def save(folder: str, level: str) -> list[Tensor]:
    training = Training(folder, 0, level)
    for seed in range(2):
        training.step(seed)
        training.ema.update()
    training.checkpointer.save(2)
    return training.after_a_step()


def load(folder: str, level: str, device: str, expected: list[Tensor]) -> None:
    training = Training(folder, 1, level, device)
    training.checkpointer.load()
    torch.testing.assert_close(training.after_a_step(), expected, rtol=1e-5, atol=1e-6)


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
