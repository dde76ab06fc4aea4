"""Optimizer state of an unsharded model, which is loaded into optimizers of sharded parameters."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.pool import on_few_ranks, on_ranks

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Scaled(nn.Module):
    """Has a scalar parameter, whose state has the same shape as the optimizer's step counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).square().mean() * self.scale
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_full_state_of_an_unsharded_model_is_sharded_when_it_is_loaded(kind: str) -> None:
    torch.manual_seed(0)
    plain = Scaled()
    expected = OPTIMIZERS[kind](plain.parameters())
    for seed in range(2):
        step(plain, expected, seed)
    saved = [plain.state_dict(), expected.state_dict()]
    saved = torch.utils._pytree.tree_map_only(Tensor, torch.clone, saved)
    for seed in range(2, 5):
        step(plain, expected, seed)
    for level in LEVELS:
        for was_stepped in (False, True):
            model = Scaled()
            fe.shard(model, strategy=level, initial_values="rank0")
            optimizer = OPTIMIZERS[kind](model.parameters())
            if was_stepped:
                step(model, optimizer, 9)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(
                torch.utils._pytree.tree_map_only(Tensor, torch.clone, saved[1])
            )
            for seed in range(2, 5):
                step(model, optimizer, seed)
            for name, value in reference.full_weights(model).items():
                torch.testing.assert_close(value, plain.state_dict()[name])
            for param, state in optimizer.state.items():
                for value in state.values():
                    if isinstance(value, Tensor) and value.ndim:
                        assert type(value) is type(param.detach()), (level, was_stepped)


@on_ranks(4)
def test_state_of_other_slices_is_refused_on_each_rank() -> None:
    """Ranks 0 and 3 hold no element of either weight: only slices of ranks 1 and 2 differ."""
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "qkv"})
    fe.shard(model, initial_values="rank0")
    saved, loaded = (fe.shard_optimizer(torch.optim.AdamW([model[name].weight])) for name in "qk")
    for name, optimizer in (("q", saved), ("k", loaded)):
        model[name].weight.grad = torch.ones_like(model[name].weight)
        optimizer.step()
    loaded.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"state 'exp_avg' of k\.weight: expected elements"):
        loaded.step()


class Wrapper(torch.optim.Optimizer):
    """Does not call ``Optimizer.__init__``. PCGrad of pytorch_optimizer is such a wrapper."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.defaults = optimizer.defaults
        self._patch_step_function()

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@on_few_ranks
def test_an_optimizer_without_a_state_of_its_own_steps_the_one_that_it_wraps() -> None:
    torch.manual_seed(0)
    plain = Scaled()
    expected = Wrapper(OPTIMIZERS["adamw"](plain.parameters()))
    step(plain, expected, 0)
    saved = copy.deepcopy([plain.state_dict(), expected.optimizer.state_dict()])
    for seed in range(1, 3):
        step(plain, expected, seed)
    for level in LEVELS:
        fe.shard(model := Scaled(), strategy=level, initial_values="rank0")
        optimizer = Wrapper(OPTIMIZERS["adamw"](model.parameters()))
        model.load_state_dict(saved[0])
        optimizer.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        for seed in range(1, 3):
            step(model, optimizer, seed)
        for name, value in reference.full_weights(model).items():
            torch.testing.assert_close(value, plain.state_dict()[name])
