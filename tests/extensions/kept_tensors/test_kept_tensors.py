"""Tensors that a unit keeps beside its output, and outputs that are changed in place.

Units are joined in one case of ``OPTIONS`` only: an error shows only where one unit is prefetched
while another computes.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.kept_tensors.kept_tensors import FoundTensors
from fsdp_engine.runtime.kept_tensors import next_function
from fsdp_engine.runtime.unit import BOTH
from tests.pool import on_ranks
from tests.promises import keeping
from tests.promises.everywhere import Place, everywhere
from tests.torch_versions import swaps_memory


@everywhere
def test_a_loss_of_tensors_that_units_keep_has_its_gradients(place: Place) -> None:
    for loss in keeping.LOSSES:
        for run in keeping.KEEPING:
            keeping.check(place, keeping.Net(run), loss)
        keeping.check(place, keeping.HeadOfAnother(lambda block, x: block.hidden(x)), loss)
    keeping.check(place, keeping.Net(keeping.after_output), keeping.of_both, num_backwards=2)
    keeping.check(place, keeping.Recomputed(keeping.after_output), keeping.of_both)


@everywhere
def test_a_unit_that_keeps_tensors_where_they_are_not_found_stays_full(place: Place) -> None:
    for loss in keeping.LOSSES:
        model = keeping.Net(keeping.elsewhere_after_output)
        if place.inner != "optim_grads_params":
            keeping.check(place, model, loss)
            continue
        with pytest.warns(UserWarning, match=r"unit blocks\.1: expected forward to return"):
            keeping.check(place, model, loss)


@pytest.mark.parametrize("container", [deque, set])
@on_ranks(2)
def test_tensors_that_units_keep_in_a_queue_or_a_set_have_their_gradients(container: Any) -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        hidden = block.hidden(x)
        block.kept = container([hidden])
        return x + block.leave(hidden)

    for loss in keeping.LOSSES:
        keeping.check(keeping.LEVEL_3, keeping.Net(run), loss)


class WithoutLength(tuple[Any, ...]):
    """A tuple that hides its length, as ``o3.Irreps`` of e3nn does."""

    def __len__(self) -> int:
        raise NotImplementedError


class WithoutItems(tuple[Any, ...]):
    def __iter__(self) -> Any:
        raise NotImplementedError


class WithoutAttributes:
    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError


def test_a_search_passes_objects_whose_methods_raise() -> None:
    module, began = nn.Module(), next_function()
    kept = torch.ones(2, requires_grad=True) * 2
    module.kept = WithoutLength([WithoutItems([1]), WithoutAttributes(), kept])
    (found,), hidden = FoundTensors().search(began, [], [module], None)
    assert found is kept
    assert hidden is None


OPTIONS: list[dict[str, Any]] = [
    {"min_unit_size": 10**6},
    {"checkpointing": "offload"},
    {"config": fe.DistributedDataParallelConfig(fsdp_double_buffer=True)},
]


@on_ranks(2)
def test_tensors_that_units_with_options_and_hooks_keep_have_their_gradients() -> None:
    for loss in keeping.LOSSES:
        for options, run in itertools.product(OPTIONS, keeping.KEEPING[:2]):
            keeping.check(keeping.LEVEL_3, keeping.Net(run), loss, **options)
        model = keeping.Net(lambda block, x: x + block.hidden(x))
        for block in model.blocks:
            block.register_forward_hook(keep)
        keeping.check(keeping.LEVEL_3, model, loss)
    model = keeping.Net(keeping.after_output)
    keeping.check(keeping.LEVEL_3, model, keeping.of_both, checkpointing=True)


def keep(block: Any, args: Any, out: Tensor) -> None:
    block.kept = [block.leave(out)]


@on_ranks(2)
def test_a_unit_that_computes_a_metric_is_freed() -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        out = x + block.hidden(x)
        block.metric = block.leave(out).norm().item()
        return out

    engine = keeping.check(keeping.LEVEL_3, keeping.Net(run), keeping.of_output)
    assert all(not unit.kept for unit in engine.units)


@everywhere
def test_an_output_that_is_a_view_may_be_changed_in_place(place: Place) -> None:
    def run(block: Any, x: Tensor) -> Tensor:
        return block.hidden(x).view(-1, 2, keeping.DIM // 2)

    class Changing(keeping.Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
                x += 1.5
                x[:, 0] += x[:, 1].detach()
                x = x.reshape(-1, keeping.DIM)
            return self.head(x)

    keeping.check(place, Changing(run), keeping.of_output)


@swaps_memory
@on_ranks(2)
def test_full_parameters_have_no_memory_before_their_gather_has_been_waited_for() -> None:
    model = nn.Sequential(nn.Linear(keeping.DIM, keeping.DIM), nn.Linear(keeping.DIM, keeping.DIM))
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
        self.linear = nn.Linear(keeping.DIM, keeping.DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        raise KeyError(tuple(y.shape))


@on_ranks(2)
def test_an_exception_in_forward_comes_without_a_warning_about_kept_tensors() -> None:
    model = nn.Sequential(nn.Linear(keeping.DIM, keeping.DIM), Failing())
    engine = fe.shard(model, options=fe.Options(min_unit_size=0))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(KeyError):
                model(torch.ones(2, keeping.DIM))
        engine.reset()
