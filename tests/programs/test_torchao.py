"""torchao's optimizers with quantised state, at every level, beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fsdp_engine as fe
from tests.integrations.trainer_scene import LEVELS
from tests.pool import Ranks
from tests.programs.packages import LOW_BIT, with_torchao

pytestmark = LOW_BIT
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


WIDTH = 128


def _model() -> nn.Module:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
    )
    return nn.Sequential(*blocks)


def _optimizer(name: str, model: nn.Module) -> Any:
    with with_torchao():
        import torchao.optim
    return getattr(torchao.optim, name)(model.parameters(), lr=1e-2)


def _steps(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """Losses of steps, the mean over ranks if there are any."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    with torch.compiler.set_stance("force_eager"):
        for step in range(first, last):
            batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
            part = batch.chunk(size)[rank]
            loss = (model(part) - part).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            if size > 1:
                dist.all_reduce(total)
            losses.append(total.item() / size)
    return losses


def train(name: str, level: str | None) -> list[float]:
    """Losses of each step, of one process where there is no level."""
    model = _model()
    if level is None:
        return _steps(model, _optimizer(name, model), 0, 10)
    fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
    optimizer = fe.shard_optimizer(_optimizer(name, model))
    return _steps(model, optimizer, 0, 10)


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> dict[str, list[float]]:
    return {name: ranks.run(train, name, None, world_size=1)[0] for name in OPTIMIZERS}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_quantised_state_lies_in_slices(
    ranks: Ranks, alone: dict[str, list[float]], name: str, level: str
) -> None:
    for losses in ranks.run(train, name, level, world_size=2):
        assert losses == pytest.approx(alone[name], rel=1e-3)
        assert losses[-1] < 0.9 * losses[0]


SAVED, LAST = 4, 8
KEEPERS = ("checkpointer", "torch.save", "dcp")


def _built(name: str, level: str) -> tuple[nn.Module, fe.Engine, Any]:
    model = _model()
    engine = fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
    return model, engine, fe.shard_optimizer(_optimizer(name, model))


def _save(name: str, level: str, folder: str) -> tuple[list[float], int]:
    """Save in each way, and continue; returns losses, and the number of quantised state tensors."""
    model, engine, optimizer = _built(name, level)
    _steps(model, optimizer, 0, SAVED)
    fe.Checkpointer(f"{folder}/checkpointer", engine, optimizer).save(SAVED)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, f"{folder}/{dist.get_rank()}.pt")
    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(states, checkpoint_id=f"{folder}/dcp")
    return _steps(model, optimizer, SAVED, LAST), _num_quantized(optimizer)


def _load(name: str, level: str, folder: str, keeper: str) -> tuple[list[float], int]:
    """As :func:`_save`, of a model and an optimizer that are built anew."""
    model, engine, optimizer = _built(name, level)
    if keeper == "checkpointer":
        fe.Checkpointer(f"{folder}/checkpointer", engine, optimizer).load()
    elif keeper == "torch.save":
        states = torch.load(f"{folder}/{dist.get_rank()}.pt")
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
    else:
        with torch.compiler.set_stance("force_eager"):
            of_optimizer = get_optimizer_state_dict(model, optimizer)
        states = {"model": model.state_dict(), "optimizer": of_optimizer}
        dcp.load(states, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(states["model"])
        set_optimizer_state_dict(model, optimizer, states["optimizer"])
    num_quantized = _num_quantized(optimizer)
    return _steps(model, optimizer, SAVED, LAST), num_quantized


def _num_quantized(optimizer: Any) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    locals_ = [getattr(value, "_local_tensor", value) for value in values]
    return sum(type(local).__name__.startswith("OptimState") for local in locals_)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_have_the_values_of_quantised_state(
    ranks: Ranks, tmp_path: Path, name: str, level: str
) -> None:
    folder = str(tmp_path)
    saved = ranks.run(_save, name, level, folder, world_size=2)
    assert all(num_quantized > 0 for _, num_quantized in saved)
    for keeper in KEEPERS:
        found = ranks.run(_load, name, level, folder, keeper, world_size=2)
        assert found == saved, keeper
    # The sums of gradients have another order.
    other_level = LEVELS[(LEVELS.index(level) + 2) % len(LEVELS)]
    for world_size in (1, 4):
        for losses, _ in ranks.run(
            _load, name, other_level, folder, "checkpointer", world_size=world_size
        ):
            assert losses == pytest.approx(saved[0][0], rel=5e-3)


def _save_without_shard_optimizer(folder: str) -> None:
    model = _model()
    engine = fe.shard(model, strategy="no_shard", options=fe.Options(min_unit_size=0))
    optimizer = _optimizer("AdamW8bit", model)
    _steps(model, optimizer, 0, 1)
    with pytest.raises(ValueError, match=r"found a OptimState8bit in 'exp_avg'. Call fe.shard_opt"):
        fe.save_checkpoint(f"{folder}/checkpoint", engine, optimizer)
    fe.shard_optimizer(optimizer)
    fe.save_checkpoint(f"{folder}/checkpoint", engine, optimizer)


def test_a_checkpoint_of_quantised_state_needs_shard_optimizer(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(_save_without_shard_optimizer, str(tmp_path), world_size=2)
