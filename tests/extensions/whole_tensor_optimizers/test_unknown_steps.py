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


class Decorated(torch.optim.SGD):
    """Wraps the step that it inherits, under its name."""

    @functools.wraps(torch.optim.SGD.step)
    def step(self, *args: Any, **kwargs: Any) -> Any:
        return torch.optim.SGD.step(self, *args, **kwargs)


class Factored(torch.optim.Adam):
    """Keeps state that is not elementwise, for the step that it inherits."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


def test_a_step_that_is_not_elementwise_is_refused_without_an_engine(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"since Centralised steps whole tensors; found a ten"):
            shard_optimizer(Centralised(pair.flat))
    shard_optimizer(Centralised(pair.flat), elementwise=True)


class Raising(torch.optim.SGD):
    """Raises in each step."""

    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError("no step")


def test_a_trial_step_that_raises_is_an_error(mesh: DeviceMesh) -> None:
    pair = Pair(mesh)
    with pytest.raises(ValueError, match=r"Raising raises ZeroDivisionError: no step\. elementw"):
        shard_optimizer(Raising(pair.flat))
    shard_optimizer(Raising(pair.flat), elementwise=True)


@pytest.mark.parametrize("kind", [Decorated, Factored])
def test_a_subclass_with_a_step_of_its_own_is_tried(mesh: DeviceMesh, kind: Any) -> None:
    pair = Pair(mesh)
    sharded = shard_optimizer(kind(pair.flat, lr=0.01))
    step_both(pair, sharded, kind(pair.plain, lr=0.01), num_steps=2)
    pair.check()


def test_an_optimizer_with_odd_state_is_refused_without_an_engine(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"since Counting steps whole tensors"):
        shard_optimizer(Counting(Pair(mesh).flat))


def test_optimizers_that_look_beyond_an_element_are_refused(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, [((6, 5), 7, 19)])
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        with pytest.raises(ValueError, match=r"since .* steps whole tensors; found a tensor that"):
            shard_optimizer(make(pair.flat))
