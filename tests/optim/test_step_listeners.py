"""Listeners of optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.optim.step_listeners import add_step_listener
from tests.pool import on_ranks


class _Listener:
    def __init__(self, number: int, called: list[int]) -> None:
        self._number, self._called = number, called

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self._called.append(self._number)


def test_listeners_are_called_in_the_order_in_which_they_were_registered() -> None:
    called: list[int] = []
    listeners = [_Listener(number, called) for number in range(64)]
    for listener in listeners:
        add_step_listener(listener)
    del listeners[10:20]
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()
    assert called == [*range(10), *range(20, 63), 63]


@on_ranks(2)
def test_gradients_and_rates_that_a_later_hook_sets_are_used() -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.grad = param.grad / 2
        optimizer.param_groups[0]["lr"] = 0.7

    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        if shards:
            fe.shard(model, None, "optim_grads_params", options=fe.Options(min_unit_size=0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if shards:
            fe.shard_optimizer(optimizer)
        optimizer.register_step_pre_hook(halve)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        found.append([getattr(p, "full_tensor", p.detach)() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
