"""``mean_loss``, ``even_batches`` and ``together`` on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import mesh_of
from tests.pool import Ranks, on_ranks

ranks = device.ranks

WIDTH = 16


def batch_of(rank: int, step: int) -> Tensor:
    """Ranks have different numbers of samples."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(1 + 4 * rank + step % 3, WIDTH, generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def assert_same_weights(engine: fe.Engine, alone: nn.Module) -> None:
    weights = engine.full_state_dict()
    for name, param in alone.named_parameters():
        assert (weights[name].cpu() - param.detach()).abs().max() < 1e-5, name


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_the_mean_is_exact_in_any_order_that_delays_make_and_not_waited_for(level: str) -> None:
    model, alone = make_model(), make_model()
    on_cpu = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    engine = fe.shard(model.to(on.DEVICE), strategy=level, units=list(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, means = dist.get_rank(), []
    for step in range(3):
        whole = torch.cat([batch_of(each, step) for each in range(2)])
        loss = alone(whole).square().sum(1).mean()
        loss.backward()
        on_cpu.step()
        on_cpu.zero_grad()
        batch = batch_of(rank, step).to(on.DEVICE)
        count = torch.full((), len(batch), device=on.DEVICE)
        torch.accelerator.synchronize()
        with (
            on.delays(compute=2e-4, copy=2e-4, collective=1e-3, seed=2 * step + rank),
            on.count_host_syncs() as syncs,
        ):
            engine.mean_loss(model(batch).square().sum(), count).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert step == 0 or not syncs
        means.append((engine.last_mean_loss, loss))
    for mean, loss in means:
        assert mean is not None
        assert abs(mean.item() / loss.item() - 1) < 1e-5
    assert_same_weights(engine, alone)


@on_ranks(2)
def test_the_message_of_even_batches_waits_for_no_work_of_the_device() -> None:
    model = make_model().to(on.DEVICE)
    engine = fe.shard(make_model().to(on.DEVICE))

    def loader() -> Iterator[int]:
        yield from range(2 + dist.get_rank())

    batches = engine.even_batches(loader())
    assert next(batches) == (0, 1.0)
    with on.held():  # compute's stream does nothing until the end
        model(torch.ones(2, WIDTH, device=on.DEVICE))
        assert next(batches) == (1, 1.0)
        assert next(batches) == (1 + dist.get_rank(), float(dist.get_rank()))
        assert list(batches) == []


class Route(nn.Module):
    """Applies its layers in a given order, those of odd number with activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        for number in route:
            layer = self.layers[number]
            x = x + torch.tanh(
                checkpoint(layer, x, use_reentrant=False) if number % 2 else layer(x)
            )
        result: Tensor = self.head(x)
        return result


def route_of(rank: int, step: int) -> list[int]:
    return random.Random(f"{rank} {step}").choices(range(5), k=(3 * step + 2 * rank) % 7)


@pytest.mark.parametrize(
    ("shape", "outer"),
    [
        ((2,), None),
        ((2, 2), "optim"),
        pytest.param((2, 2), "no_shard", marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_use_other_layers_have_the_gradients_of_one_process(
    ranks: Ranks, shape: tuple[int, ...], outer: str | None
) -> None:
    ranks.run(train_on_routes, shape, outer, world_size=len(shape) * 2)


def train_on_routes(shape: tuple[int, ...], outer: str | None) -> None:
    model, alone = Route(), Route()
    on_cpu = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    mesh = mesh_of(on.DEVICE.type, shape)
    config = fe.DistributedDataParallelConfig(suggested_communication_unit_size=WIDTH)
    model.to(on.DEVICE)
    engine = fe.shard(model, mesh, outer_strategy=outer, units=list(model.layers), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        batches = [torch.ones(2, WIDTH) * (1 + each) / 4 for each in range(size)]
        routes = [route_of(each, step) for each in range(size)]
        losses = [
            alone(batch, route).square().mean()
            for batch, route in zip(batches, routes, strict=True)
        ]
        torch.stack(losses).mean().backward()
        batch = batches[rank].to(on.DEVICE)
        torch.accelerator.synchronize()
        with (
            on.delays(compute=2e-4, copy=2e-4, collective=1e-3, seed=4 * step + rank),
            engine.together(),
        ):
            model(batch, routes[rank]).square().mean().backward()
        for param, right in zip(model.parameters(), alone.parameters(), strict=True):
            assert (param.grad is None) == (right.grad is None)
        for each in (on_cpu, optimizer):
            each.step()
            each.zero_grad()
    assert_same_weights(engine, alone)


@pytest.mark.parametrize("where", ["cpu", on.DEVICE])
@on_ranks(1)
def test_gradients_are_scaled_by_a_factor_on_either_device(where: str) -> None:
    model = make_model().to(on.DEVICE)
    engine = fe.shard(model, units=list(model), strategy="optim")
    model(torch.ones(2, WIDTH, device=on.DEVICE)).sum().backward()
    before = [param.grad.to_local().cpu() for param in model.parameters()]  # type: ignore[union-attr]
    engine.scale_gradients(torch.tensor(0.5, device=where))
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_local().cpu(), 0.5 * grad)  # type: ignore[union-attr]
