"""Gradients of programs that change parameters, ``.grad`` or the mode between calls, against plain
torch: also of several forwards within one ``torch.autocast``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import Chain, Mlp, vector_batch
from tests.pool import Ranks, on_ranks
from tests.reference import full, relative_error

Program = Callable[[nn.Module, Callable[[int], Tensor], Callable[[], None]], None]


def frozen_and_thawed(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """A reference forward with frozen adapters between forward and backward."""
    for step in range(2):
        model.zero_grad()
        value = loss(step)
        model[0].requires_grad_(False)
        with torch.no_grad():
            loss(step + 1)
        model[0].requires_grad_(True)
        value.backward()


def thawed_in_time(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """Frozen between two microbatches, thawed before both of their backwards."""
    first = loss(0)
    model.requires_grad_(False)
    with torch.no_grad():
        loss(1)
    model.requires_grad_(True)
    second = loss(2)
    (first + second).backward()


def frozen_at_backward(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """Parameters that are frozen when backward runs get no gradient."""
    value = loss(0)
    model[0].requires_grad_(False)
    value.backward()
    model[0].requires_grad_(True)


def zeroed_and_reset(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    loss(0).backward()
    model.zero_grad(set_to_none=False)
    reset()
    for step in (1, 2, 3):
        loss(step).backward()


def zeroed_and_made_none(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    loss(0).backward()
    model.zero_grad(set_to_none=False)
    model.zero_grad()
    for step in (1, 2, 3):
        loss(step).backward()


def hooked(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """A hook on a gradient sees the new gradient alone."""
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[2].bias.register_hook(lambda grad: grad * 3)
    for step in range(4):
        loss(step).backward()
    model.zero_grad()
    for step in range(2):
        loss(step).backward()
    model.zero_grad(set_to_none=False)
    for step in range(2):
        loss(step).backward()


def all_hooked(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for step in range(3):
        loss(step).backward()


def hooked_with_penalty(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """The gradient of a penalty on a parameter is part of what the hook sees."""
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    for step in range(3):
        (loss(step) + model[0].weight.square().sum()).backward()


def hooked_on_given_gradient(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    """A gradient that the user has put there is added to, and no hook sees it."""
    model[0].weight.register_hook(lambda grad: grad * 0.5)
    loss(0).backward()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    loss(1).backward()


# Within ``torch.autocast``, whose cache of casted weights outlives a forward.


def two_microbatches(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    for step in range(2):
        loss(step).backward()


def two_forwards_then_backwards(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    losses = [loss(0), loss(1)]
    for each in losses:
        each.backward()


def evaluated_before_and_between(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    with torch.no_grad():
        loss(0)
    value = loss(1)
    with torch.no_grad():
        loss(2)
    value.backward()
    loss(3).backward()


def recomputed(model: Any, loss: Callable[[int], Tensor], reset: Any) -> None:
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    two_microbatches(model, loss, reset)


PROGRAMS = [
    frozen_and_thawed,
    thawed_in_time,
    frozen_at_backward,
    zeroed_and_reset,
    zeroed_and_made_none,
    hooked,
    all_hooked,
    hooked_with_penalty,
    hooked_on_given_gradient,
]
WITH_AUTOCAST = [
    two_microbatches,
    two_forwards_then_backwards,
    evaluated_before_and_between,
    recomputed,
]


def worst_error(program: Program, policy: fe.MixedPrecisionPolicy | None) -> float:
    """The worst difference of a gradient from that of one process, over levels: absolute, or
    relative to the largest element within autocast; inf: None on one side only."""
    autocast = program in WITH_AUTOCAST
    world, rank = dist.get_world_size(), dist.get_rank()
    errors = [0.0]
    for level in LEVELS:
        models: list[nn.Module] = []
        for _ in range(2):
            torch.manual_seed(0)
            plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
            models.append(Chain(Mlp(), Mlp()) if autocast else plain)
        alone, model = models
        engine = fe.shard(model, strategy=level, mp_policy=policy)

        def loss_of(model: nn.Module, step: int, parts: int, part: int) -> Tensor:
            if autocast:
                x, y = (each.chunk(parts)[part] for each in vector_batch(4 * world, step))
                return model(x, y).float()
            generator = torch.Generator().manual_seed(step)
            rows = torch.randn(4 * world, 6, generator=generator)
            return model(rows.chunk(parts)[part]).square().mean()

        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            program(alone, lambda step, m=alone: loss_of(m, step, 1, 0), lambda: None)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            program(model, lambda step, m=model: loss_of(m, step, world, rank), engine.reset)
        for expected, param in zip(alone.parameters(), model.parameters(), strict=True):
            if (expected.grad is None) != (param.grad is None):
                return float("inf")
            if param.grad is not None and expected.grad is not None:
                found = full(param.grad)
                error = relative_error(found, expected.grad)
                scale = 1 if autocast else expected.grad.abs().max().item() or 1
                errors.append(error * scale)
    return max(errors)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_one_process(
    ranks: Ranks, program: Program, world_size: int
) -> None:
    assert max(ranks.run(worst_error, program, None, world_size=world_size)) < 2e-6


@pytest.mark.parametrize("program", WITH_AUTOCAST, ids=lambda program: program.__name__)
def test_within_autocast_they_are_too(ranks: Ranks, program: Program) -> None:
    assert max(ranks.run(worst_error, program, None, world_size=2)) < 2e-2


@pytest.mark.parametrize("program", [hooked, all_hooked, zeroed_and_reset])
def test_so_they_are_with_sums_in_bf16(ranks: Ranks, program: Program) -> None:
    policy = fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)
    assert max(ranks.run(worst_error, program, policy, world_size=2)) < 3e-2


@on_ranks(2)
def test_autocast_casts_weights_anew_after_a_step() -> None:
    for level in LEVELS:
        model = Chain(Mlp(), Mlp())
        fe.shard(model, strategy=level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = vector_batch(4, 1)
        with torch.autocast("cpu", torch.bfloat16):
            losses = []
            for _ in range(3):
                loss = model(*batch).float()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[2] < losses[1] < losses[0]
