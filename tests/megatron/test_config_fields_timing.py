"""Fields of the config that say when: each changes the order in which a step's events come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Layers, config_of
from tests.pool import on_ranks

DIM, NUM_LAYERS = 8, 3
SIZE = 128  # of each layer: its weight, and its bias at a multiple of 64
CALLS = [f"call layers.{number}" for number in range(NUM_LAYERS)]


class Run:
    """Steps of a wrapped model, the first of which has shown the order. A layer is a bucket."""

    def __init__(self, level: str, **fields: Any) -> None:
        torch.manual_seed(0)
        model = Layers(DIM, NUM_LAYERS)
        self.timeline = Timeline(model)
        fields = {"overlap": True, "bucket_size": 65, **fields}
        self.ddp = fe.DistributedDataParallel(model, config_of(level, **fields))
        self.engine = self.ddp.engine
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        self.step(0)

    def step(self, *numbers: int, **options: Any) -> list[tuple[str, str]]:
        batches = []
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            batches.append((torch.randn(2, DIM, generator=generator),))
        timed_step(self.ddp, self.optimizer, self.timeline, *batches, **options)
        return self.timeline.events

    def weights(self) -> torch.Tensor:
        return torch.cat([each.flatten() for each in self.engine.full_state_dict().values()])


def collectives(what: str, level: str) -> list[str]:
    """By their labels, in forward order: of units where parameters are cut, else of buckets."""
    cut = level == "optim_grads_params"
    labels = [f"layers.{n}" if cut else f"(bucket {2 - n})" for n in range(NUM_LAYERS)]
    return [f"{what} of {label}" for label in labels]


def one_by_one(gathers: list[str]) -> list[str]:
    return [each for pair in zip(gathers, CALLS, strict=True) for each in pair]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_overlap_grad_reduce_reduces_in_backward_instead_of_finish_grad_sync(level: str) -> None:
    what = "all-reduce" if level == "no_shard" else "reduce-scatter"
    expected = collectives(what, level)[::-1]
    cut = level in ("optim_grads", "optim_grads_params")
    weights = []
    for overlap in (False, True):
        run = Run(level, overlap=False, overlap_grad_reduce=overlap)
        where = "backward" if overlap or cut else "finish"
        found = [event for event in run.step(1) if event[1] in expected]
        assert found == [(where, each) for each in expected], overlap
        # Of two microbatches, only gradients that are cut are reduced in both.
        found = [event for event in run.step(2, 3) if event[1] in expected]
        assert len(found) == len(expected) * (2 if cut else 1), found
        weights.append(run.weights())
    assert torch.equal(*weights)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_overlap_param_gather_gathers_in_the_next_forward_instead_of_the_step(level: str) -> None:
    expected = [] if level == "no_shard" else collectives("all-gather", level)
    weights = []
    for overlap in (False, True):
        run = Run(level, overlap_param_gather=overlap)
        run.step(1)
        where = "forward" if overlap or level == "optim_grads_params" else "optimizer"
        events = run.step(2)
        found = [event for event in events if "gather" in event[1] and event[0] != "backward"]
        assert found == [(where, each) for each in expected], overlap
        weights.append(run.weights())
    assert torch.equal(*weights)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_align_param_gather_leaves_gathers_to_start_param_sync(level: str) -> None:
    everything = collectives("all-gather", level)
    for align in (False, True):
        run = Run(level, align_param_gather=align, suggested_communication_unit_size=10_000)
        run.step(1)
        # One by one, each when the first module needs it; cut parameters as always.
        aligned = align and level != "optim_grads_params"
        expected = one_by_one(everything) if aligned else [*everything, *CALLS]
        assert run.timeline.in_phase("forward") == expected
        run.step(2, param_sync=True)
        assert run.timeline.in_phase("sync") == everything
        assert run.timeline.in_phase("forward") == CALLS


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_suggested_communication_unit_size_says_how_much_is_gathered_ahead(level: str) -> None:
    everything = collectives("all-gather", level)
    ahead = [*everything, *CALLS]
    one_ahead = [*everything[:2], CALLS[0], everything[2], *CALLS[1:]]
    # Weights that stay whole are brought up to date in memory that is held anyway: all at once.
    cut = level == "optim_grads_params"
    expected = {0: one_by_one(everything), 1: one_ahead if cut else ahead, 100 * SIZE: ahead}
    for budget, events in expected.items():
        run = Run(level, suggested_communication_unit_size=budget)
        run.step(1)
        assert run.engine.budget == budget
        assert run.timeline.in_phase("forward") == events, budget
    engine = Run(level).engine
    # The mean unit, and twice it for gradients; the root, which has no parameters, is none.
    assert (engine.budget, engine.staging_budget) == (SIZE, (2 * SIZE, 1))


@on_ranks(world_size=2)
def test_suggested_communication_unit_size_bounds_gradient_buffers_in_use() -> None:
    for budget, most in ((0, 1), (2 * SIZE, 2), (10_000, 3)):
        run = Run("optim_grads", overlap=False, suggested_communication_unit_size=budget)
        run.engine.peak_memory_bytes(reset=True)
        run.step(1)
        assert run.engine.peak_memory_bytes()["staging"] == most * SIZE * 4
