"""torchao's optimizers with quantised state. What needs torchao itself trains in
``tests/programs/test_torchao.py``; here an optimizer of its making does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from tests.pool import on_few_ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Momentum(torch.optim.Optimizer):
    """SGD with a momentum that is a DTensor of its own where the parameter is one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = self._zeros(param)
                state["momentum"].mul_(0.9).add_(param.grad)
                param.add_(state["momentum"], alpha=-group["lr"])

    def _zeros(self, param: Tensor) -> Tensor:
        local = param.to_local() if isinstance(param, DTensor) else param
        made = torch.zeros_like(local)
        if not isinstance(param, DTensor):
            return made
        return DTensor.from_local(
            made,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )


Momentum.__module__ = "torchao.optim.adam"


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 3) -> None:
    for _ in range(num):
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", LEVELS)
@on_few_ranks
def test_it_steps_on_slices_and_is_refused_without(level: str) -> None:
    alone, model = (nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    steps(alone, Momentum(alone.parameters(), 0.01))
    engine = fe.shard(model, strategy=level)
    before = engine.full_state_dict()
    optimizer = Momentum(model.parameters(), 0.01)
    if any(isinstance(param, DTensor) for param in model.parameters()):
        with pytest.raises(RuntimeError, match=r"Momentum: expected fe.shard_optimizer"):
            steps(model, optimizer, 1)
        torch.testing.assert_close(engine.full_state_dict(), before, rtol=0, atol=0)
        assert not optimizer.state
        optimizer.zero_grad()
    fe.shard_optimizer(optimizer)
    steps(model, optimizer)
    torch.testing.assert_close(dict(engine.full_state_dict()), dict(alone.state_dict()))
