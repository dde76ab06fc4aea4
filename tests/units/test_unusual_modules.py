"""Modules with ``==`` of their own, and modules whose parameters cannot be replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.engine import engine_of
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.pool import on_few_ranks, on_ranks
from tests.units.refusals import refused

SIZE = 4


class Elementwise(nn.Linear):
    """A module with ``==`` like that of tensors: its result has no truth value."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("a comparison of modules by value")


def elementwise() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(Elementwise(SIZE, SIZE), Elementwise(SIZE, SIZE)) for _ in range(2)]
    return nn.Sequential(*blocks, Elementwise(SIZE, SIZE))


def train(model: nn.Module) -> list[float]:
    return reference.losses_of_sgd(model, SIZE, num_steps=2)


@on_few_ranks
def test_modules_are_compared_by_identity() -> None:
    expected = train(elementwise())
    for level in LEVELS:
        model = elementwise()
        engine = fe.shard(model, strategy=level, options=fe.Options(min_unit_size=0))
        assert train(model) == pytest.approx(expected)
        assert engine_of(model[1]) is engine
        model.train().requires_grad_(True)
        model.float()
        model[2].extra = nn.Identity()


class WithScript(nn.Module):
    def __init__(self, script: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)])
        self.script = script

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.script(x)


@on_ranks(2)
def test_parameters_of_script_modules_are_refused_before_anything_is_changed() -> None:
    scripts = (
        torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE))),
        torch.jit.trace(nn.Sequential(nn.Linear(SIZE, SIZE)), torch.ones(1, SIZE)),
    )
    for script in scripts:
        for level in LEVELS:
            model, options = WithScript(script), fe.Options(min_unit_size=0)
            with refused(model, "script.0.weight: expected", "torch.jit.ScriptModule"):
                fe.shard(model, strategy=level, options=options)
    # A tied parameter, which a Python module has, too, on one rank only.
    model = WithScript(scripts[0])
    model.blocks[0].weight = scripts[0][0].weight if dist.get_rank() else model.blocks[0].weight
    with refused(model, "torch.jit.ScriptModule"):
        fe.shard(model)


@on_ranks(1)
def test_script_modules_without_parameters_are_sharded() -> None:
    model = WithScript(torch.jit.script(nn.Tanh()))
    fe.shard(model)
    train(model)
