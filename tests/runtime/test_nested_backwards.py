"""Backwards that run within a backward: cached losses, and layers that run in slices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES
from tests.pool import on_few_ranks, on_ranks
from tests.training import mesh_of

WIDTH = 6


class Encoder(nn.Module):
    """Embeds rows; a row's embedding does not depend on other rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: Tensor = self.norm(x)
        return result


def rows(seed: int, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(embeddings: Tensor) -> Tensor:
    """A loss of all pairs of embeddings."""
    return (embeddings @ embeddings.T).logsumexp(1).mean() / WIDTH


def cached_loss(model: Any, batch: Tensor, mini: int, embed: Any = None) -> Tensor:
    """The loss of ``batch``, whose backward embeds mini-batches again (GradCache)."""
    embed = embed or model
    parts = batch.split(mini)
    with torch.no_grad():
        found = [embed(part).double() for part in parts]
    leaves = [each.requires_grad_() for each in found]
    loss = loss_of(torch.cat(leaves))
    loss.backward()
    loss = loss.detach().requires_grad_()

    def embed_again(factor: Tensor) -> None:
        with torch.enable_grad():
            for part, leaf in zip(parts, leaves, strict=True):
                assert leaf.grad is not None
                (factor * (embed(part) * leaf.grad).sum()).backward()

    loss.register_hook(embed_again)
    return loss


def assert_same_gradients(model: nn.Module, alone: nn.Module, tolerance: float) -> None:
    found = reference.full_gradients(model)
    for name, param in alone.named_parameters():
        here = found[name]
        assert (here is None) == (param.grad is None), name
        if here is not None:
            torch.testing.assert_close(
                here.double(),
                param.grad,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, n=name: f"{n}: {text}",
            )


def train(
    level: str,
    *,
    num_rows: Sequence[int] = (4, 4),
    mesh: Any = None,
    micro: int = 1,
    policy: fe.MixedPrecisionPolicy | None = None,
    tolerance: float = 1e-9,
    together: bool = False,
    steps: int = 3,
    **options: Any,
) -> fe.Engine:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, alone = Encoder(), Encoder()
    if policy is not None:
        model.float()
    engine = fe.shard(model, mesh, level, units="blocks.*", mp_policy=policy, **options)
    optimizer, one = reference.sgd(model.parameters()), reference.sgd(alone.parameters())
    for step in range(steps):
        for number in range(micro):
            with (
                engine.together() if together else nullcontext(),
                engine.no_sync() if number < micro - 1 else nullcontext(),
            ):
                batch = rows(100 * step + 10 * number + rank, num_rows[rank])
                batch = batch if policy is None else batch.float()
                loss = cached_loss(model, batch, 2)
                (loss / micro).backward()
            for each in range(size):
                batch = rows(100 * step + 10 * number + each, num_rows[each])
                (loss_of(alone(batch)) / (micro * size)).backward()
        assert_same_gradients(model, alone, tolerance)
        for each in (optimizer, one):
            each.step()
            each.zero_grad()
    return engine


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_few_ranks
def test_a_cached_loss_has_the_gradients_of_one_process(level: str, micro: int) -> None:
    train(level, num_rows=(4, 4), micro=micro)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_ranks_have_different_numbers_of_mini_batches(level: str, micro: int) -> None:
    train(level, num_rows=(2, 7), micro=micro, together=level == "optim_grads_params")


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_different_numbers_within_together(level: str) -> None:
    train(level, num_rows=(7, 2), micro=2, together=True)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_bf16(level: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(level, policy=policy, tolerance=3e-2, micro=2)


@pytest.mark.parametrize("pair", [("optim_grads_params", "no_shard"), ("optim_grads", "optim")])
@pytest.mark.parametrize("together", [False, True])
@on_ranks(4)
def test_two_axes(pair: tuple[str, str], together: bool) -> None:
    num_rows = (2, 6, 4, 3) if together else (4, 4, 4, 4)
    train(
        pair[0],
        num_rows=num_rows,
        mesh=mesh_of(2, 2),
        outer_strategy=pair[1],
        micro=2,
        together=together,
    )


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
    """An MLP that can run in slices."""

    in_slices = True

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def compute(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.up(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_slices:
            return self.compute(x)
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
    """Sliced MLPs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.double()

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


def train_sliced(
    units: str,
    level: str,
    *,
    mesh: Any = None,
    policy: fe.MixedPrecisionPolicy | None = None,
    tolerance: float = 1e-9,
    embeds: bool = True,
    **options: Any,
) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, alone = Mixer(), Mixer()
    for each in (model, alone):
        each.embed.requires_grad_(embeds)
    if policy is not None:
        model.float()
    for module in alone.modules():
        if isinstance(module, Sliced):
            module.in_slices = False
    engine = fe.shard(model, mesh, level, units=UNITS[units], mp_policy=policy, **options)
    optimizer, one = (
        reference.sgd([param for param in each.parameters() if param.requires_grad])
        for each in (model, alone)
    )
    for step in range(2):
        for number in range(2):
            seed = 100 * step + 10 * number
            with engine.no_sync() if number == 0 else nullcontext():
                batch = rows(seed + rank, 6)
                model(batch if policy is None else batch.float()).backward()
            for each in range(size):
                (alone(rows(seed + each, 6)) / size).backward()
        assert_same_gradients(model, alone, tolerance)
        for each in (optimizer, one):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_few_ranks
def test_a_layer_that_runs_in_slices(units: str, level: str) -> None:
    train_sliced(units, level)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_a_layer_in_slices_in_bf16_and_behind_a_frozen_one(level: str) -> None:
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train_sliced("the MLP", level, policy=policy, tolerance=3e-2)
    train_sliced("the MLP", level, embeds=False)


@on_ranks(4)
def test_a_layer_in_slices_on_two_axes() -> None:
    train_sliced("the MLP", "optim_grads_params", mesh=mesh_of(2, 2), outer_strategy="optim")


def implicit_loss(model: Any, batch: Tensor) -> Tensor:
    """A loss at a fixed point of a block, whose gradient a hook computes by a series: it runs the
    graph of one call of the block several times."""
    block = model.blocks[0]
    with torch.no_grad():
        start = batch + 0.1 * block(batch)
    point = batch + 0.1 * block(start)
    start = point.detach().requires_grad_()
    again = batch + 0.1 * block(start)

    def solve(grad: Tensor) -> Tensor:
        total = grad
        for _ in range(3):
            (change,) = torch.autograd.grad(again, start, total, retain_graph=True)
            total = grad + change
        return total

    point.register_hook(solve)
    return loss_of(model(point))


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_few_ranks
def test_a_hook_that_runs_the_graph_of_a_unit_several_times(level: str) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, alone = Encoder(), Encoder()
    fe.shard(model, None, level)
    for step in range(2):
        implicit_loss(model, rows(10 * step + rank, 4)).backward()
        for each in range(size):
            (implicit_loss(alone, rows(10 * step + each, 4)) / size).backward()
        assert_same_gradients(model, alone, 1e-9)
