"""``mean_loss`` and ``even_batches`` on the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.pool import on_ranks

ranks = device.ranks

WIDTH = 16


def batch_of(rank: int, step: int) -> Tensor:
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
