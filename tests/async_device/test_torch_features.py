"""Features of torch on the device: FSDP2's API, compiled units, activation checkpointing, fused
and foreach optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import fsdp

from fsdp_engine import fsdp2
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.fsdp2_model import OnDevice
from tests.async_device.scene import (
    FULL_AND_THOROUGH,
    Job,
    compare,
    differences,
    on_cpu,
    random_delays,
    small_job,
    train,
)
from tests.fsdp2 import programs
from tests.models import Block, Chain, Mlp, Transformer, vector_batch
from tests.pool import on_ranks
from tests.runtime.habits import Checkpointed

ranks = device.ranks


# ---- FSDP2's API -------------------------------------------------------------------------------


def fsdp2_log(api: Any, device_type: str, num_microbatches: int, **options: Any) -> programs.Log:
    torch.manual_seed(3)
    model = programs.Model()
    model.init_weights()
    if device_type != "cpu":
        values, model = model.state_dict(), OnDevice().to(on.DEVICE)
        model.load_state_dict(values)
    mesh = dist.init_device_mesh(device_type, (dist.get_world_size(),))

    def sync(model: Any, index: int, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)

    model = programs.parallelize(api, model, mesh, **options)
    optimizer = programs.sgd(model.parameters())
    log = programs.train(model, optimizer, range(3), num_microbatches=num_microbatches, before=sync)
    log.weights = {name: weight.cpu() for name, weight in log.weights.items()}
    return log


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("reshards", [True, pytest.param(False, marks=pytest.mark.thorough)])
@on_ranks(2)
def test_fully_shard_of_the_engine_trains_on_the_device_as_torchs(
    reshards: bool, num_microbatches: int
) -> None:
    options = {"num_microbatches": num_microbatches, "reshard_after_forward": reshards}
    with random_delays(seed=1):
        found = fsdp2_log(fsdp2, on.NAME, **options)
        torchs = fsdp2_log(fsdp, on.NAME, **options)
    expected = fsdp2_log(fsdp2, "cpu", **options)
    assert found == torchs
    assert found == expected
    if num_microbatches == 1:
        torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-7)


# ---- torch.compile -----------------------------------------------------------------------------


def train_compiled(job: Job, device_type: str) -> Any:
    """As ``train``, with each block compiled by aot_eager after ``shard``."""

    def compiled() -> nn.Module:
        model = job.make_model()
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        return model

    torch._dynamo.reset()
    counters.clear()
    result = train(dataclasses.replace(job, make_model=compiled), device_type)
    assert counters["aot_autograd"]["ok"] >= 1  # equal blocks share a graph
    assert not counters["graph_break"]
    return result


def chain() -> nn.Module:
    return Chain(*(Mlp(hidden=n) for n in (17, 17, 5)))


@pytest.mark.parametrize(
    "job",
    [
        Job(chain, vector_batch, num_micro=1),
        pytest.param(Job(partial(Transformer, 1), num_micro=1), marks=pytest.mark.thorough),
    ],
    ids=["mlps", "transformer"],
)
@pytest.mark.parametrize("level", FULL_AND_THOROUGH)
@on_ranks(2)
def test_compiled_units_train_as_on_the_cpu(level: str, job: Job) -> None:
    job = dataclasses.replace(job, pair=(level, "no_shard"))
    expected = train_compiled(job, "cpu")
    with random_delays(seed=2):
        found = train_compiled(job, on.NAME)
    # Decompositions of attention and norms use other kernels than the CPU, which round differently.
    assert not differences(found, expected, 1e-6)
    assert not differences(found, on_cpu(job), 1e-6)


# ---- Activation checkpointing ------------------------------------------------------------------


class Dropping(nn.Module):
    """Draws numbers, which must be the same ones when activations are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.dropout = Mlp(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inside(x))


def recomputed(where: str, reentrant: bool, make_block: Callable[[], nn.Module]) -> nn.Module:
    return Checkpointed(where, reentrant, *(make_block() for _ in range(3)))


@pytest.mark.parametrize("level", FULL_AND_THOROUGH)
@pytest.mark.parametrize(
    "blocks", [(Mlp, Dropping), pytest.param((Block,), marks=pytest.mark.thorough)]
)
@on_ranks(2)
def test_activations_that_are_computed_again_change_no_bit(level: str, blocks: Any) -> None:
    for block in blocks:
        plain, *others = [
            Job(partial(recomputed, *way, block), vector_batch, (level, "no_shard"), num_micro=1)
            for way in (("nowhere", False), ("blocks", True), ("blocks", False))
        ]
        others.append(dataclasses.replace(plain, options=(("checkpointing", True),)))
        with random_delays(seed=2):
            expected = train(plain, on.NAME)
        for job in others:
            with random_delays(seed=1):
                found = train(job, on.NAME)
            assert not differences(found, expected)
            assert block is Dropping or not differences(found, on_cpu(job))


# ---- Optimizers --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-6),
    "adamw_amsgrad": partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-6),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-4),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-6),
}
WAYS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def with_rate_on_the_device(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    params = list(params)
    rate = torch.tensor(1e-2, device=params[0].device)
    return torch.optim.AdamW(params, lr=rate, eps=1e-6, foreach=False)


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(n, marks=pytest.mark.thorough) for n in list(OPTIMIZERS)[1:])]
)
@on_ranks(2)
def test_an_optimizer_steps_as_on_the_cpu(name: str) -> None:
    for way, options in WAYS.items():
        if way == "fused" and name in ("rmsprop", "nadam"):
            continue
        for level in ("no_shard", "optim_grads_params"):
            make = partial(OPTIMIZERS[name], **options)
            job = small_job(pair=(level, "no_shard"), num_micro=1, make_optimizer=make)
            assert not compare(job, seed=1), (way, level)
    if name == "adamw":
        assert not compare(small_job(num_micro=1, make_optimizer=with_rate_on_the_device), 1e-6)
