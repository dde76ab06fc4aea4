"""Models whose units keep tensors beside their output, and losses of these tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.promises.everywhere import Place, assert_as_alone

DIM = 6
# No module refers to it.
ELSEWHERE: list[Tensor] = []
LEVEL_3 = Place("optim_grads_params", "no_shard", (2,))


class Cache:
    """A user's own class."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


class Block(nn.Module):
    """Calls ``run(block, x)`` as its forward. Its gain is read by a kernel that does not check
    whether the tensor has memory."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.exit = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.rand(DIM) + 0.5)
        self.cache = Cache()
        self.kept: Any = []
        self.run = run

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x))) * self.gain

    def leave(self, x: Tensor) -> Tensor:
        return self.exit(x) * self.gain

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class Net(nn.Module):
    """Three blocks between two layers."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([Block(run) for _ in range(3)])
        self.head = nn.Linear(DIM, DIM)
        self.kept: Any = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def take_kept(self) -> list[Tensor]:
        taken = list(ELSEWHERE)
        ELSEWHERE.clear()
        for module in (self, *self.blocks):
            taken += module.kept
            module.kept = []
        for block in self.blocks:
            taken += block.cache.tensors
            block.cache.tensors = []
        return taken


def after_output(block: Any, x: Tensor) -> Tensor:
    out = x + block.hidden(x)
    block.kept = [block.leave(out)]
    return out


def within_output(block: Any, x: Tensor) -> Tensor:
    block.cache.tensors.append(block.hidden(x))
    return x + block.leave(block.cache.tensors[-1])


def of_a_layer(block: Any, x: Tensor) -> Tensor:
    out = x + block.hidden(x)
    block.kept = [block.leave(out)]
    return out.detach()


def elsewhere_after_output(block: Any, x: Tensor) -> Tensor:
    out = x + block.hidden(x)
    ELSEWHERE.append(block.leave(out))
    return out


class Recomputed(Net):
    """Its blocks are recomputed by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class HeadOfAnother(Net):
    """Reads the weights of another unit, and keeps the result."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = [F.linear(out, self.head.weight)]
        return out


KEEPING = (after_output, within_output, of_a_layer)


def of_both(out: Tensor, kept: list[Tensor]) -> Tensor:
    return out.square().mean() + of_kept(out, kept)


def of_kept(out: Tensor, kept: list[Tensor]) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in kept]).sum()


def of_output(out: Tensor, kept: list[Tensor]) -> Tensor:
    return out.square().mean()


LOSSES = (of_both, of_kept)


def check(place: Place, model: Any, loss: Any, num_backwards: int = 1, **options: Any) -> fe.Engine:
    acts = [lambda model, x: loss(model(x), model.take_kept())] * num_backwards
    options = {"min_unit_size": 0, **options}
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    return assert_as_alone(place, model, *acts, **tolerance, **options)
