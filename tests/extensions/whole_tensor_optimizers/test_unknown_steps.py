"""Optimizers whose step is not known, on sharded parameters without an engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_engine.optim import shard_optimizer
from tests.optim.pair import Counting, Pair, mesh_in_name_only, step_both


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with mesh_in_name_only() as made:
        yield made


class Centralised(torch.optim.SGD):
    """Subtracts means of rows, as gradient centralisation does, in a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.grad -= param.grad.mean(-1, keepdim=True)
        return super().step(closure)


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no step")


BEYOND_AN_ELEMENT = r"since .* steps whole tensors; found a ten"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        *((kind, BEYOND_AN_ELEMENT) for kind in (Centralised, Counting)),
        *((kind, BEYOND_AN_ELEMENT) for kind in (torch.optim.LBFGS, torch.optim.Adafactor)),
        (Raising, r"Raising raises ZeroDivisionError: no step\. Pass elementw"),
    ],
)
def test_a_step_that_is_not_elementwise_is_refused_without_an_engine(
    mesh: DeviceMesh, kind: Any, problem: str
) -> None:
    pair = Pair(mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match=problem):
            shard_optimizer(kind(pair.flat))
    if issubclass(kind, torch.optim.SGD):
        shard_optimizer(kind(pair.flat), elementwise=True)


class Decorated(torch.optim.SGD):
    """Wraps the step that it inherits, under its name."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return torch.optim.SGD.step(self, *args, **kwargs)


class Factored(torch.optim.Adam):
    """Keeps state that is not elementwise, for the step that it inherits."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


@pytest.mark.parametrize("kind", [Decorated, Factored])
def test_a_subclass_with_a_step_of_its_own_is_tried(mesh: DeviceMesh, kind: Any) -> None:
    pair = Pair(mesh)
    sharded = shard_optimizer(kind(pair.flat, lr=0.01))
    step_both(pair, sharded, kind(pair.plain, lr=0.01), num_steps=2)
    pair.check()
