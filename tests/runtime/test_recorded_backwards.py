"""Graphs of a backward with ``create_graph`` that outlive the next backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.runtime.unit import State
from tests import reference
from tests.pool import on_few_ranks, on_ranks


class Scaled(nn.Module):
    """Elementwise weights and a norm, whose derivatives read freed weights without a check."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)) * self.scale) + x


def gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the model's sum with respect to its input, with a graph, and the input."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return found, x


def backward_twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
    penalty = gradient(model, x)[0].square().mean()
    penalty.backward(retain_graph=True)
    penalty.backward()


def third_order(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, x = gradient(model, x)
    (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
    (first * second).mean().backward()


def two_penalties(model: nn.Module, x: Tensor, y: Tensor) -> None:
    penalties = [gradient(model, each)[0].square().mean() for each in (x, y)]
    for penalty in penalties:
        penalty.backward()


def loss_before_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    penalty = gradient(model, x)[0].square().mean()
    model(y).mean().backward()
    penalty.backward()


def dropped_penalty(model: nn.Module, x: Tensor, y: Tensor) -> None:
    gradient(model, x)
    model(y).mean().backward()


PROGRAMS: list[Callable[..., Any]] = [
    *(backward_twice, third_order, two_penalties, loss_before_penalty, dropped_penalty)
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("level", ["optim_grads", "optim_grads_params"])
@on_few_ranks
def test_weights_are_kept_while_a_recorded_backward_can_run(
    program: Callable[..., Any], level: str
) -> None:
    rank, size = reference.rank_and_size()
    torch.manual_seed(0)
    plain = nn.Sequential(*(Scaled() for _ in range(3))).double()
    model = nn.Sequential(*(Scaled() for _ in range(3))).double()
    model.load_state_dict(plain.state_dict())
    engine = fe.shard(model, strategy=level, units=[Scaled])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, size, 4, 6, dtype=torch.float64)
    for _ in range(2):
        for each in range(size):
            program(plain, x[each], y[each])
        program(model, x[rank], y[rank])
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(mine.grad, fe.FlatDTensor)
            assert other.grad is not None
            torch.testing.assert_close(mine.grad.full_tensor() * size, other.grad)
        model.zero_grad()
        optimizer.step()
        if level == "optim_grads_params":
            assert {unit.state for unit in engine.units if unit.reshards} == {State.SHARDED}
        plain.zero_grad()


@on_ranks(2)
def test_a_graph_that_one_rank_keeps_does_not_change_what_is_gathered() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(3)))
    engine = fe.shard(model, strategy="optim_grads_params", units=[Scaled], initial_values="rank0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = []
    for number in range(4):
        x = torch.randn(4, 6).requires_grad_()
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        if reference.rank_and_size()[0] == 0:
            kept.append(force)
        del force
        energy.backward()
        if number % 2:
            optimizer.step()
            assert {unit.state for unit in engine.units if unit.reshards} == {State.SHARDED}
        with torch.no_grad():
            model(x)
        model.zero_grad()
