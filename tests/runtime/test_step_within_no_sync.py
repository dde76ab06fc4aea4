"""An optimizer does not step with gradients that are accumulated and not reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_engine as fe
from fsdp_engine.fsdp2 import fully_shard
from tests.pool import on_ranks

LEVELS = ("no_shard", "optim", "optim_grads", "optim_grads_params")
REFUSED = r"optimizer step: expected a reduced gradient of 0\.weight"


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def backward(model: nn.Module, rank: int) -> None:
    model(torch.full((2, 3), rank + 1.0)).square().mean().backward()


def whole(model: nn.Module) -> list[Tensor]:
    params = (param.detach() for param in model.parameters())
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in params]


def stepped_alone(num_microbatches: int) -> list[Tensor]:
    """After a step by the mean over two ranks of the sum of equal microbatches."""
    model = made()
    for _ in range(num_microbatches):
        for rank in range(2):
            (model(torch.full((2, 3), rank + 1.0)).square().mean() / 2).backward()
    sgd(model).step()
    return whole(model)


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_is_refused_where_gradients_are_not_reduced_and_right_elsewhere(level: str) -> None:
    model = made()
    engine = fe.shard(model, strategy=level)
    optimizer, before = sgd(model), whole(model)
    with engine.no_sync():
        backward(model, dist.get_rank())
        if level in ("no_shard", "optim"):
            with pytest.raises(RuntimeError, match=REFUSED):
                optimizer.step()
            torch.testing.assert_close(whole(model), before)
        else:  # every microbatch is reduced
            optimizer.step()
            torch.testing.assert_close(whole(model), stepped_alone(1))
            return
    # Nothing is lost: the last microbatch brings the sum.
    backward(model, dist.get_rank())
    optimizer.step()
    torch.testing.assert_close(whole(model), stepped_alone(2))


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("by_name", [False, True])
def test_the_backward_of_a_closure_may_be_the_last_of_a_step(level: str, by_name: bool) -> None:
    model = made()
    engine = fe.shard(model, strategy=level)
    with engine.no_sync():
        backward(model, dist.get_rank())
    optimizer: Any = sgd(model)

    def closure() -> None:
        backward(model, dist.get_rank())

    if by_name:
        optimizer.step(closure=closure)
    else:
        optimizer.step(closure)
    torch.testing.assert_close(whole(model), stepped_alone(2))


@on_ranks(4)
def test_rows_of_hsdp_are_not_stepped_apart() -> None:
    model = made()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    engine = fe.shard(model, mesh, strategy="optim_grads_params", outer_strategy="no_shard")
    with engine.no_sync():
        backward(model, dist.get_rank())
    with pytest.raises(RuntimeError, match=REFUSED):
        sgd(model).step()


@on_ranks(4)
def test_units_that_do_not_sync_are_not_stepped() -> None:
    model: Any = made()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    model[0].set_requires_gradient_sync(False)
    backward(model, dist.get_rank() % 2)
    with pytest.raises(RuntimeError, match=REFUSED):
        sgd(model).step()
    torch.optim.SGD(model[2].parameters()).step()


@on_ranks(2)
@pytest.mark.parametrize("level", LEVELS)
def test_other_steps_go_ahead(level: str) -> None:
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
    torch.testing.assert_close(whole(other), stepped_alone(1))
    torch.testing.assert_close(whole(model), [value - 0.5 for value in whole(made())])


@on_ranks(1)
@pytest.mark.parametrize("level", LEVELS)
def test_one_rank_has_nothing_to_reduce(level: str) -> None:
    model, alone = made(), made()
    engine = fe.shard(model, strategy=level)
    with engine.no_sync():
        for each in (model, alone):
            backward(each, 0)
            sgd(each).step()
    torch.testing.assert_close(whole(model), whole(alone))


@on_ranks(2)
def test_a_hook_has_to_run_before_a_step() -> None:
    model: Any = made()
    engine = fe.shard(model, strategy="optim_grads_params")
    model[0].weight.register_hook(lambda grad: grad * 0)
    with engine.no_sync():
        backward(model, dist.get_rank())
    with pytest.raises(RuntimeError, match=REFUSED):
        sgd(model).step()
