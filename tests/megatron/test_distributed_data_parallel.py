"""The wrapper trains as one process does, by SGD, because Adam hides a wrong factor."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.models import Transformer, token_batch
from tests.pool import Ranks, on_ranks

STEPS = 2
# Overlap, microbatches, elements of a bucket.
WAYS = [(False, 1, None), (True, 1, 700), (False, 3, 700), (True, 3, None)]


@functools.cache
def trained_alone(world: int, num_micro: int) -> tuple[Transformer, list[reference.Step]]:
    """The model as it starts, and its steps in one process."""
    torch.manual_seed(1)
    model = Transformer(num_blocks=2, tied=True)
    data = reference.make_data(token_batch, STEPS, num_micro, world)
    return model, reference.train(copy.deepcopy(model), data)


def compare(level: str, world_size: int) -> None:
    for overlap, num_micro, bucket_size in WAYS:
        start, expected = trained_alone(world_size, num_micro)
        data = reference.make_data(token_batch, STEPS, num_micro, world_size)
        config = config_of(level, overlap=overlap, bucket_size=bucket_size)
        ddp = fe.DistributedDataParallel(copy.deepcopy(start), config)
        steps = train_wrapped(ddp, data, zero_buffer=num_micro == 1)
        lines = reference.differences(steps, expected, 2e-5)
        assert not lines, (overlap, num_micro, bucket_size, *lines[:8])


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_wrapped_model_on_one_axis_trains_as_one_process(
    ranks: Ranks, level: str, world_size: int
) -> None:
    ranks.run(compare, level, world_size, world_size=world_size)


NUM_CHUNKS, DIM = 24, 6


def forward(chunks: nn.ModuleList, x: Tensor) -> Tensor:
    for chunk in chunks:
        x = x + torch.tanh(chunk(x))
    return x.square().mean()


def train_chunks(level: str) -> None:
    """One optimizer steps them: ranks gather their weights in one order."""
    torch.manual_seed(0)
    alone = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(NUM_CHUNKS)])
    config = config_of(level, bucket_size=10)
    chunks = nn.ModuleList([fe.DistributedDataParallel(copy.deepcopy(m), config) for m in alone])
    optimizers = [reference.sgd(each.parameters()) for each in (chunks, alone)]
    for step in range(2):
        torch.manual_seed(step)
        parts = torch.randn(dist.get_world_size(), 3, DIM)
        losses = [forward(alone, part) for part in parts]
        torch.stack(losses).mean().backward()
        loss = forward(chunks, parts[dist.get_rank()])
        assert torch.allclose(loss, losses[dist.get_rank()], rtol=1e-5), step
        loss.backward()
        for chunk in chunks:
            chunk.finish_grad_sync()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for chunk in chunks:
            chunk.zero_grad_buffer()
    for chunk, single in zip(chunks, alone, strict=True):
        reference.assert_same_weights(chunk.module, single, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_all_chunks_step_as_one_process(ranks: Ranks, level: str, world_size: int) -> None:
    ranks.run(train_chunks, level, world_size=world_size)


class CachesWeights(nn.Linear):
    """Quantises its weights in a step's first microbatch, as Megatron-Core's TELinear does."""

    is_first_microbatch, num_quantised = True, 0

    def forward(self, batch: Tensor) -> Tensor:
        self.num_quantised += self.is_first_microbatch
        self.is_first_microbatch = False
        return super().forward(batch)


@on_ranks(2)
def test_schedules_refresh_cached_weights_once_a_step() -> None:
    layers = [CachesWeights(4, 4), CachesWeights(4, 4)]
    config = fe.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = fe.DistributedDataParallel(nn.Sequential(layers[0], nn.ReLU(), layers[1]), config)
    for step in range(3):
        model.set_is_first_microbatch()  # by Megatron-Core's schedules
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        assert [layer.num_quantised for layer in layers] == [step + 1] * 2
