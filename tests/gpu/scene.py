"""A model, its training and the process group of tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_engine as fe

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
LEVEL_3 = LEVELS[3]
WIDTH = 512
NUM_BLOCKS = 4
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; found none"),
]
Batches = list[tuple[Tensor, Tensor]]
# Losses and weights.
Trained = tuple[list[float], dict[str, Tensor]]


class Block(nn.Module):
    """A residual block. ``probe`` is called when its kernels have been issued."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.probe: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        if self.probe is not None:
            self.probe()
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x).float(), target.float())


def make_model(kind: type[Model] = Model) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return kind()


def make_batches(count: int, rows: int = 8) -> Batches:
    """Drawn on the CPU, so that every process has the same."""
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(count, 2, rows, WIDTH, generator=generator).cuda()
    return [(x, target) for x, target in parts]


def make_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def requested_bytes(moment: str) -> int:
    """Bytes asked of CUDA's allocator, which it may round up: "current" or "peak"."""
    found: int = torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"]
    return found


@contextmanager
def process_group(backend: str, world_size: int) -> Iterator[DeviceMesh]:
    """A mesh of this process and, with the backend "fake", of ranks that do not exist."""
    assert not dist.is_initialized(), "another test has left a process group behind"
    store = FakeStore() if backend == "fake" else dist.HashStore()
    timeout = timedelta(seconds=60)
    torch.cuda.set_device(0)
    dist.init_process_group(backend, store=store, rank=0, world_size=world_size, timeout=timeout)
    try:
        yield init_device_mesh("cuda", (world_size,))
    finally:
        torch.cuda.synchronize()
        gc.collect()
        dist.destroy_process_group()


def train_sharded(model: Model, engine: fe.Engine, batches: Batches) -> Trained:
    optimizer = make_sgd(model)
    losses = []
    for first in range(0, len(batches), 2):
        with engine.no_sync():
            loss = model(*batches[first]) / 2
            loss.backward()
        losses.append(loss.item())
        loss = model(*batches[first + 1]) / 2
        loss.backward()
        losses.append(loss.item())
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, engine.full_state_dict()


def assert_same(found: Trained, expected: Trained, tolerance: float = 0.0) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=0.0)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        limits = {"rtol": tolerance, "atol": tolerance * value.abs().max().item()}
        torch.testing.assert_close(found[1][name].cpu(), value.cpu(), **limits)
