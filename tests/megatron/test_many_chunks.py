"""Many wrapped chunks, stepped by one optimizer: ranks gather their weights in one order."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.pool import Ranks

NUM_CHUNKS, NUM_STEPS, DIM = 24, 3, 6


def batches(step: int) -> list[Tensor]:
    """One for each rank."""
    dice = torch.Generator().manual_seed(step)
    return [torch.randn(3, DIM, generator=dice) for _ in range(dist.get_world_size())]


def forward(chunks: list[nn.Module], x: Tensor) -> Tensor:
    for chunk in chunks:
        x = x + torch.tanh(chunk(x))
    return x.square().mean()


def train(level: str) -> None:
    torch.manual_seed(0)
    alone: list[nn.Module] = [nn.Linear(DIM, DIM) for _ in range(NUM_CHUNKS)]
    chunks = [
        fe.DistributedDataParallel(copy.deepcopy(each), config_of(level, bucket_size=10))
        for each in alone
    ]
    makers = [nn.ModuleList(chunks), nn.ModuleList(alone)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in makers]
    for step in range(NUM_STEPS):
        parts = batches(step)
        losses = [forward(alone, part) for part in parts]
        torch.stack(losses).mean().backward()
        loss = forward(list(chunks), parts[dist.get_rank()])
        assert torch.allclose(loss, losses[dist.get_rank()], rtol=1e-5), step
        loss.backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for chunk in chunks:
            chunk.zero_grad_buffer()
    for number, (chunk, single) in enumerate(zip(chunks, alone, strict=True)):
        for name, value in chunk.engine.full_state_dict().items():
            assert torch.allclose(value, single.state_dict()[name], atol=1e-6), (number, name)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_all_chunks_step_as_one_process(ranks: Ranks, level: str, world_size: int) -> None:
    ranks.run(train, level, world_size=world_size)
