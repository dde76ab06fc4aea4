"""``fully_shard`` of modules compiled before or after it, compared with one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_engine.fsdp2 import fully_shard
from tests.models import DIM, Mlp, vector_batch
from tests.pool import Ranks

PREFIXES = {
    "compiled blocks": "0._orig_mod.",
    "a compiled model": "_orig_mod.0.",
    "block.compile()": "0.",
    "compiled afterwards": "0.",
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(DIM, 8), Mlp(DIM, 8))


def sharded(way: str, backend: str) -> nn.Module:
    model = make()
    for index, block in enumerate(model):
        if way == "compiled blocks":
            model[index] = fully_shard(torch.compile(block, backend=backend))
        elif way == "block.compile()":
            block.compile(backend=backend)
            fully_shard(block)
        elif way == "compiled afterwards":
            fully_shard(block).compile(backend=backend)
        else:
            fully_shard(block)
    if way == "a compiled model":
        return fully_shard(torch.compile(model, backend=backend))
    return fully_shard(model)


def losses_of(model: nn.Module, ranks: list[int]) -> list[float]:
    """Losses of the first of these ranks. The model trains on the mean loss over all of them."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05), []
    for step in range(3):
        optimizer.zero_grad()
        found = [model(vector_batch(4, 10 * step + rank)[0]).square().mean() for rank in ranks]
        torch.stack(found).mean().backward()
        optimizer.step()
        losses.append(found[0].item())
    return losses


def compare(way: str, backend: str) -> None:
    torch._dynamo.reset()
    model, rank, size = sharded(way, backend), dist.get_rank(), dist.get_world_size()
    others = [each for each in range(size) if each != rank]
    expected = losses_of(make(), [rank, *others])
    torch.testing.assert_close(losses_of(model, [rank]), expected, rtol=1e-4, atol=1e-6)
    assert next(iter(model.state_dict())) == f"{PREFIXES[way]}up.weight"


@pytest.mark.parametrize("way", PREFIXES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compiled_modules_train_as_one_process(ranks: Ranks, num_ranks: int, way: str) -> None:
    ranks.run(compare, way, "aot_eager" if num_ranks == 2 else "eager", world_size=num_ranks)
