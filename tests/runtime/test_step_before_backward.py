"""An optimizer step between a forward and its backward.

The weights of the forward no longer exist, so autograd refuses a backward that reads a changed one,
as it does for a plain model. A backward that reads unchanged weights is right.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.pool import on_ranks

CHANGED = "modified by an inplace operation"
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class TwoHeads(nn.Module):
    """A trunk with two heads, all in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x).tanh()
        return self.a(x).square().mean(), self.b(x).square().mean()


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    return nn.Sequential(*layers)


def shard(model: nn.Module, level: str, policy: fe.MixedPrecisionPolicy | None) -> fe.Engine:
    options = fe.Options(min_unit_size=0)
    return fe.shard(model, strategy=level, units="*", mp_policy=policy, options=options)


def batch() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@on_ranks(2)
def test_a_backward_that_reads_a_changed_weight_is_refused() -> None:
    for level in LEVELS:
        for policy in (None, BF16):
            for kind in (torch.optim.SGD, torch.optim.AdamW):
                model = chain()
                engine = shard(model, level, policy)
                optimizer = kind(model[4].parameters(), lr=0.1)
                if kind is torch.optim.SGD:  # clears gradients before the engine's own hook
                    optimizer.register_step_post_hook(lambda each, *args: each.zero_grad())
                late = model(batch()).square().mean()
                model(batch()).square().mean().backward()
                optimizer.step()
                with pytest.raises(RuntimeError, match=CHANGED):
                    late.backward()
                engine.reset()
                for param in model.parameters():
                    param.grad = None
                model(batch()).square().mean().backward()
                optimizer.step()


@on_ranks(2)
def test_a_second_backward_of_a_retained_graph_is_refused_after_a_step() -> None:
    for level in LEVELS:
        model = chain()
        shard(model, level, None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(batch()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match=CHANGED):
            loss.backward()


def train_heads_in_turn(model: nn.Module) -> list[Tensor]:
    """Each step changes head a before the backward of head b, which does not read head a."""
    of_a = torch.optim.SGD(model.a.parameters(), lr=0.1)
    of_others = torch.optim.SGD([*model.trunk.parameters(), *model.b.parameters()], lr=0.1)
    losses = []
    for _ in range(3):
        loss_a, loss_b = model(batch())
        loss_a.backward(retain_graph=True)
        of_a.step()
        loss_b.backward()
        of_others.step()
        of_a.zero_grad()
        of_others.zero_grad()
        losses += [loss_a.detach(), loss_b.detach()]
    return losses


@on_ranks(2)
def test_a_backward_that_reads_unchanged_weights_of_the_unit_is_right() -> None:
    torch.manual_seed(0)
    expected = train_heads_in_turn(TwoHeads())
    for level in LEVELS:
        torch.manual_seed(0)
        model = TwoHeads()
        fe.shard(model, strategy=level)
        torch.testing.assert_close(train_heads_in_turn(model), expected)


@on_ranks(2)
def test_a_graph_without_a_backward_does_not_disturb_steps() -> None:
    found = {}
    for keeps in (False, True):
        model = chain()
        shard(model, "optim_grads_params", None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses, kept = [], []
        for _ in range(4):
            if keeps:
                kept.append(model(batch()))
            loss = model(batch()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[keeps] = losses
    assert found[True] == found[False]


class StepsInForward(nn.Module):
    """A model whose forward trains, such as one whose ``forward`` is a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        for _ in range(2):
            loss = self.linear(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_a_step_within_a_forward_is_right_or_a_warning(level: str) -> None:
    torch.manual_seed(0)
    plain = StepsInForward()
    model = copy.deepcopy(plain)
    fe.shard(model, strategy=level)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (plain, model)]
    batch = torch.ones(2, 8)
    expected = plain(batch, optimizers[0])
    if level == "no_shard":
        assert torch.equal(model(batch, optimizers[1]), expected)
        return
    # At the other levels the step changes this rank's part of the full weights.
    error: Any = pytest.raises(ValueError, match="weights that a module wrote in forward")
    found = nullcontext() if level == "optim_grads_params" else error
    with pytest.warns(UserWarning, match="expected that no forward is running; found"), found:
        model(batch, optimizers[1])
