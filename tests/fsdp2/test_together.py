"""``unshard()`` of modules by some ranks alone, within ``engine.together()``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests import reference
from tests.models import Chain, vector_batch
from tests.pool import on_ranks
from tests.training import mesh_of

WIDTH, NUM_BLOCKS = 6, 4


def make() -> Chain:
    torch.manual_seed(0)
    return Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))).double()


def batch(seed: int) -> list[Tensor]:
    return [each.double() for each in vector_batch(3, seed, WIDTH)]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("async_op", [True, False])
@on_ranks(4)
def test_ranks_unshard_different_modules(
    shape: tuple[int, ...], async_op: bool, reshards: bool
) -> None:
    mesh = mesh_of(*shape)
    rank, model, alone = dist.get_rank(), make(), make()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    with torch.no_grad():
        model(*batch(0))  # makes the engine
    engine = fe.engine.engine_of(model)
    assert engine is not None
    with engine.together():
        for step in range(3):
            # Each rank unshards other blocks, the last rank none, and finds this step's weights.
            mine = [number for number in range(4) if (number + step) % 4 < 3 - rank]
            blocks = [model.blocks[number] for number in mine]
            handles = [block.unshard(async_op=async_op) for block in blocks]
            for number, block, handle in zip(mine, blocks, handles, strict=True):
                if handle is not None:
                    handle.wait()
                assert not isinstance(block.weight, DTensor)
                torch.testing.assert_close(block.weight, alone.blocks[number].weight)
            for block in blocks[::2]:
                block.reshard()
                assert isinstance(block.weight, DTensor)
            model(*batch(10 * step + rank)).backward()
            losses = [alone(*batch(10 * step + each)) for each in range(4)]
            torch.stack(losses).mean().backward()
            expected = {name: param.grad for name, param in alone.named_parameters()}
            torch.testing.assert_close(reference.full_gradients(model), expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
