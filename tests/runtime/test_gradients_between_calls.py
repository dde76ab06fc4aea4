"""Gradients of programs that change parameters or ``.grad`` between calls, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.pool import Ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
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


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def _difference(program: Program, level: str, arguments: dict[str, Any]) -> float:
    """Of gradients, from those of one process on all ranks' data; inf: None on one side only."""
    alone, model = _model(), _model()
    engine = fe.shard(model, strategy=level, min_unit_size=0, **arguments)
    world, rank = dist.get_world_size(), dist.get_rank()

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4 * world, 6, generator=generator)

    program(alone, lambda step: alone(batch(step)).square().mean(), lambda: None)
    local = lambda step: model(batch(step).chunk(world)[rank]).square().mean()  # noqa: E731
    program(model, local, engine.reset)
    differences = [0.0]
    for expected, param in zip(alone.parameters(), model.parameters(), strict=True):
        if (expected.grad is None) != (param.grad is None):
            return float("inf")
        if param.grad is not None and expected.grad is not None:
            found = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
            differences.append((found - expected.grad).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_one_process(
    ranks: Ranks, program: Program, world_size: int, level: str
) -> None:
    assert max(ranks.run(_difference, program, level, {}, world_size=world_size)) < 2e-6


@pytest.mark.parametrize("program", [hooked, all_hooked, zeroed_and_reset])
def test_so_they_are_with_sums_in_bf16(ranks: Ranks, program: Program) -> None:
    policy = {"mp_policy": fe.MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)}
    for level in LEVELS:
        assert max(ranks.run(_difference, program, level, policy, world_size=2)) < 3e-2
