"""The engine itself on the device: its lanes are streams, and results are those of the CPU. Each
block is a unit of its own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsdp_engine as fe
from fsdp_engine.comm.lanes import DeviceLane, make_lanes
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.models import Transformer, token_batch
from tests.pool import on_few_ranks, on_ranks

ranks = device.ranks

STEPS = 4


@sdpa_kernel(SDPBackend.MATH)  # on the CPU too: the same kernels
def train(model: nn.Module, rows: slice, max_norm: float | None = None) -> None:
    """Some steps on ``rows`` of each batch. The host waits for copies of the batch only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = next(model.parameters()).device
    for step in range(STEPS):
        model(*(part[rows].to(device) for part in token_batch(4, step))).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def rows_of_rank() -> slice:
    num = 4 // dist.get_world_size()
    return slice(num * dist.get_rank(), num * (dist.get_rank() + 1))


def largest_difference(engine: fe.Engine, weights: dict[str, Tensor]) -> float:
    state = engine.full_state_dict()
    return max((state[name].cpu() - weights[name]).abs().max().item() for name in weights)


def weights_on_cpu(model: nn.Module, level: str, max_norm: float | None) -> dict[str, Tensor]:
    """By lanes of the CPU, on the same ranks."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    engine = fe.shard(model, mesh, strategy=level, min_unit_size=0)
    train(model, rows_of_rank(), max_norm)
    state = engine.full_state_dict()
    return {name: state[name] for name, _ in model.named_parameters()}


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@on_few_ranks
def test_the_engine_without_a_mesh_is_on_the_accelerator_and_its_lanes_are_streams(
    level: str,
) -> None:
    model = Transformer()
    engine = fe.shard(copy.deepcopy(model), strategy=level, min_unit_size=0)
    assert engine.mesh.device == on.DEVICE
    assert all(isinstance(lane, DeviceLane) for lane in make_lanes(engine.mesh.device).all)
    assert largest_difference(engine, dict(model.state_dict())) == 0


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@on_ranks(1)
def test_one_rank_on_the_device_is_one_process_on_the_cpu_bit_for_bit(level: str) -> None:
    model = Transformer()
    on_device = copy.deepcopy(model)
    train(model, slice(None))
    engine = fe.shard(on_device, strategy=level, min_unit_size=0)
    with on.delays(compute=2e-4, copy=2e-4, collective=1e-3, seed=1):
        train(on_device, slice(None))
    assert largest_difference(engine, {k: v.detach() for k, v in model.named_parameters()}) == 0


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_lanes_of_the_device_and_of_the_cpu_give_the_same_weights(level: str) -> None:
    model = Transformer()
    on_device = copy.deepcopy(model)
    weights = weights_on_cpu(model, level, max_norm=0.5)
    engine = fe.shard(on_device, strategy=level, min_unit_size=0)
    with on.delays(compute=2e-4, copy=2e-4, collective=1e-3, seed=dist.get_rank()):
        train(on_device, rows_of_rank(), max_norm=0.5)
    difference = largest_difference(engine, weights)
    assert difference <= 1e-6, difference


@pytest.mark.thorough
@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_the_engine_is_right_in_any_order_that_delays_make(level: str) -> None:
    model = Transformer()
    start = copy.deepcopy(model)
    weights = weights_on_cpu(model, level, max_norm=None)
    for seed in range(10):
        on_device = copy.deepcopy(start)
        engine = fe.shard(on_device, strategy=level, min_unit_size=0)
        one_of_two = 2 * seed + dist.get_rank()
        with on.delays(compute=4e-4, copy=4e-4, collective=3e-3, host=1e-4, seed=one_of_two):
            train(on_device, rows_of_rank())
        difference = largest_difference(engine, weights)
        assert difference <= 1e-6, (seed, difference)


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_the_host_waits_for_nothing_in_a_steady_step(level: str) -> None:
    model = Transformer()
    engine = fe.shard(model, strategy=level, min_unit_size=0)
    assert len(engine.units) > 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    batch = [part.to(on.DEVICE) for part in token_batch(2, dist.get_rank())]
    for step in range(3):
        with on.count_host_syncs() as syncs:
            model(*batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert step == 0 or not syncs
