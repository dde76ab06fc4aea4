"""Sums in a fixed order, with the other extensions: the same bits as on one rank without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fsdp_engine as fe
from tests.extensions.fixed_order_sums.scene import Training, Values
from tests.pool import Ranks

EXTENSIONS: dict[str, Callable[[], Sequence[fe.EngineExtension]]] = {
    "Arenas": lambda: [fe.Arenas()],
    "Offload": lambda: [fe.Offload(main_weights="host", gradients="host", optimizer_state="host")],
    "Recompute": lambda: [fe.Recompute()],
    "GradientChecks": lambda: [fe.GradientChecks(large=True)],
}


def with_extension(name: str, level: str) -> Values:
    return Training(pair=(level, "no_shard"), extensions=EXTENSIONS[name]).run()


@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_keeps_the_bits(ranks: Ranks, name: str, level: str) -> None:
    (wanted,) = ranks.run(Training().run, world_size=1, group=False)
    for found in ranks.run(with_extension, name, level, world_size=3):
        assert found == wanted


def muon(params: Any) -> torch.optim.Optimizer:
    matrices = [each for each in params if each.ndim == 2]
    return fe.shard_optimizer(torch.optim.Muon(matrices, lr=0.02))


def with_muon(level: str) -> Values:
    return Training(pair=(level, "no_shard"), optimizer=muon).run()


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_an_optimizer_of_whole_tensors_keeps_the_bits(ranks: Ranks, level: str) -> None:
    (wanted,) = ranks.run(with_muon, "no_shard", world_size=1, group=False)
    for world_size in (2, 3):
        for found in ranks.run(with_muon, level, world_size=world_size):
            # A matrix's state is on the rank that owns it.
            assert found.items() <= wanted.items()
            assert {key for key in wanted if "momentum" not in key} <= found.keys()


def averages() -> Values:
    run = Training().start()
    ema = fe.EMA(run.engine, decay=0.5)
    for step in range(2):
        run.step(step)
        ema.update()
    with ema.swapped():
        return {key: value.numpy().tobytes() for key, value in run.engine.full_state_dict().items()}


def test_averages_of_weights_have_the_same_bits(ranks: Ranks) -> None:
    (wanted,) = ranks.run(averages, world_size=1, group=False)
    assert ranks.run(averages, world_size=3) == [wanted] * 3
