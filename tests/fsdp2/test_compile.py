"""``fully_shard`` of modules that ``torch.compile`` has, or will have, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.fsdp2 import fully_shard
from tests.pool import Ranks

STEPS = 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)]
    return nn.Sequential(*blocks)


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def _expected(num_ranks: int) -> list[float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = [model(_batch(step, rank)).square().mean() for rank in range(num_ranks)]
        torch.stack(found).mean().backward()
        optimizer.step()
        losses.append(found[0].item())
    return losses


def _sharded(way: str, backend: str) -> nn.Module:
    model = _model()
    for index, block in enumerate(model):
        assert isinstance(block, nn.Sequential)
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


def _losses(way: str, backend: str) -> tuple[list[float], list[str]]:
    torch._dynamo.reset()
    model = _sharded(way, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(_batch(step, dist.get_rank())).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.state_dict())


WAYS = ["compiled blocks", "a compiled model", "block.compile()", "compiled afterwards"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compiled_modules_train_as_one_process(ranks: Ranks, num_ranks: int, way: str) -> None:
    backend = "aot_eager" if num_ranks == 2 else "eager"
    losses, names = ranks.run(_losses, way, backend, world_size=num_ranks)[0]
    torch.testing.assert_close(losses, _expected(num_ranks), rtol=1e-4, atol=1e-6)
    prefix = {"compiled blocks": "0._orig_mod.", "a compiled model": "_orig_mod.0."}
    assert names[0] == f"{prefix.get(way, '0.')}0.weight"
