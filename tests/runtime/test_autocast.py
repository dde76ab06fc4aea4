"""Several forwards within one ``torch.autocast``, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.models import Chain, Mlp, vector_batch
from tests.pool import on_ranks
from tests.reference import full, relative_error

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def two_microbatches(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with autocast():
        loss(0).backward()
        loss(1).backward()


def two_forwards_then_backwards(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with autocast():
        losses = [loss(0), loss(1)]
        for each in losses:
            each.backward()


def evaluated_before(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with autocast():
        with torch.no_grad():
            loss(0)
        loss(1).backward()


def evaluated_between(model: nn.Module, loss: Callable[[int], Tensor]) -> None:
    with autocast():
        value = loss(0)
        with torch.no_grad():
            loss(1)
        value.backward()
        loss(2).backward()


def recomputed(model: Any, loss: Callable[[int], Tensor]) -> None:
    for block in model.blocks:
        forward = block.forward

        def again(x: Tensor, forward: Any = forward) -> Any:
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)

        block.forward = again
    two_microbatches(model, loss)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "program",
    [
        two_microbatches,
        two_forwards_then_backwards,
        evaluated_before,
        evaluated_between,
        recomputed,
    ],
    ids=lambda program: program.__name__,
)
@on_ranks(2)
def test_gradients_are_those_of_one_process(program: Any, level: str) -> None:
    alone = Chain(Mlp(), Mlp())
    model = copy.deepcopy(alone)
    fe.shard(model, strategy=level, min_unit_size=0)

    def part(number: int) -> tuple[Tensor, ...]:
        rank = dist.get_rank()
        return tuple(each.chunk(2)[rank] for each in vector_batch(8, number))

    program(alone, lambda number: alone(*vector_batch(8, number)).float())
    program(model, lambda number: model(*part(number)).float())
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert relative_error(full(mine.grad), theirs.grad) < 2e-2


@pytest.mark.parametrize("level", LEVELS)
@on_ranks(2)
def test_weights_are_cast_anew_after_a_step(level: str) -> None:
    model = Chain(Mlp(), Mlp())
    fe.shard(model, strategy=level, min_unit_size=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = vector_batch(4, 1)
    with autocast():
        losses = []
        for _ in range(3):
            loss = model(*batch).float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
