"""Modules that return their own parameters, or views of them, to callers outside their unit.

A caller that read freed memory would end the process, so every test here is one of ranks in
processes of the pool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests import reference
from tests.megatron.configs import LEVEL_NAMES
from tests.models import DIM, vector_batch
from tests.pool import on_few_ranks, on_ranks
from tests.scenario import assert_trains_alike


class Skips(nn.Module):
    """Leaves its bias to the caller, as Megatron-Core's layers do with ``skip_bias_add``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight.t(), self.bias


class Views(Skips):
    """Returns views: of one row, transposed, expanded, detached."""

    def forward(self, x: Tensor) -> Any:
        return {
            "out": x @ self.weight.t(),
            "all": [self.bias, self.weight[0], self.weight.t(), self.bias.expand(len(x), -1)],
            "still": self.weight.detach(),
        }


def combine(found: Any) -> Tensor:
    """What a caller does with outputs of :class:`Skips` or :class:`Views`; its backward reads
    the parameters, too."""
    if isinstance(found, tuple):
        x, bias = found
        return torch.tanh(x + bias) * bias
    bias, row, turned, rows = found["all"]
    return torch.tanh((found["out"] + rows) * row * bias) @ turned + found["still"].mean()


class Model(nn.Module):
    """Blocks whose parameters it reads; a table of which it gets all at once."""

    def __init__(self, block: Callable[[], nn.Module], reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.last = Skips()
        self.head = nn.Linear(DIM, vector_batch(1, 0)[1].shape[-1])
        self.reentrant = reentrant

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = combine(block(x))
        return combine(self.last(x))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.reentrant is None:
            features = self.features(x)
        else:
            x = x.requires_grad_()
            features = checkpoint(self.features, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return F.mse_loss(self.head(features), target)


class Table(nn.Module):
    """A unit whose forward returns its only parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self) -> Tensor:
        return self.weight


class WithTable(Model):
    """Reads a table twice, and returns the parameter that a unit returned from itself."""

    def __init__(self) -> None:
        super().__init__(Skips)
        self.tables = nn.ModuleList([Table()])

    def features(self, x: Tensor) -> Tensor:
        x = x @ self.tables[0]()
        return super().features(x) @ self.tables[0]()


class Keeps(Skips):
    """Puts its bias, and a view of its weight, into what it was given."""

    def forward(self, x: Tensor, biases: list[Tensor], *, views: dict[str, Any]) -> Tensor:
        biases.append(self.bias)
        views["turned"] = [self.weight.t()]
        return x @ self.weight.t()


class WithContainers(Model):
    """Reads what blocks have put into containers, after all blocks have run."""

    def __init__(self) -> None:
        super().__init__(Keeps)

    def features(self, x: Tensor) -> Tensor:
        biases: list[Tensor] = []
        views: dict[str, Any] = {}
        for block in self.blocks:
            x = block(x, biases, views=views)
        x = torch.tanh(x + biases[0]) * biases[1].sum() @ views["turned"][0]
        return combine(self.last(x))


MODELS: dict[str, Callable[[], Model]] = {
    "parameter": lambda: Model(Skips),
    "views": lambda: Model(Views),
    "table": WithTable,
    "containers": WithContainers,
    "checkpointed": lambda: Model(Views, reentrant=False),
    "reentrant": lambda: Model(Skips, reentrant=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", LEVEL_NAMES)
@on_ranks(2)
def test_callers_read_parameters_that_units_return(strategy: str, name: str) -> None:
    torch.manual_seed(0)
    assert_trains_alike(MODELS[name](), vector_batch, strategy)


@pytest.mark.parametrize("name", ["parameter", "views", "table", "containers"])
@on_few_ranks
def test_without_autograd_callers_read_them_too(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    alone = copy.deepcopy(model)
    engine = fe.shard(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            batch = vector_batch(2, 0)
            torch.testing.assert_close(model(*batch), alone(*batch))
    assert not any(unit.reshards and unit.unsharded and unit.name for unit in engine.units)


@pytest.mark.parametrize("reshard", [True, False])
@on_few_ranks
def test_callers_read_them_under_fully_shard(reshard: bool) -> None:
    torch.manual_seed(0)
    model = Model(Views)
    alone = copy.deepcopy(model)
    for block in [*model.blocks, model.last]:
        fsdp2.fully_shard(block, reshard_after_forward=reshard)
    fsdp2.fully_shard(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for step in range(2):
        batch = vector_batch(2, step)
        losses = [each(*batch) for each in (model, alone)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(*losses)
    reference.assert_same_weights(model, alone, rtol=1e-4, atol=1e-5)


class Root(Skips):
    """The model itself returns its parameters."""


@on_ranks(2)
def test_a_parameter_that_the_model_returns_can_be_read_after_backward() -> None:
    torch.manual_seed(0)
    model = Root()
    bias = model.bias.detach().clone()
    engine = fe.shard(model)
    out, found = model(torch.ones(2, DIM))
    out.sum().backward()
    assert all(unit.unsharded is None for unit in engine.units if unit.reshards)
    torch.testing.assert_close(found.detach(), bias)


@pytest.mark.parametrize("strategy", LEVEL_NAMES[1:])
@on_ranks(2)
def test_returned_parameters_gather_no_hooks_over_steps(strategy: str) -> None:
    model = Model(Skips)
    engine = fe.shard(model, strategy=strategy)
    for step in range(3):
        model(*vector_batch(2, step)).backward()
    full = [param for unit in engine.units for b in unit.buffers for param in b.full_params]
    assert [len(param._backward_hooks or ()) for param in full] == [0] * len(full)


@on_ranks(2)
def test_other_outputs_are_returned_as_they_are() -> None:
    class Returns(Skips):
        def forward(self, x: Tensor) -> Any:
            self.made = x @ self.weight.t(), torch.eye(2).to_sparse(), [x.detach()]
            return self.made

    model = Returns()
    fe.shard(model)
    assert model(torch.ones(2, DIM)) is model.made
