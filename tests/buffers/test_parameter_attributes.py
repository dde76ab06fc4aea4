"""Attributes that users set on parameters: full and sharded parameters have the same ones."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests import reference
from tests.pool import on_few_ranks, on_ranks

SIZE = 4


class Masked(nn.Linear):
    """Multiplies its weight with an attribute, and counts its calls in another one."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        weight.num_calls = getattr(weight, "num_calls", 0) + 1  # type: ignore[attr-defined]
        mask = getattr(weight, "mask", None)
        if getattr(weight, "fails", False):
            raise ArithmeticError
        return functional.linear(x, weight if mask is None else weight * mask, self.bias)


def masked() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Masked(SIZE, SIZE), nn.Sequential(Masked(SIZE, SIZE)))


def change_attributes(model: nn.Module, step: int) -> None:
    """Set, replace and delete attributes before a step."""
    for module in model.modules():
        if isinstance(module, Masked):
            weight: nn.Parameter = module.weight
            assert getattr(weight, "num_calls", 0) == step
            if step == 3:
                del weight.mask
            elif step:
                weight.mask = torch.arange(SIZE).remainder(step + 1)  # type: ignore[attr-defined]


def train(model: nn.Module) -> list[float]:
    return reference.losses_of_sgd(model, SIZE, num_steps=4, before_step=change_attributes)


@on_few_ranks
def test_attributes_are_the_same_within_forward_and_outside() -> None:
    expected = train(masked())
    for level in LEVELS:
        model, options = masked(), fe.Options(min_unit_size=0)
        engine = fe.shard(model, strategy=level, options=options)
        assert train(model) == pytest.approx(expected)
        weight = model[0].weight
        weight.fails = True
        with pytest.raises(ArithmeticError):
            model(torch.ones(2, SIZE))
        engine.reset()
        del weight.fails
        assert weight.num_calls == 5
        model(torch.ones(2, SIZE))
        assert model[0].weight.num_calls == 6


@on_ranks(2)
def test_full_weights_in_another_dtype_have_them() -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for level in LEVELS:
        model = masked()
        fe.shard(model, strategy=level, mp_policy=policy)
        train(model)


@on_ranks(2)
def test_copies_of_a_sharded_parameter_have_attributes_of_their_own() -> None:
    model = masked()
    fe.shard(model, strategy="optim_grads_params")
    weight = model[0].weight
    weight.mask = torch.ones(SIZE)
    model(torch.ones(2, SIZE))
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    for other in (copy.deepcopy(weight), torch.load(file)):
        assert isinstance(other, nn.Parameter)
        assert other.num_calls == 1  # type: ignore[attr-defined]
        assert torch.equal(other.mask, weight.mask)  # type: ignore[attr-defined]
        assert other.mask is not weight.mask  # type: ignore[attr-defined]
        assert other.backref is None  # type: ignore[attr-defined]
        other.num_calls = 7  # type: ignore[attr-defined]
    assert weight.num_calls == 1
    assert set(vars(weight)) == {"_is_param", "mask", "num_calls"}


@on_ranks(4)
def test_dtensors_have_them() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = masked()
    weight = model[0].weight
    placed = distribute_tensor(weight.detach(), mesh["tp"], [Shard(0)])
    model[0].weight = nn.Parameter(placed)

    def forward(x: Tensor) -> Tensor:
        own = model[0].weight
        assert own.mask == "set outside"
        own.seen = True
        return x * own.to_local().sum()

    model[0].forward = forward
    fe.shard(model, mesh["dp"], strategy="optim_grads_params")
    model[0].weight.mask = "set outside"
    model(torch.ones(2, SIZE)).sum().backward()
    assert model[0].weight.seen
