"""An optimizer does not step with gradients that are accumulated and not reduced."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.fsdp2 import engine_of, fully_shard
from fsdp_engine.strategies import LEVELS
from tests.pool import on_ranks
from tests.reference import full, full_weights
from tests.training import mesh_of

REFUSED = r"optimizer step: expected a reduced gradient of 0\.weight"


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 3), rank + 1.0)).square().mean().backward()


def assert_stepped(model: nn.Module, num_microbatches: int) -> None:
    """Weights are those after a step with gradients that are summed over equal microbatches and
    averaged over ranks."""
    alone, size = made(), dist.get_world_size()
    for _ in range(num_microbatches):
        for rank in range(size):
            (alone(torch.full((2, 3), rank + 1.0)).square().mean() / size).backward()
    sgd(alone).step()
    assert_weights(model, dict(alone.named_parameters()))


def assert_weights(model: nn.Module, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(full_weights(model), {n: p.detach() for n, p in expected.items()})


@on_ranks(2)
def test_a_step_is_refused_where_gradients_are_not_reduced_and_right_elsewhere() -> None:
    for level in LEVELS:
        model = made()
        engine = fe.shard(model, strategy=level)
        optimizer = sgd(model)
        with engine.no_sync():
            backward(model, dist.get_rank())
            if level not in ("no_shard", "optim"):  # every microbatch is reduced
                optimizer.step()
                assert_stepped(model, 1)
                continue
            with pytest.raises(RuntimeError, match=REFUSED):
                optimizer.step()
            with pytest.raises(RuntimeError, match=r"clip_grad_norm_: expected a reduced gradient"):
                engine.clip_grad_norm_(0.01)
            assert_weights(model, dict(made().named_parameters()))
        # The sum is kept: the last microbatch reduces all of it.
        backward(model, dist.get_rank())
        optimizer.step()
        assert_stepped(model, 2)


@on_ranks(2)
def test_the_backward_of_a_closure_may_be_the_last_of_a_step() -> None:
    for level, by_name in itertools.product(LEVELS, (False, True)):
        model = made()
        engine = fe.shard(model, strategy=level)
        optimizer = sgd(model)
        with engine.no_sync():
            backward(model, dist.get_rank())
        closure = partial(backward, model, dist.get_rank())
        if by_name:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)
        assert_stepped(model, 2)


@on_ranks(4)
def test_hooks_rows_of_hsdp_and_units_that_do_not_sync_are_not_stepped() -> None:
    for shape, hook in (((2, 2), None), ((4,), lambda grad: grad * 0)):
        model: Any = made()
        engine = fe.shard(model, shape)
        if hook is not None:
            model[0].weight.register_hook(hook)
        with engine.no_sync():
            backward(model, dist.get_rank())
        with pytest.raises(RuntimeError, match=REFUSED):
            sgd(model).step()
    model = made()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh_of(2, 2))
    model[0].set_requires_gradient_sync(False)
    backward(model, dist.get_rank() % 2)
    with pytest.raises(RuntimeError, match=REFUSED):
        sgd(model).step()
    sgd(model[2]).step()


@on_ranks(2)
def test_other_steps_go_ahead() -> None:
    for level in LEVELS:
        model, other = made(), made()
        engine, _ = fe.shard(model, strategy=level), fe.shard(other, strategy=level)
        with engine.no_sync():
            backward(model, dist.get_rank())
            # An optimizer of other parameters: a generator's, while its critic accumulates.
            backward(other, dist.get_rank())
            sgd(other).step()
            # Gradients that were dropped, made zero, or replaced by the user's.
            optimizer = sgd(model)
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.step()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
        assert_stepped(other, 1)
        assert_weights(model, {n: p.detach() - 0.5 for n, p in made().named_parameters()})


@on_ranks(1)
def test_one_rank_has_nothing_to_reduce() -> None:
    for level in LEVELS:
        model = made()
        engine = fe.shard(model, strategy=level)
        with engine.no_sync():
            backward(model, 0)
            sgd(model).step()
        assert_stepped(model, 1)


@on_ranks(2)
def test_gradients_of_a_unit_that_is_not_reduced_are_scaled_as_a_whole() -> None:
    for level in LEVELS:
        model = made()
        for module in (model[0], model[2]):
            fully_shard(module, strategy=level)
        fully_shard(model, strategy=level)
        engine = engine_of(model)
        model[0].set_requires_gradient_sync(False)
        backward(model, dist.get_rank())
        engine.scale_gradients(3.0)
        model[0].set_requires_gradient_sync(True)
        backward(model, dist.get_rank())
        alone, size = made(), dist.get_world_size()
        for rank in range(size):
            (4 * alone(torch.full((2, 3), rank + 1.0)).square().mean() / size).backward()
        gradients = {name: full(param.grad) for name, param in model.named_parameters()}
        for name, param in alone.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad, msg=f"{level} {name}")
