"""Functions that take DTensors take sharded parameters, or raise and say what to do instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fsdp_engine as fe
from fsdp_engine import FlatDTensor
from fsdp_engine.flat_dtensor.given_slices import COLLECTIVES_DISPATCH
from tests import reference
from tests.promises.everywhere import Place, everywhere

BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
POLICIES = (None, BF16)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


@everywhere
def test_whole_states_are_set_from_rank_0_or_from_every_rank(place: Place) -> None:
    torch.manual_seed(1)  # one process's model after a step, the same on every rank
    alone = make()
    alone_optimizer = torch.optim.AdamW(alone.parameters())
    alone(torch.randn(4, 5)).square().mean().backward()
    alone_optimizer.step()
    expected = get_optimizer_state_dict(alone, alone_optimizer)["state"]
    for policy in POLICIES:
        for from_rank_0 in (False, True):
            model = make()
            place.shard(model, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters())
            given = not from_rank_0 or not dist.get_rank()
            weights: Any = dict(alone.state_dict()) if given else {}
            state: Any = get_optimizer_state_dict(alone, alone_optimizer) if given else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
            set_model_state_dict(model, weights, options=options)
            set_optimizer_state_dict(model, optimizer, state, options=options)
            reference.assert_same_weights(model, alone, rtol=0, atol=0)
            assert torch.equal(model[1].running_mean, alone[1].running_mean)
            for name, parameter in model.named_parameters():
                for key, value in optimizer.state[parameter].items():
                    wanted = reference.slice_like(expected[name][key], value)
                    assert torch.equal(reference.held(value), wanted), (name, key)


def is_whole(tensor: Any) -> bool:
    return all(isinstance(each, Replicate) for each in tensor.placements)


@everywhere
def test_a_whole_tensor_is_distributed_as_a_parameter_is(place: Place) -> None:
    model = make()
    place.shard(model, mp_policy=BF16)
    weight: Any = model[0].weight
    whole = torch.randn(7, 5)
    made = distribute_tensor(whole, weight.device_mesh, weight.placements)
    if is_whole(weight):
        assert torch.equal(made.full_tensor(), whole)
        return
    with torch.no_grad():
        weight.copy_(whole)
        assert torch.equal(made.to_local().reshape(-1), weight.to_local())
        weight.zero_()
        weight.copy_(made)
    torch.testing.assert_close(weight.full_tensor(), whole.to(weight.dtype), rtol=0, atol=0)


@everywhere
def test_a_norm_over_the_mesh_of_a_gradient_counts_every_element_once(place: Place) -> None:
    """Megatron-Core sums squares of local parts over the last axis of the tensor's mesh."""
    if place.outer != "no_shard":
        return  # sharded along both axes, but such a norm sums along one
    model = nn.Linear(6, 5)
    place.shard(model, mp_policy=BF16)
    model(torch.randn(4, 6)).square().sum().backward()
    grads: list[Any] = [parameter.grad for parameter in model.parameters()]
    total = torch.zeros(())
    for grad in grads:
        assert isinstance(grad, DTensor)
        total += grad.to_local().double().square().sum()
        assert place.inner != "no_shard" or (is_whole(grad) and grad.device_mesh.size() == 1)
    mesh = grads[0].device_mesh
    dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    expected = torch.nn.utils.get_total_norm(grads).item()
    assert math.sqrt(total.item()) == pytest.approx(expected, rel=1e-5)


def _zero_by_numpy(local: Tensor) -> None:
    if local.numel():
        local.numpy()[:] = 0


def _zero_by_dlpack(local: Tensor) -> None:
    torch.from_dlpack(local).zero_()


# Functions that write this rank's slice without a change of its version.
UNSEEN: list[Callable[[Tensor], object]] = [
    lambda local: dist.all_reduce(local),
    lambda local: dist.broadcast(local.view(-1)[:3], 0),
    lambda local: dist.all_reduce(local.detach(), async_op=True).wait(),  # type: ignore[union-attr]
    _zero_by_numpy,
    _zero_by_dlpack,
]


@everywhere
def test_slices_that_collectives_and_arrays_write_are_what_the_next_forward_reads(
    place: Place,
) -> None:
    x = torch.randn(2, 16)
    for policy in POLICIES:
        model = nn.Linear(16, 16, bias=False)  # equal slices on 1, 2 and 4 ranks
        engine = place.shard(model, mp_policy=policy)
        if not isinstance(model.weight, FlatDTensor):
            continue
        held = model.weight.data.to_local()
        for write in UNSEEN:
            for is_held in (False, True):
                model(x)
                with torch.no_grad():
                    model.weight.copy_(torch.randn(16, 16))
                model(x)
                is_grad_enabled = write in UNSEEN[:2]  # NumPy takes no tensors that require grad
                with torch.set_grad_enabled(is_grad_enabled):
                    write(held if is_held else model.weight.to_local())
                if is_held and not COLLECTIVES_DISPATCH:
                    engine.weights_changed()
                expected = nn.functional.linear(x, engine.full_tensor("weight"))
                torch.testing.assert_close(model(x).float(), expected, rtol=0.05, atol=0.2)
