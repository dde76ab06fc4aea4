"""What torch promises of hooks on parameters, and of freezing them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import reference
from tests.promises.everywhere import Place, everywhere

WORDS = torch.tensor([0, 1, 2, 3, 6])


class Words(nn.Module):
    """An embedding and a head. Some rows of the embedding must not change."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, words: Tensor = WORDS) -> Tensor:
        return self.head(self.table(words).tanh())


def _steps(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@everywhere
def test_a_mask_on_a_gradient_is_applied_once_whenever_it_was_registered(place: Place) -> None:
    mask = torch.zeros(7, 1)
    mask[:2] = 1.0
    for is_before in (True, False):
        seen: list[Any] = []

        def hook(grad: Tensor, seen: list[Any] = seen) -> Tensor:
            seen.append(tuple(grad.shape))
            return grad * mask

        model = Words()
        alone = copy.deepcopy(model)
        if not is_before:
            place.shard(model)
        handles = [each.table.weight.register_hook(hook) for each in (model, alone)]
        if is_before:
            place.shard(model)
        for each in (model, alone):
            _steps(each)
        reference.assert_same_weights(model, alone)
        assert seen == [(7, 3)] * 4
        handles[0].remove()
        _steps(model)
        assert len(seen) == 4


@everywhere
def test_an_optimizer_may_step_in_a_hook_of_its_parameter(place: Place) -> None:
    for is_before in (True, False):
        model = Words()
        alone = copy.deepcopy(model)
        if not is_before:
            place.shard(model)
        for each in (model, alone):
            optimizers: dict[int, Any] = {}

            def step(param: Any, optimizers: dict[int, Any] = optimizers) -> None:
                if id(param) not in optimizers:
                    optimizers[id(param)] = torch.optim.SGD([param], lr=0.5, momentum=0.9)
                optimizers[id(param)].step()
                param.grad = None

            for param in each.parameters():
                param.register_post_accumulate_grad_hook(step)
        if is_before:
            place.shard(model)
        for each in (model, alone):
            for _ in range(3):
                each().square().mean().backward()
                assert all(param.grad is None for param in each.parameters())
        reference.assert_same_weights(model, alone)


@everywhere
def test_a_parameter_that_was_frozen_at_shard_says_so_when_it_is_thawed(place: Place) -> None:
    model = Words()
    model.table.weight.requires_grad_(False)
    place.shard(model)
    model().sum().backward()
    model.table.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=re.escape("expected table.weight to stay frozen")):
        model()
    model.table.weight.requires_grad_(False)
    model.zero_grad()
    model().sum().backward()
