"""Backwards that run within a backward: cached losses, layers that run in slices, re-entrant
checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.extensions.nested_backwards.cached_loss import WIDTH, Encoder, Rows, cached, pair_loss
from tests.megatron.configs import LEVEL_NAMES, config_of, train_wrapped
from tests.models import DIM, Small, vector_batch
from tests.pool import on_few_ranks, on_ranks
from tests.reference import Batch, loss_of
from tests.scenario import Scenario


def implicit_loss(model: Any, batch: Batch) -> Tensor:
    """A loss at a fixed point of a block, whose gradient a hook computes by a series: it runs the
    graph of one call of the block several times."""
    (x,), block = batch, model.blocks[0]
    with torch.no_grad():
        start = x + 0.1 * block(x)
    point = x + 0.1 * block(start)
    start = point.detach().requires_grad_()
    again = x + 0.1 * block(start)

    def solve(grad: Tensor) -> Tensor:
        total = grad
        for _ in range(3):
            (change,) = torch.autograd.grad(again, start, total, retain_graph=True)
            total = grad + change
        return total

    point.register_hook(solve)
    return pair_loss(model(point))


class Slices(torch.autograd.Function):
    """Calls a module with slices of its input, and in backward again, with autograd (tiled MLP)."""

    @staticmethod
    def forward(ctx: Any, function: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.function, ctx.module = function, module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(module, part) for part in x.chunk(3)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        needs = x.requires_grad
        found = []
        for part, grad in zip(x.detach().chunk(3), grads[0].chunk(3), strict=True):
            leaf = part.requires_grad_(needs)
            with torch.enable_grad():
                output = ctx.function(ctx.module, leaf)
            torch.autograd.backward(output, grad)
            found.append(leaf.grad)
        return None, None, torch.cat(found) if needs else None


class Sliced(nn.Module):
    """An MLP that runs in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Slices.apply(type(self).compute, self, x)
        return result


class Block(nn.Module):
    """A layer and a sliced MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), Sliced()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        result: Tensor = x + self.mlp(x)
        return result


class Mixer(nn.Module):
    def __init__(self, *, embeds: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(embeds)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


UNITS = {
    "the MLP": ["blocks.*.mlp", "blocks.*.mix"],
    "the MLP alone": ["blocks.*.mlp"],
    "layers": ["blocks.*.mlp.up", "blocks.*.mlp.down"],
    "MLP and layers": ["blocks.*.mlp", "blocks.*.mlp.down"],
    "blocks": ["blocks.*"],
}
sliced = cached.but(model=lambda: Mixer().double(), batch=Rows(6), loss_of=loss_of, microbatches=2)
sliced_mlp = sliced.but(options={"units": UNITS["the MLP"]})


def in_bf16(scenario: Scenario, model: Callable[[], nn.Module], num_rows: int) -> Scenario:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return scenario.but(
        model=model,
        batch=lambda rows, seed: (Rows(num_rows)(rows, seed)[0].float(),),
        options={"mp_policy": policy},
        compute_dtype=torch.float32,
        tolerance=1e-1,
    )


SCENARIOS = {
    "a cached loss": cached,
    "a cached loss in bf16": in_bf16(cached, Encoder, 4),
    "a hook that runs the graph of a unit several times": cached.but(
        loss_of=implicit_loss, microbatches=1, options={"units": None}
    ),
    **{f"slices of {name}": sliced.but(options={"units": UNITS[name]}) for name in UNITS},
    "slices in bf16": in_bf16(sliced_mlp, Mixer, 6),
    "slices behind a frozen layer": sliced_mlp.but(model=lambda: Mixer(embeds=False).double()),
}


@pytest.mark.parametrize("name", SCENARIOS)
@on_few_ranks
def test_gradients_are_those_of_one_process(name: str) -> None:
    for level in LEVEL_NAMES:
        SCENARIOS[name].but(pair=(level, "no_shard")).check()


within_together = cached.but(around=lambda engine: engine.together())


@on_ranks(2)
def test_ranks_have_different_numbers_of_mini_batches() -> None:
    for level in LEVEL_NAMES:
        # Where gathers are collective, different numbers of calls need ``together``.
        for scenario in (within_together, cached)[: 2 - (level == "optim_grads_params")]:
            scenario.but(pair=(level, "no_shard"), batch=Rows(2, 7)).check()


@on_ranks(4)
def test_two_axes() -> None:
    uneven = within_together.but(batch=Rows(2, 6, 4, 3))
    for scenario, pair in (
        *((each, ("optim_grads_params", "no_shard")) for each in (cached, uneven)),
        *((each, ("optim_grads", "optim")) for each in (cached, uneven)),
        (sliced_mlp, ("optim_grads_params", "optim")),
    ):
        scenario.but(pair=pair, mesh=(2, 2)).check()


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim", "optim_grads"])
@pytest.mark.parametrize("size", [None, 0])
def test_re_entrant_checkpoints_train_in_buckets(level: str, size: int | None) -> None:
    data = reference.make_data(vector_batch, 4, 2, 2)
    torch.manual_seed(3)
    model = Small(3, checkpoints=True)
    expected = reference.train(copy.deepcopy(model), data)
    fields = {} if size is None else {"suggested_communication_unit_size": size}
    config = config_of(level, overlap=True, bucket_size=DIM * DIM + DIM, **fields)
    ddp = fe.DistributedDataParallel(model, config)
    assert len(ddp.engine.buffers) > 1
    assert not reference.differences(train_wrapped(ddp, data), expected, 2e-5)


@on_ranks(2)
def test_between_nested_backwards_the_engine_is_in_backward() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    scheduler = fe.shard(model).scheduler
    x = torch.ones(2, DIM, requires_grad=True)
    calls = []

    def train_within_backward(grad: Tensor) -> None:
        with torch.enable_grad():
            model(x.detach()).sum().backward()
        with pytest.raises(RuntimeError, match=r"save: .*; found a backward$"):
            scheduler.check_at_rest("save")
        calls.append(scheduler.phase)

    x.register_hook(train_within_backward)
    x.sum().backward()
    assert calls == ["backward"]
    assert scheduler.phase == "step"
