"""Within ``engine.together()``: calls that all ranks make, while they use different units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.checkpoint.scene import shared_folder
from tests.pool import on_few_ranks, on_ranks

WIDTH, NUM_BLOCKS = 6, 4


class Blocks(nn.Module):
    """Blocks, of which each call says which ones it goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, *route: int) -> Tensor:
        for number in route:
            x = torch.tanh(self.blocks[number](x))
        result: Tensor = self.head(x)
        return result


def inputs(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def rank_now() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def evaluate(model: nn.Module, num: int) -> None:
    with torch.no_grad():
        for number in range(num):
            model(inputs(number), number % NUM_BLOCKS)


def sum_of_ranks(engine: fe.Engine) -> None:
    engine.await_ranks()
    if dist.is_initialized():
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()


def norms_and_full_tensors(engine: fe.Engine) -> None:
    engine.await_ranks()
    params = list(engine.model.parameters())
    nn.utils.clip_grad_norm_(params, 1.0)
    for param in params:
        assert param.detach().norm().isfinite()
        reference.full(param)


def save_and_load(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    fe.save_checkpoint(f"{folder}/one", engine, optimizer)
    evaluate(engine.model, 3 * rank_now())
    fe.load_checkpoint(f"{folder}/one", engine, optimizer)


def save_a_run(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    run = fe.Checkpointer(f"{folder}/run", engine, optimizer)
    for number, save in enumerate((run.save, run.save_async)):
        save(number)
        evaluate(engine.model, 3 * rank_now())
    assert run.load().step == 1


def export(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    fe.export_safetensors(engine, f"{folder}/export")
    evaluate(engine.model, 3 * rank_now())
    fe.load_safetensors(engine, f"{folder}/export")


CALLS: dict[str, Callable[[fe.Engine, torch.optim.Optimizer, str], Any]] = {
    "a collective of the user's": lambda engine, *_: sum_of_ranks(engine),
    "functions of parameters": lambda engine, *_: norms_and_full_tensors(engine),
    "start_param_sync": lambda engine, *_: engine.start_param_sync(),
    "start_param_sync(wait=True)": lambda engine, *_: engine.start_param_sync(wait=True),
    "full_state_dict": lambda engine, *_: engine.full_state_dict(),
    "clip_grad_norm_": lambda engine, *_: engine.clip_grad_norm_(1.0),
    "save_checkpoint": save_and_load,
    "Checkpointer": save_a_run,
    "export_safetensors": export,
}


@pytest.mark.parametrize("call", CALLS)
@on_few_ranks
def test_a_call_of_all_ranks_waits_for_those_that_evaluate(call: str) -> None:
    folder, rank, model = shared_folder(), rank_now(), Blocks()
    engine = fe.shard(model, strategy="optim_grads_params", units="blocks.*")
    optimizer = torch.optim.AdamW(model.parameters())
    route = list(range(1 + rank))
    with engine.together():
        for _ in range(2):
            model(inputs(rank), *route).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(inputs(rank), *route).square().mean().backward()
        evaluate(model, 1 + 4 * rank)
        CALLS[call](engine, optimizer, folder)
        evaluate(model, 4 - rank)
        optimizer.zero_grad()
        model(inputs(rank), *route).square().mean().backward()
        optimizer.step()


@on_ranks(2)
def test_a_generator_that_is_closed_within_the_context_leaves_it() -> None:
    rank, model, alone = dist.get_rank(), Blocks(), Blocks()
    engine = fe.shard(model, units="blocks.*")

    def results() -> Iterator[Tensor]:
        with engine.together(), torch.no_grad():
            while True:
                yield model(inputs(0), 1, 3)

    for step in range(3):
        for number, result in enumerate(results()):
            torch.testing.assert_close(result, alone(inputs(0), 1, 3))
            if number == 2 + 3 * step * rank:
                break
    model(inputs(rank), 0).sum().backward()
    assert all(param.grad is not None for param in model.head.parameters())


@on_ranks(2)
def test_a_backward_after_the_context_raises_on_all_ranks() -> None:
    rank, model = dist.get_rank(), Blocks()
    engine = fe.shard(model, units="blocks.*")
    for step in range(2):
        with engine.together():
            loss = model(inputs(0), *range(rank + step)).sum()
        with pytest.raises(RuntimeError, match=r"expected it within engine\.together\(\)"):
            loss.backward()
        engine.reset()
        with engine.together():
            loss = model(inputs(0), *range(rank + step)).sum()
        with engine.together():
            loss.backward()
        engine.zero_grad_buffer()
    with engine.together():
        model(inputs(0), 0)  # its backward does not come
    model(inputs(0), 0).sum().backward()
