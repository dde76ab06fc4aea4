"""Elementwise optimizers, and how much of their state is on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fsdp_engine.memory.allocator import TransientStorage

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Adam-amsgrad": lambda p, **k: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, **k),
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.1, **k),
    "SGD-momentum": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, centered=True, momentum=0.5, **k),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
}
# The optimizers above that take `fused=True`.
FUSED = {"AdamW", "Adam-amsgrad", "SGD", "SGD-momentum", "Adagrad"}


class Lion(torch.optim.Optimizer):
    """Imitates an optimizer of another package: it counts steps in its groups and in an attribute,
    and replaces its state tensors."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.get("average", torch.zeros_like(p))
                p.add_(torch.sign(0.9 * average + 0.1 * p.grad), alpha=-group["lr"] / group["k"])
                state["average"] = 0.99 * average + 0.01 * p.grad
        return loss


MAKERS: dict[str, Callable[..., Any]] = {
    **OPTIMIZERS,
    "AdamW-fused": lambda p, **k: torch.optim.AdamW(p, fused=True, **k),
    "Lion": Lion,
}


@contextmanager
def counting_chunks() -> Iterator[list[int]]:
    """Number of chunks on the device, after each one that is filled or freed."""
    counts = [0]

    def counted(method: Callable[[TransientStorage], None]) -> Callable[[TransientStorage], None]:
        def call(self: TransientStorage) -> None:
            before = self.filled
            method(self)
            if self._role == "optimizer" and self.num_bytes and before != self.filled:
                counts.append(counts[-1] + self.filled - before)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fill", "free"):
            patch.setattr(TransientStorage, name, counted(getattr(TransientStorage, name)))
        yield counts
    assert counts[-1] == 0
