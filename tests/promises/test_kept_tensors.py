"""Tensors that a unit keeps beside its output, and outputs that are changed in place.

Units are not joined here: gradients are wrong only where one unit is prefetched while another
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests.pool import on_ranks
from tests.promises.everywhere import Place, assert_as_alone, everywhere
from tests.torch_versions import swaps_memory

DIM = 6
# No module refers to it.
ELSEWHERE: list[Tensor] = []
LEVEL_3 = Place("optim_grads_params", "no_shard", (2,))


class Cache:
    """A user's own class."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


class Block(nn.Module):
    """Calls ``run(block, x)`` as its forward. Its gain is read by a kernel that does not check for
    memory."""

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


def before_output(block: Any, x: Tensor) -> Tensor:
    hidden = block.hidden(x)
    block.kept = [block.leave(hidden)]
    return x + hidden.square()


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


KEEPING = (after_output, before_output, within_output, of_a_layer)


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


@everywhere
def test_a_loss_of_tensors_that_units_keep_has_its_gradients(place: Place) -> None:
    for loss in LOSSES:
        for run in KEEPING:
            check(place, Net(run), loss)
        check(place, HeadOfAnother(lambda block, x: block.hidden(x)), loss)
    check(place, Net(after_output), of_both, num_backwards=2)
    check(place, Recomputed(after_output), of_both)


@everywhere
def test_a_unit_that_keeps_tensors_where_they_are_not_found_stays_full(place: Place) -> None:
    for loss in LOSSES:
        model = Net(elsewhere_after_output)
        if place.inner != "optim_grads_params":
            check(place, model, loss)
            continue
        with pytest.warns(UserWarning, match=r"unit blocks\.1: expected tensors that it computes"):
            check(place, model, loss)


@on_ranks(2)
def test_tensors_that_units_keep_have_their_gradients_in_other_ways() -> None:
    config = fe.DistributedDataParallelConfig(fsdp_double_buffer=True)
    for loss in LOSSES:
        for run in (after_output, within_output):
            check(LEVEL_3, Net(run), loss, config=config)
            check(LEVEL_3, Net(run), loss, checkpointing="offload")
            check(LEVEL_3, Net(run), loss, min_unit_size=10**6)
        model = Net(lambda block, x: x + block.hidden(x))
        for block in model.blocks:
            block.register_forward_hook(keep)
        check(LEVEL_3, model, loss)
    check(LEVEL_3, Net(after_output), of_both, checkpointing=True)


def keep(block: Any, args: Any, out: Tensor) -> None:
    block.kept = [block.leave(out)]


@on_ranks(2)
def test_a_unit_that_computes_a_metric_is_freed() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        out = x + block.hidden(x)
        block.metric = block.leave(out).norm().item()
        return out

    engine = check(LEVEL_3, Net(run), of_output)
    assert all(not unit.kept for unit in engine.units)


@everywhere
def test_an_output_that_is_a_view_may_be_changed_in_place(place: Place) -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        return block.hidden(x).view(-1, 2, DIM // 2)

    class Changing(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
                x += 1.5
                x[:, 0] += x[:, 1].detach()
                x = x.reshape(-1, DIM)
            return self.head(x)

    check(place, Changing(run), of_output)


@swaps_memory
@on_ranks(2)
def test_full_parameters_have_no_memory_before_their_gather_has_been_waited_for() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    engine = fe.shard(model, units=[nn.Linear], min_unit_size=0)
    unit = next(each for each in engine.units if each.num_elements)
    weight = unit.buffers[0].full_params[0]
    for _ in range(2):
        unit.gather(fe.codecs.base.BOTH)
        with pytest.raises(RuntimeError):
            weight.t().sum()
        unit.wait()
        assert weight.isfinite().all()
        unit.release()
        with pytest.raises(RuntimeError):
            weight.t().sum()
