"""``engine.together()``: ranks run different numbers of forwards, between calls of all ranks."""

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
from tests.extensions.different_modules.maze import (
    NUM_BLOCKS,
    UNITS,
    WIDTH,
    Maze,
    assert_same_gradients,
    assert_same_results,
    inputs,
    loss_of,
    plain,
)
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks
from tests.runtime.habits import Hidden

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@torch.no_grad()
def forwards(model: Maze, num: int, seed: int) -> list[Tensor]:
    """Each is of what a block returned that was called by itself."""
    encoded = [model.blocks[n % 2](inputs(1000 * seed + n, model)) for n in range(num)]
    return [model(x, plain(*range(n % 5))) for n, x in enumerate(encoded)]


def check(
    level: str,
    rounds: list[tuple[int, int]],
    *,
    policy: fe.MixedPrecisionPolicy | None = None,
    keeps: bool = False,
) -> None:
    """Trains, and evaluates in each round: by rank, the number of forwards.

    Args:
        keeps: Units are kept, and prefetched for a forward of all ranks.
    """
    dtype = torch.float64 if policy is None else torch.float32
    rank, model, alone = dist.get_rank(), Maze().to(dtype), Maze().to(dtype)
    engine = fe.shard(model, strategy=level, units=UNITS, mp_policy=policy)
    for unit in engine.units[1::2] if keeps else ():
        unit.options.keeps_after_backward = unit.options.keeps_after_forward = True
    optimizers = [reference.sgd(each.parameters()) for each in (model, alone)]
    tolerance = 1e-5 if policy is None else 5e-2
    for number, nums in enumerate(rounds):
        loss_of(model, 10 * number + rank, plain(0, 2, 3)).backward()
        losses = [loss_of(alone, 10 * number + each, plain(0, 2, 3)) for each in range(2)]
        torch.stack(losses).mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        if keeps:
            engine.start_param_sync()
        with engine.together():
            found = forwards(model, nums[rank], number)
        for ours, theirs in zip(found, forwards(alone, nums[rank], number), strict=True):
            torch.testing.assert_close(ours.to(dtype), theirs, rtol=tolerance, atol=tolerance)
    reference.assert_same_weights(model, alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_ranks_evaluate_different_numbers_of_batches(
    level: str, policy: fe.MixedPrecisionPolicy | None
) -> None:
    check(level, [(2, 5), (0, 2), (3, 1), (1, 0), (0, 0)], policy=policy)


@on_ranks(2)
def test_it_can_stand_between_any_two_steps_with_units_that_are_kept() -> None:
    check("optim_grads_params", [(0, 1)] * 3, keeps=True)


@on_few_ranks
def test_ranks_that_agree_and_one_rank_alone() -> None:
    model, route = Maze(), plain(0, 2)
    engine = fe.shard(model, units=UNITS, strategy="optim_grads_params")
    with engine.together(), torch.no_grad():
        assert_same_results(model, Maze(), 0, route)
    model(inputs(0), route).sum().backward()  # outside of it as ever


@on_ranks(2)
def test_weights_that_travel_in_fp8_are_those_of_forwards_without_it() -> None:
    model, route = Maze().float(), plain(0, 2)
    engine = fe.shard(model, units=UNITS, codec_rules=(fe.Float8(),))
    with torch.no_grad():
        expected = [model(inputs(number, model), route) for number in range(3)]
        with engine.together():
            for number in range(1 + 2 * dist.get_rank()):
                assert torch.equal(model(inputs(number, model), route), expected[number])
        assert torch.equal(model(inputs(0, model), route), expected[0])


# What forwards do with a block.
HABITS = {"calls": [(4, "plain")], "reads": [(4, "reads its weight")], "omits": []}


@pytest.mark.parametrize("trains_first", [False, True])
@pytest.mark.parametrize("there", HABITS)
@pytest.mark.parametrize("here", HABITS)
@on_ranks(2)
def test_training_learns_nothing_from_forwards_that_ranks_did_not_share(
    trains_first: bool, there: str, here: str
) -> None:
    model, alone = Maze(), Maze()
    engine = fe.shard(model, units=UNITS)
    for step in range(3):
        if step or trains_first:
            for each in (model, alone):
                each.zero_grad()
                loss_of(each, 0, [*plain(0), *HABITS[there]]).backward()
            assert_same_gradients(model, alone)
        with engine.together(), torch.no_grad():
            for number in range(2 * dist.get_rank()):
                assert_same_results(model, alone, number, [*plain(0), *HABITS[here]])


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
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
        each(inputs(0)).tensor.square().mean().backward()
        optimizer = reference.sgd(each.parameters())
        optimizer.step()
        optimizer.zero_grad()
    with engine.together(), torch.no_grad():
        for number in range(2 * dist.get_rank()):
            x = inputs(number)
            torch.testing.assert_close(model(x).tensor, alone(x).tensor)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs(5)).tensor, alone(inputs(5)).tensor)


@on_ranks(2)
def test_nesting_is_refused() -> None:
    for level in LEVEL_NAMES[1:]:
        model = Maze()
        engine = fe.shard(model, units=UNITS, strategy=level)
        with engine.together():
            with pytest.raises(RuntimeError, match="and no such context; found such a context"):
                engine.together().__enter__()
            engine.reset()  # changes nothing about the context
            with torch.no_grad():
                assert_same_results(model, Maze(), 0, plain(0))


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


def save_a_run(engine: fe.Engine, optimizer: torch.optim.Optimizer, folder: str) -> None:
    run = fe.Checkpointer(f"{folder}/run", engine, optimizer)
    for number, save in enumerate((run.save, run.save_async)):
        save(number)
        evaluate(engine.model, 3 * reference.rank_and_size()[0])
    assert run.load().step == 1


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
    "export_safetensors": [
        lambda engine, _, folder: fe.export_safetensors(engine, folder),
        lambda engine, _, folder: fe.load_safetensors(engine, folder),
    ],
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
        for each in CALLS[call]:
            each(engine, optimizer, f"{folder}/one")
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
