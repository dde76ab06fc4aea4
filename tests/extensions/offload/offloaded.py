"""A model whose state lies elsewhere, and its training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.offload import ROLES
from tests.models import Transformer, token_batch
from tests.optim.optimizers import MAKERS


def on_disk(folder: str | Path, roles: Sequence[str] = ("optimizer_state",)) -> fe.Offload:
    return fe.Offload(folder=folder, **dict.fromkeys(roles, "disk"))


def all_roles(level: str) -> tuple[str, ...]:
    """Everything that can lie elsewhere at a level."""
    return ROLES if level.startswith("optim_grads") else ROLES[:2]


def make(
    pair: tuple[str, str], name: str, offload: fe.Offload | None, **options: Any
) -> tuple[Any, fe.Engine, Any]:
    """A model, its engine, and an optimizer of two groups."""
    torch.manual_seed(0)
    model = Transformer()
    mesh = (2, 2) if dist.is_initialized() and dist.get_world_size() == 4 else None
    engine = fe.shard(model, mesh, *pair, offload=offload, min_unit_size=0, **options)
    params = list(model.parameters())
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
    optimizer = MAKERS[name](groups)
    fe.shard_optimizer(optimizer, elementwise=name == "Lion")
    return model, engine, optimizer


def step(model: Any, engine: fe.Engine, optimizer: Any, number: int, micro: int = 1) -> list[float]:
    """One step of two, of which every third is skipped, on this rank's rows; the losses."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for index in range(micro):
        rows = slice(rank * 4 // size, (rank + 1) * 4 // size)
        batch = (part[rows] for part in token_batch(4, 10 * number + index))
        with nullcontext() if index == micro - 1 else engine.no_sync():
            loss = model(*batch) / micro
            loss.backward()
        losses.append(loss.item())
    if micro == 2:
        engine.clip_grad_norm_(0.5)
    if number % 3 != 2:
        optimizer.step()
    optimizer.zero_grad()
    return losses


def values(optimizer: Any) -> list[Any]:
    """State and hyperparameters, in order."""
    packed = optimizer.state_dict()
    found: list[Any] = []
    for index in sorted(packed["state"]):
        for key in sorted(packed["state"][index]):
            value = packed["state"][index][key]
            local = getattr(value, "local", value)
            found.append((index, key, local.clone() if isinstance(local, Tensor) else local))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in packed["param_groups"]]
    return [*found, groups, getattr(optimizer, "num_steps", None)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, tuple) and isinstance(one[2], Tensor):
            assert one[:2] == other[:2]
            assert torch.equal(one[2], other[2]), one[:2]
        else:
            assert one == other


def save(folder: str, offload: fe.Offload | None, pair: tuple[str, str]) -> list[Any]:
    """The weights of a run that saves after two steps, at its end."""
    model, engine, optimizer = make(pair, "AdamW", offload)
    checkpointer = fe.Checkpointer(Path(folder) / "saved", engine, optimizer)
    for number in range(2):
        step(model, engine, optimizer, number)
    checkpointer.save_async(2)
    return resumed(model, engine, optimizer, checkpointer)


def load(
    folder: str, offload: fe.Offload | None, pair: tuple[str, str], steps_before: int
) -> list[Any]:
    """The weights of a run that loads what :func:`save` saved, after so many other steps."""
    model, engine, optimizer = make(pair, "AdamW", offload)
    for number in range(steps_before):
        step(model, engine, optimizer, 20 + number)
    checkpointer = fe.Checkpointer(Path(folder) / "saved", engine, optimizer)
    checkpointer.load()
    return resumed(model, engine, optimizer, checkpointer)


def resumed(model: Any, engine: fe.Engine, optimizer: Any, checkpointer: Any) -> list[Any]:
    for number in range(3, 5):
        step(model, engine, optimizer, number)
    checkpointer.close()
    return list(engine.full_state_dict().values())
