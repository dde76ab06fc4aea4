"""What torch promises of parameters that are used outside the forward of their module."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.promises.everywhere import Place, assert_as_alone, everywhere
from tests.torch_versions import marks_gradients


class Block(nn.Module):
    """A layer and a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.gain


class Model(nn.Module):
    """Two blocks, and parameters that only a loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _check(place: Place, *losses: Any) -> None:
    for loss in losses:
        torch.manual_seed(0)
        assert_as_alone(place, Model(), loss, shape=(4, 3))


def _full(weight: Any) -> Tensor:
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def _read_before(model: Any, x: Tensor) -> Tensor:
    scale, gain = model.scale.exp(), model.blocks[1].gain.exp()
    return (model(x) * scale * gain).square().mean() + x.mean() * model.blocks[0].gain.square()


def _read_after(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    loss = y.square().mean() * model.scale.exp() - model.scale + (y @ _full(model.bias)).mean()
    return loss + y.square().mean() / model.bias.norm() + (model.bias * y.mean()).sum()


def _read_bias(model: Any, x: Tensor) -> Tensor:
    return (model(x) + model.bias).square().mean()


@everywhere
def test_parameters_that_a_loss_reads_get_the_gradient_of_one_process(place: Place) -> None:
    _check(place, _read_before, _read_after, _read_bias)


@everywhere
def test_a_gradient_penalty_on_inputs_is_that_of_one_process(place: Place) -> None:
    def penalty(model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.norm(2, dim=1) - 1).square().mean() + _read_bias(model, x)

    _check(place, penalty)
    model = Model()
    engine = place.shard(model)
    model(torch.randn(4, 3)).sum().backward()
    held = engine.memory_bytes()
    model.zero_grad()
    penalty(model, torch.randn(4, 3)).backward()
    # Units that were kept full for the second backward are freed.
    assert engine.memory_bytes() == held


@everywhere
def test_gradients_with_respect_to_sharded_parameters_are_asked_of_backward(place: Place) -> None:
    model = Model()
    place.shard(model)
    loss = _read_bias(model, torch.randn(4, 3))
    if place.inner == "no_shard":
        assert torch.autograd.grad(loss, [model.bias])[0].shape == (3,)
        return
    for allow_unused in (False, True):
        with pytest.raises(ValueError, match=r"found .*\w, whose gradient .*Call backward\(\)"):
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
    loss.backward()


@everywhere
def test_functional_call_uses_the_weights_it_is_given_or_raises(place: Place) -> None:
    model = Model()
    weights = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    x = torch.randn(4, 3)
    expected = torch.func.functional_call(copy.deepcopy(model), weights, (x,))
    place.shard(model)
    if place.inner == "no_shard":
        torch.testing.assert_close(torch.func.functional_call(model, weights, (x,)), expected)
        return
    own = {name: param.detach() * 0.5 for name, param in model.named_parameters()}
    for given in (weights, own):
        with pytest.raises(RuntimeError, match=r"functional_call: .* found another tensor for"):
            torch.func.functional_call(model, given, (x,))
    model(x).sum().backward()  # nothing was changed


class Rounded(torch.autograd.Function):
    """A straight-through estimator: a function of sharded tensors alone."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.where(weight > 0, torch.ones_like(weight), -torch.ones_like(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        out = torch.zeros_like(weight)
        out += grad.to(weight.dtype)
        return out * (weight.abs() < 0.5)


def _straight_through(weight: Tensor) -> Tensor:
    rounded: Any = Rounded.apply(weight) * 2
    other: Any = Rounded.apply(weight * 0.5)
    return rounded.square().sum() + other.sum() + weight.pow(2).sum()


def _of_slices(model: Any, x: Tensor) -> Tensor:
    weight = model.blocks[0].layer.weight
    recomputed: Any = checkpoint(_straight_through, weight, use_reentrant=True)
    return model(x).square().mean() + _straight_through(weight) + recomputed


@everywhere
def test_functions_of_sharded_tensors_alone_give_gradients_to_slices(place: Place) -> None:
    _check(place, _of_slices)
    # Autograd casts these gradients.
    model = Model()
    place.shard(model, mp_policy=fe.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16))
    _straight_through(model.blocks[0].layer.weight).backward()


Gradient = Callable[[Tensor, Tensor], Tensor]
GRADIENTS: list[Gradient] = [
    lambda weight, grad: grad,
    lambda weight, grad: torch.zeros_like(weight).add_(grad),
    lambda weight, grad: torch.empty_like(weight).copy_(grad),
    lambda weight, grad: weight.new_zeros(weight.shape).add_(grad),
    lambda weight, grad: torch.full_like(weight, grad.sum().item()),
    lambda weight, grad: weight * grad.sum(),
]
WEIGHTS: list[Callable[[Any], Any]] = [
    lambda model: model.blocks[0].layer.weight,
    lambda model: model.bias,
    lambda model: model.bias * 2,
]


def _product(gradient: Gradient) -> Any:
    """A function that computes the gradient of its weight in forward, as fused losses do."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            grad = x.sum(0).expand(weight.shape).contiguous()
            ctx.grad = gradient(weight, grad)
            return (x @ weight.t()).sum() if weight.ndim == 2 else (x * weight).sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad * ctx.grad

    return Product.apply


@marks_gradients
@everywhere
def test_a_function_of_a_ranks_own_values_gives_no_gradient_to_slices(place: Place) -> None:
    model = Model()
    engine = place.shard(model)
    x = torch.randn(4, 3)
    for gradient, weight in itertools.product(GRADIENTS, WEIGHTS):
        loss = _product(gradient)(model(x), weight(model)) + weight(model).square().sum()
        if place.inner == "no_shard":
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match=r"to compute the gradient .*\w\.full_tensor\(\)"):
            loss.backward()
        engine.reset()
    _check(place, lambda model, x: _product(GRADIENTS[0])(model(x), _full(model.bias)))
