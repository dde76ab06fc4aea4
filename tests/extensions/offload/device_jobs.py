"""Training on the asynchronous device with state elsewhere."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.offload import disk_memory, disk_staging, home
from fsdp_engine.extensions.offload.places import ROLES
from tests.async_device import device as on
from tests.async_device.scene import Job, on_device
from tests.extensions.offload.offloaded import FULL
from tests.models import Mlp, Small, vector_batch

FOLDER = tempfile.gettempdir()
HOST: Any = dict.fromkeys(ROLES, "host")
STATE = {
    "state on the host": fe.Offload("host"),
    "beside forward": fe.Offload("host", overlap_forward=True),
    "state on a disk": fe.Offload("disk", FOLDER),
}
REST_ON_HOST = {
    "rest on the host": fe.Offload(main_weights="host", gradients="host"),
    "all on the host": fe.Offload(**HOST),
    "stepped on the host": fe.Offload(step_on="host", **HOST),
}
REST_ON_DISK = {
    "all on a disk": fe.Offload(folder=FOLDER, **dict.fromkeys(ROLES, "disk")),
    "rest on a disk": fe.Offload(main_weights="disk", gradients="disk", folder=FOLDER),
    "gradients on the host": fe.Offload("disk", FOLDER, main_weights="disk", gradients="host"),
    "rest on a disk, state on the host": fe.Offload(
        "host", FOLDER, main_weights="disk", gradients="disk"
    ),
}
PLACES: dict[str | None, fe.Offload | None] = {None: None}
PLACES |= STATE | REST_ON_HOST | REST_ON_DISK  # type: ignore[operator]


def make_model() -> nn.Module:
    """A model of three units. With ``small_pieces`` one of them is copied in several pieces."""
    model = Small(2)
    model.blocks[0] = Mlp(hidden=130)
    return model


def make_adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return fe.shard_optimizer(torch.optim.AdamW(params, lr=1e-2, fused=True))


def job(
    place: str | None,
    pair: tuple[str, str] = FULL,
    policy: fe.MixedPrecisionPolicy | None = None,
    **fields: Any,
) -> Job:
    """A job of one rank, unless ``sizes`` are given, whose state lies at ``place``."""
    shard: dict[str, Any] = {"offload": PLACES[place], "mp_policy": policy}
    given = {"num_micro": 1, "sizes": (1,), "make_optimizer": make_adamw, **fields}
    options = tuple(item for item in shard.items() if item[1] is not None)
    return Job(make_model, vector_batch, pair, options=options, **given)


def trained(
    place: str | None,
    num_steps: int = 0,
    pair: tuple[str, str] = FULL,
    device_type: str = on.NAME,
    seed: int = 1,
) -> tuple[fe.Engine, Any, Callable[[int], None]]:
    """An engine on all ranks after some steps, its optimizer, and a function that trains a step."""
    torch.manual_seed(seed)
    given = job(place, pair, sizes=(dist.get_world_size(),))
    engine = given.shard(given.make_model(), device_type)
    optimizer: Any = given.make_optimizer(engine.model.parameters())
    device = engine.mesh.device
    batches = [on_device(vector_batch(4, number), device) for number in range(4)]

    def step(number: int) -> None:
        optimizer.zero_grad()
        engine.model(*batches[number]).backward()
        optimizer.step()

    for number in range(num_steps):
        step(number)
    return engine, optimizer, step


@contextmanager
def small_pieces() -> Iterator[None]:
    """Copy offloaded state in many pieces within this context."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk_memory, disk_staging, home):
            patch.setattr(module, "PIECE", 4096)
        yield


@contextmanager
def slow_disk(seconds: float) -> Iterator[None]:
    """Delay each read and write within this context."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("preadv", "pwritev"):
            call = getattr(os, name)

            def late(*args: Any, call: Callable[..., int] = call) -> int:
                time.sleep(seconds)
                return call(*args)

            patch.setattr(os, name, late)
        yield
