"""Tensors that a unit keeps beside its output, and outputs that are changed in place.

Units are not joined here: gradients are wrong only where one unit is prefetched while another
computes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.runtime.unit import BOTH
from tests.pool import on_ranks
from tests.promises.everywhere import Place, everywhere
from tests.promises.keeping import (
    DIM,
    KEEPING,
    LEVEL_3,
    LOSSES,
    HeadOfAnother,
    Net,
    Recomputed,
    after_output,
    check,
    elsewhere_after_output,
    of_both,
    of_output,
    within_output,
)
from tests.torch_versions import swaps_memory


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
def test_tensors_that_joined_and_hooked_units_keep_have_their_gradients() -> None:
    for loss in LOSSES:
        for run in (after_output, within_output):
            check(LEVEL_3, Net(run), loss, min_unit_size=10**6)
        model = Net(lambda block, x: x + block.hidden(x))
        for block in model.blocks:
            block.register_forward_hook(keep)
        check(LEVEL_3, model, loss)


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
    engine = fe.shard(model, units=[nn.Linear], options=fe.Options(min_unit_size=0))
    unit = next(each for each in engine.units if each.num_elements)
    weight = unit.buffers[0].full_params[0]
    for _ in range(2):
        unit.gather(BOTH)
        with pytest.raises(RuntimeError):
            weight.t().sum()
        unit.wait()
        assert weight.isfinite().all()
        unit.release()
        with pytest.raises(RuntimeError):
            weight.t().sum()


class Failing(nn.Module):
    """Raises an exception whose traceback holds a tensor of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        raise KeyError(tuple(y.shape))


@on_ranks(2)
def test_an_exception_in_forward_comes_without_a_warning_about_kept_tensors() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), Failing())
    engine = fe.shard(model, options=fe.Options(min_unit_size=0))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(KeyError):
                model(torch.ones(2, DIM))
        engine.reset()
