"""``engine.together()``: ranks run different numbers of forwards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.extensions.different_modules.maze import (
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
    encoded = [model.blocks[n % 2](inputs(1000 * seed + n)) for n in range(num)]
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
    rank, model, alone = dist.get_rank(), Maze(), Maze()
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
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    reference.assert_same_weights(model, alone, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("policy", [None, BF16], ids=["fp64", "bf16"])
@on_ranks(2)
def test_ranks_evaluate_different_numbers_of_batches(
    policy: fe.MixedPrecisionPolicy | None,
) -> None:
    for level in LEVEL_NAMES:
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
        expected = [model(inputs(number).float(), route) for number in range(3)]
        with engine.together():
            for number in range(1 + 2 * dist.get_rank()):
                assert torch.equal(model(inputs(number).float(), route), expected[number])
        assert torch.equal(model(inputs(0).float(), route), expected[0])


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
