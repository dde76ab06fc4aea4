"""``engine.together()``: ranks run different numbers of forwards between collective calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.comm import activity
from fsdp_engine.integrations.checkpoint_folder import (
    atomic_folder,
    load_folder,
    save_folder,
)
from tests import reference
from tests.checkpoint.scene import shared_folder, update
from tests.extensions.different_modules import maze
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks
from tests.runtime.habits import Hidden

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@on_few_ranks
def test_ranks_that_agree_and_one_rank_alone() -> None:
    model, route = maze.Maze(), maze.plain(0, 2)
    engine = fe.shard(model, units=maze.UNITS, strategy="optim_grads_params")
    with engine.together(), torch.no_grad():
        maze.assert_same_results(model, maze.Maze(), 0, route)
    model(maze.inputs(0), route).sum().backward()  # outside of the context forwards run as before


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_weights_in_low_precision_are_those_of_forwards_without_it(level: str) -> None:
    for options in ({"codec_rules": (fe.Float8(),)}, {"mp_policy": BF16}):
        model, route = maze.Maze().float(), maze.plain(0, 2)
        engine = fe.shard(model, strategy=level, units=maze.UNITS, **options)
        optimizer = reference.sgd(model.parameters())
        for step in range(2):
            update(maze.loss_of(model, step, route), optimizer)
            with torch.no_grad():
                with engine.together():
                    numbers = range(1 + 2 * dist.get_rank())
                    found = [model(maze.inputs(number, model), route) for number in numbers]
                expected = [model(maze.inputs(number, model), route) for number in range(3)]
            assert all(map(torch.equal, found, expected))


# Routes of forwards: they call block 4, read its weight, or omit it.
HABITS = {"calls": [(4, "plain")], "reads": [(4, "reads its weight")], "omits": []}


@pytest.mark.parametrize("trains_first", [False, True])
@pytest.mark.parametrize("there", HABITS)
@pytest.mark.parametrize("here", HABITS)
@on_ranks(2)
def test_training_learns_nothing_from_forwards_that_ranks_did_not_share(
    trains_first: bool, there: str, here: str
) -> None:
    model, alone = maze.Maze(), maze.Maze()
    engine = fe.shard(model, units=maze.UNITS)
    for step in range(3):
        if step or trains_first:
            for each in (model, alone):
                each.zero_grad()
                maze.loss_of(each, 0, [*maze.plain(0), *HABITS[there]]).backward()
            maze.assert_same_gradients(model, alone)
        with engine.together(), torch.no_grad():
            for number in range(2 * dist.get_rank()):
                maze.assert_same_results(model, alone, number, [*maze.plain(0), *HABITS[here]])


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = (
            nn.Linear(maze.WIDTH, maze.WIDTH),
            nn.Linear(maze.WIDTH, maze.WIDTH),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor | Hidden) -> Hidden:
        return Hidden(self.frozen(self.trained(x.tensor if isinstance(x, Hidden) else x)))


@on_ranks(2)
def test_units_that_are_kept_and_stale_in_part() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(PartlyFrozen(), PartlyFrozen()).double())
    model, alone = models
    engine = fe.shard(model, units="*")
    for each in models:
        each(maze.inputs(0)).tensor.square().mean().backward()
        optimizer = reference.sgd(each.parameters())
        optimizer.step()
        optimizer.zero_grad()
    with engine.together(), torch.no_grad():
        for number in range(2 * dist.get_rank()):
            x = maze.inputs(number)
            torch.testing.assert_close(model(x).tensor, alone(x).tensor)
    with torch.no_grad():
        torch.testing.assert_close(model(maze.inputs(5)).tensor, alone(maze.inputs(5)).tensor)


@on_ranks(2)
def test_nesting_is_refused() -> None:
    for level in LEVEL_NAMES[1:]:
        model = maze.Maze()
        engine = fe.shard(model, units=maze.UNITS, strategy=level)
        with engine.together():
            with pytest.raises(RuntimeError, match="and no such context; found such a context"):
                engine.together().__enter__()
            engine.reset()  # changes nothing about the context
            with torch.no_grad():
                maze.assert_same_results(model, maze.Maze(), 0, maze.plain(0))


def evaluate(model: nn.Module, num: int) -> None:
    with torch.no_grad():
        for number in range(num):
            model(maze.inputs(number), maze.plain(number % maze.NUM_BLOCKS))


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


def save_a_run(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    run = fe.Checkpointer(f"{folder}/run", engine, optimizer)
    for number, save in enumerate((run.save, run.save_async)):
        save(number)
        evaluate(engine.model, 3 * reference.rank_and_size()[0])
    assert run.load().step == 1


def stream_twice(engine: fe.Engine, *_: Any) -> None:
    stream = fe.weight_stream(engine, pieces=True)
    for _ in range(2):
        evaluate(engine.model, 3 * reference.rank_and_size()[0])
        list(stream)


def save_atomically(engine: fe.Engine, _: Any, folder: str) -> None:
    with atomic_folder(Path(folder), engine):
        pass


# Calls one after the other, between which ranks evaluate.
CALLS: dict[str, list[Callable[[fe.Engine, torch.optim.Optimizer, str], Any]]] = {
    "a collective of the user's": [lambda engine, *_: sum_of_ranks(engine)],
    "functions of parameters": [lambda engine, *_: norms_and_full_tensors(engine)],
    "start_param_sync": [lambda engine, *_: engine.start_param_sync()],
    "start_param_sync(wait=True)": [lambda engine, *_: engine.start_param_sync(wait=True)],
    "full_state_dict": [lambda engine, *_: engine.full_state_dict()],
    "clip_grad_norm_": [lambda engine, *_: engine.clip_grad_norm_(1.0)],
    "save_checkpoint": [
        lambda engine, optimizer, folder: fe.save_checkpoint(folder, engine, optimizer),
        lambda engine, optimizer, folder: fe.load_checkpoint(folder, engine, optimizer),
    ],
    "Checkpointer": [save_a_run],
    "weight_stream": [
        lambda engine, *_: list(fe.weight_stream(engine)),
        lambda engine, *_: list(fe.weight_stream(engine, pieces=True)),
    ],
    "an iteration of a weight_stream": [stream_twice],
    "load_pretrained": [
        lambda engine, _, folder: fe.export_safetensors(engine, folder),
        lambda engine, _, folder: fe.load_pretrained(engine, folder),
    ],
    "save_folder": [
        lambda engine, optimizer, folder: save_folder(Path(folder), engine, [optimizer], {}),
        lambda engine, optimizer, folder: load_folder(Path(folder), engine, [optimizer]),
    ],
    "atomic_folder": [save_atomically],
    "export_safetensors": [
        lambda engine, _, folder: fe.export_safetensors(engine, folder),
        lambda engine, _, folder: fe.load_safetensors(engine, folder),
    ],
}


@pytest.mark.parametrize("call", CALLS)
@on_few_ranks
def test_a_call_of_all_ranks_waits_for_those_that_evaluate(call: str) -> None:
    folder, model, (rank, _) = shared_folder(), maze.Maze(), reference.rank_and_size()
    engine = fe.shard(model, units="blocks.*")
    optimizer = torch.optim.AdamW(model.parameters())
    route = maze.plain(*range(1 + rank))
    with engine.together():
        update(maze.loss_of(model, rank, route), optimizer)
        maze.loss_of(model, rank, route).backward()
        evaluate(model, 1 + 4 * rank)
        for each in CALLS[call]:
            each(engine, optimizer, f"{folder}/one")
            evaluate(model, 4 - rank)
        optimizer.zero_grad()
        maze.loss_of(model, rank, route).backward()
        optimizer.step()


@on_ranks(2)
def test_a_generator_that_is_closed_within_the_context_leaves_it() -> None:
    rank, model, alone = dist.get_rank(), maze.Maze(), maze.Maze()
    engine = fe.shard(model, units="blocks.*")
    route = maze.plain(1, 3)

    def results() -> Iterator[Tensor]:
        with engine.together(), torch.no_grad():
            while True:
                yield model(maze.inputs(0), route)

    for step in range(3):
        for number, result in enumerate(results()):
            torch.testing.assert_close(result, alone(maze.inputs(0), route))
            if number == 2 + 3 * step * rank:
                break
    maze.loss_of(model, rank, maze.plain(0)).backward()
    assert all(param.grad is not None for param in model.head.parameters())


@on_ranks(2)
def test_a_backward_after_the_context_raises_on_all_ranks() -> None:
    rank, model = dist.get_rank(), maze.Maze()
    engine = fe.shard(model, units="blocks.*")
    for step in range(2):
        route = maze.plain(*range(rank + step))
        with engine.together():
            loss = maze.loss_of(model, 0, route)
        with pytest.raises(RuntimeError, match=r"expected it within engine\.together\(\)"):
            loss.backward()
        engine.reset()
        with engine.together():
            loss = maze.loss_of(model, 0, route)
        with engine.together():
            loss.backward()
        engine.zero_grad_buffer()
    with engine.together():
        maze.loss_of(model, 0, maze.plain(0))  # its backward does not come
    maze.loss_of(model, 0, maze.plain(0)).backward()


def test_a_rank_that_waits_in_vain_is_told_about_collectives_of_the_users() -> None:
    found = str(activity.failure("together()", [], RuntimeError("timed out")))
    assert "call engine.await_ranks() before collectives of your own" in found
