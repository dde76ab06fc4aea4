"""torch's own ways of training on the device: DDP and FSDP2 train as one process on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests import reference
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import on_device
from tests.models import Transformer, token_batch
from tests.pool import on_ranks

ranks = device.ranks

STEPS = 3


@sdpa_kernel(SDPBackend.MATH)  # on the CPU too: the same kernels
def train(model: nn.Module, rows: slice = slice(None)) -> None:
    """Some steps on ``rows`` of each batch; neither clips nor reads anything."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    for step in range(STEPS):
        model(*on_device((part[rows] for part in token_batch(4, step)), device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([reference.full(param).cpu().flatten() for param in model.parameters()])


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
    train(model)
    rank = dist.get_rank()
    for seed in range(num_seeds):
        other = sharded(copy.deepcopy(start), way)
        with on.delays(compute=3e-4, copy=3e-4, collective=3e-3, host=1e-4, seed=2 * seed + rank):
            train(other, slice(2 * rank, 2 * rank + 2))
        torch.testing.assert_close(weights_of(other), weights_of(model), rtol=0, atol=1e-6)


@pytest.mark.thorough
@on_ranks(2)
def test_waits_of_fsdp2_that_are_left_out_give_wrong_numbers() -> None:
    """One after the other, with fixed delays; those that never matter here are counted too."""
    model = Transformer(num_blocks=2)
    rank = dist.get_rank()
    counts: list[int] = []

    def weights(index: int) -> Tensor:
        torch.manual_seed(1)
        other = sharded(copy.deepcopy(model), "fsdp2")
        # Compute of one rank is slow, messages of the other.
        with on.delays(compute=1e-3 * (1 - rank), collective=4e-3), on.without_wait(index):
            train(other, slice(2 * rank, 2 * rank + 2))
            counts.append(on.num_stream_waits())
        return weights_of(other)

    right = weights(-1)
    per_step = counts[0] // STEPS
    found = [
        index - per_step
        for index in range(per_step, 2 * per_step)
        if not torch.allclose(weights(index), right, rtol=0, atol=1e-6)
    ]
    print(f"{len(found)} of {per_step} waits of a step change the result: {found}")
    assert len(found) >= 3
    assert torch.equal(weights(-1), right)
