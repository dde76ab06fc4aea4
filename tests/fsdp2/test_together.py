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
from tests.pool import on_ranks
from tests.training import mesh_of

WIDTH = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def inputs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("async_op", [True, False])
@on_ranks(4)
def test_ranks_unshard_different_modules(
    shape: tuple[int, ...], async_op: bool, reshards: bool
) -> None:
    mesh = mesh_of(*shape) if len(shape) > 1 else mesh_of(4)
    rank, model, alone = dist.get_rank(), Net(), Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    optimizer, one = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    with torch.no_grad():
        model(inputs(0))  # makes the engine
    engine = fe.engine.engine_of(model)
    assert engine is not None
    with engine.together():
        for step in range(4):
            # Each rank other blocks, the last one none; the weights are those of this step.
            mine = [number for number in range(4) if (number + step) % 4 < 3 - rank]
            handles = [model.blocks[number].unshard(async_op=async_op) for number in mine]
            for number, handle in zip(mine, handles, strict=True):
                block = model.blocks[number]
                if handle is not None:
                    handle.wait()
                assert not isinstance(block.weight, DTensor)
                torch.testing.assert_close(block.weight, alone.blocks[number].weight)
            for number in mine[::2]:
                model.blocks[number].reshard()
                assert isinstance(model.blocks[number].weight, DTensor)
            model(inputs(10 * step + rank)).square().mean().backward()
            losses = [alone(inputs(10 * step + each)).square().mean() for each in range(4)]
            torch.stack(losses).mean().backward()
            found = reference.full_gradients(model)
            for name, param in alone.named_parameters():
                torch.testing.assert_close(found[name], param.grad)
            for each in (optimizer, one):
                each.step()
                each.zero_grad()
