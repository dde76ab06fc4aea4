"""Models train on the device as on the CPU: alone, with autocast, by DDP and by FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.models import Chain, Mlp, Transformer, token_batch, vector_batch
from tests.pool import on_ranks

ranks = device.ranks

STEPS = 3


def mlp() -> nn.Module:
    return Chain(Mlp(), Mlp())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "mlp": (mlp, vector_batch),
    "transformer": (Transformer, token_batch),
}


@sdpa_kernel(SDPBackend.MATH)  # on the CPU too: the same kernels
def train(model: nn.Module, make_batch: Callable[[int, int], Any], rows: slice) -> list[Tensor]:
    """Losses of some steps on ``rows`` of each batch; neither clips nor reads anything."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    losses = []
    for step in range(STEPS):
        loss = model(*(part[rows].to(device) for part in make_batch(4, step)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [loss.cpu() for loss in losses]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max((whole(a) - whole(b)).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
@on_ranks(1)
def test_a_model_trains_on_the_device_as_on_the_cpu(name: str) -> None:
    make_model, make_batch = MODELS[name]
    model = make_model()
    on_device = copy.deepcopy(model).to(on.DEVICE)
    losses = train(model, make_batch, slice(None))
    with on.delays(compute=3e-4, copy=3e-4, seed=1):
        found = train(on_device, make_batch, slice(None))
    assert torch.equal(torch.stack(found), torch.stack(losses))
    assert largest_difference(on_device, model) == 0


@on_ranks(1)
def test_autocast_on_the_device_is_that_of_the_cpu() -> None:
    model = mlp()
    on_device = copy.deepcopy(model).to(on.DEVICE)
    x, y = vector_batch(4, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x, y).backward()
    with torch.autocast("deferred", dtype=torch.bfloat16):
        assert on_device.predict(x.to(on.DEVICE)).dtype == torch.float32  # the residual's
        assert on_device.blocks[0].up(x.to(on.DEVICE)).dtype == torch.bfloat16
        on_device(x.to(on.DEVICE), y.to(on.DEVICE)).backward()
    for a, b in zip(model.parameters(), on_device.parameters(), strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad.cpu(), atol=1e-6)


@on_ranks(1)
def test_a_convolution_a_batch_norm_and_a_pool_run_on_the_device() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    )
    on_device = copy.deepcopy(model).to(on.DEVICE)
    x = torch.randn(2, 3, 8, 8)
    model(x).sum().backward()
    with on.count_host_syncs() as syncs:
        pinned = x.pin_memory()
        on_device(pinned.to(on.DEVICE, non_blocking=True)).sum().backward()
    assert not syncs
    for a, b in zip(model.parameters(), on_device.parameters(), strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad.cpu(), atol=1e-5)


def sharded(model: nn.Module, way: str) -> nn.Module:
    model = model.to(on.DEVICE)
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    mesh = dist.init_device_mesh("deferred", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(20, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@on_ranks(2)
def test_two_ranks_train_as_one_process_on_the_cpu_in_any_order(way: str, num_seeds: int) -> None:
    model = Transformer(num_blocks=2)
    start = copy.deepcopy(model)
    train(model, token_batch, slice(None))
    rank = dist.get_rank()
    for seed in range(num_seeds):
        on_device = sharded(copy.deepcopy(start), way)
        with on.delays(compute=3e-4, copy=3e-4, collective=3e-3, host=1e-4, seed=2 * seed + rank):
            train(on_device, token_batch, slice(2 * rank, 2 * rank + 2))
        assert largest_difference(on_device, model) <= 1e-6, seed


@pytest.mark.thorough
@on_ranks(2)
def test_waits_of_fsdp2_that_are_left_out_give_wrong_numbers() -> None:
    """One after the other, with fixed delays; those that never matter here are counted too."""
    model = Transformer(num_blocks=2)
    rank = dist.get_rank()
    rows = slice(2 * rank, 2 * rank + 2)

    def weights(index: int) -> Tensor:
        torch.manual_seed(1)
        other = sharded(copy.deepcopy(model), "fsdp2")
        # Compute of one rank is slow, messages of the other.
        with on.delays(compute=1e-3 * (1 - rank), collective=4e-3), on.without_wait(index):
            train(other, token_batch, rows)
            waits = on.num_stream_waits()
        counts.append(waits)
        return torch.cat([whole(p).flatten() for p in other.parameters()])

    counts: list[int] = []
    right = weights(-1)
    per_step = counts[0] // STEPS
    found = []
    for index in range(per_step, 2 * per_step):
        if not torch.allclose(weights(index), right, rtol=0, atol=1e-6):
            found.append(index - per_step)
    print(f"{len(found)} of {per_step} waits of a step change the result: {found}")
    assert len(found) >= 3
    assert torch.equal(weights(-1), right)


@on_ranks(2)
def test_fsdp2_has_no_host_sync_in_a_steady_step() -> None:
    model = sharded(Transformer(), "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = [part.to(on.DEVICE) for part in token_batch(2, dist.get_rank())]
    for step in range(3):
        with on.count_host_syncs() as syncs:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert step == 0 or not syncs


class Gated(nn.Module):
    """A linear and a scale that only rank 1 reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale if dist.get_rank() == 1 else x).sum()


@on_ranks(2)
def test_ddp_waits_for_the_device_where_a_parameter_has_no_gradient_on_one_rank() -> None:
    """As ``docs/devices.md`` says, which compares the engine with it."""
    x = torch.ones(2, 8, device=on.DEVICE)
    model = nn.parallel.DistributedDataParallel(Gated().to(on.DEVICE), find_unused_parameters=True)
    for _ in range(2):
        model(x).backward()
    with on.count_host_syncs() as syncs:
        model(x).backward()
    assert sum(syncs.values()) == (1 if dist.get_rank() == 0 else 0), syncs
