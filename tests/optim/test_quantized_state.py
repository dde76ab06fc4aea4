"""torchao's optimizers with quantised state. What needs torchao itself trains in
``tests/programs/test_torchao.py``; here optimizers of its making do the same."""

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


class Codes(torch.Tensor):
    """Codes and a scale for each block of 4; the map of codes is from -0.5 to 1, by 0.5."""

    block_size = 4

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale
        self.qmap = torch.tensor([-0.5, 0.0, 0.5, 1.0])

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    def dequantize(self) -> Any:
        blocks = self.qmap[self.codes.long()].view(-1, self.block_size)
        return (blocks * self.scale.unsqueeze(1)).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            blocks = args[1].reshape(-1, cls.block_size)
            args[0].scale.copy_(blocks.abs().amax(1))
            scaled = blocks / args[0].scale.clamp(min=1e-12).unsqueeze(1)
            distance = (scaled.unsqueeze(2) - args[0].qmap).abs()
            args[0].codes.copy_(distance.argmin(2).view(args[0].codes.shape))
            return args[0]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class MomentumOfCodes(Momentum):
    """Its momentum is quantised, where there are whole blocks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"] = self._new_buffer(param, True)
                held = state["exp_avg"]
                value = held.dequantize() if isinstance(held, Codes) else held
                value = 0.9 * value + param.grad
                held.copy_(value)
                param.add_(value, alpha=-group["lr"])

    def _new_buffer(self, local: Tensor, signed: bool) -> Tensor:
        assert signed
        if not local.numel() or local.numel() % Codes.block_size:
            return torch.zeros_like(local)
        codes = torch.ones(local.shape, dtype=torch.int8)
        made: Tensor = Codes(codes, torch.zeros(local.numel() // Codes.block_size))
        return made


MomentumOfCodes.__module__ = "torchao.optim.adam"


@pytest.mark.parametrize("how", ["own", "whole"])
@pytest.mark.parametrize("level", LEVELS)
@on_few_ranks
def test_state_dicts_have_values_and_loading_finds_the_codes_again(level: str, how: str) -> None:
    def build() -> tuple[nn.Module, fe.Engine, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4, bias=False))
        engine = fe.shard(model, strategy=level)
        return model, engine, fe.shard_optimizer(MomentumOfCodes(model.parameters(), 0.01))

    model, engine, optimizer = build()
    again, engine_again, optimizer_again = build()
    steps(model, optimizer)
    again.load_state_dict(model.state_dict())
    saved = optimizer.state_dict()
    codes = _locals(optimizer.state)
    assert any(isinstance(each, Codes) for each in codes)
    assert not any(isinstance(each, Codes) for each in _locals(saved["state"]))
    for param, state in zip(optimizer.state, saved["state"].values(), strict=True):
        held, value = optimizer.state[param]["exp_avg"], state["exp_avg"]
        if isinstance(held, DTensor):
            assert torch.equal(held.full_tensor(), value.full_tensor())
    if how == "whole":
        for state in saved["state"].values():
            if isinstance(state["exp_avg"], DTensor):
                state["exp_avg"] = state["exp_avg"].full_tensor()
    optimizer_again.load_state_dict(saved)
    for one, other in zip(codes, _locals(optimizer_again.state), strict=True):
        assert isinstance(one, Codes) == isinstance(other, Codes)
        if isinstance(one, Codes):
            assert torch.equal(one.codes, other.codes)
            torch.testing.assert_close(other.scale, one.scale)
    steps(model, optimizer)
    steps(again, optimizer_again)
    torch.testing.assert_close(engine_again.full_state_dict(), engine.full_state_dict())


def _locals(states: Any) -> list[Any]:
    """The momentum of each parameter, or its slice."""
    values = [state["exp_avg"] for state in states.values()]
    return [getattr(value, "_local_tensor", value) for value in values]
