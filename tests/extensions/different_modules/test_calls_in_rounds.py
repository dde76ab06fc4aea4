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
from tests.extensions.different_modules.maze import NUM_BLOCKS, Maze, inputs, loss_of, plain
from tests.pool import on_few_ranks, on_ranks


def evaluate(model: nn.Module, num: int) -> None:
    with torch.no_grad():
        for number in range(num):
            model(inputs(number), plain(number % NUM_BLOCKS))


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
    fe.load_checkpoint(f"{folder}/one", engine, optimizer)


def save_a_run(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    run = fe.Checkpointer(f"{folder}/run", engine, optimizer)
    for number, save in enumerate((run.save, run.save_async)):
        save(number)
        evaluate(engine.model, 3 * reference.rank_and_size()[0])
    assert run.load().step == 1


CALLS: dict[str, Callable[[fe.Engine, torch.optim.Optimizer, str], Any]] = {
    "a collective of the user's": lambda engine, *_: sum_of_ranks(engine),
    "functions of parameters": lambda engine, *_: norms_and_full_tensors(engine),
    "start_param_sync": lambda engine, *_: engine.start_param_sync(),
    "start_param_sync(wait=True)": lambda engine, *_: engine.start_param_sync(wait=True),
    "full_state_dict": lambda engine, *_: engine.full_state_dict(),
    "clip_grad_norm_": lambda engine, *_: engine.clip_grad_norm_(1.0),
    "save_checkpoint": save_and_load,
    "Checkpointer": save_a_run,
    "export_safetensors": lambda engine, _, folder: fe.export_safetensors(engine, folder),
}


@pytest.mark.parametrize("call", CALLS)
@on_few_ranks
def test_a_call_of_all_ranks_waits_for_those_that_evaluate(call: str) -> None:
    folder, model, (rank, _) = shared_folder(), Maze(), reference.rank_and_size()
    engine = fe.shard(model, units="blocks.*")
    optimizer = torch.optim.AdamW(model.parameters())
    route = plain(*range(1 + rank))
    with engine.together():
        loss_of(model, rank, route).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, route).backward()
        evaluate(model, 1 + 4 * rank)
        CALLS[call](engine, optimizer, folder)
        evaluate(model, 4 - rank)
        optimizer.zero_grad()
        loss_of(model, rank, route).backward()
        optimizer.step()


@on_ranks(2)
def test_a_generator_that_is_closed_within_the_context_leaves_it() -> None:
    rank, model, alone = dist.get_rank(), Maze(), Maze()
    engine = fe.shard(model, units="blocks.*")
    route = plain(1, 3)

    def results() -> Iterator[Tensor]:
        with engine.together(), torch.no_grad():
            while True:
                yield model(inputs(0), route)

    for step in range(3):
        for number, result in enumerate(results()):
            torch.testing.assert_close(result, alone(inputs(0), route))
            if number == 2 + 3 * step * rank:
                break
    loss_of(model, rank, plain(0)).backward()
    assert all(param.grad is not None for param in model.head.parameters())


@on_ranks(2)
def test_a_backward_after_the_context_raises_on_all_ranks() -> None:
    rank, model = dist.get_rank(), Maze()
    engine = fe.shard(model, units="blocks.*")
    for step in range(2):
        route = plain(*range(rank + step))
        with engine.together():
            loss = loss_of(model, 0, route)
        with pytest.raises(RuntimeError, match=r"expected it within engine\.together\(\)"):
            loss.backward()
        engine.reset()
        with engine.together():
            loss = loss_of(model, 0, route)
        with engine.together():
            loss.backward()
        engine.zero_grad_buffer()
    with engine.together():
        loss_of(model, 0, plain(0))  # its backward does not come
    loss_of(model, 0, plain(0)).backward()
