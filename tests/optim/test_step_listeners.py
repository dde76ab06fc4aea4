"""Listeners of optimizer steps."""

from __future__ import annotations

import torch

from fsdp_engine.optim.step_listeners import add_step_listener


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
