"""Fields of the config that say when: each changes the order in which a step's events come."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

import fsdp_engine as fe
from tests.comm.timeline import Timeline, timed_step
from tests.megatron.configs import LEVEL_NAMES, Config, Layers, config_of
from tests.pool import on_ranks

DIM, NUM_LAYERS = 8, 3
# Each layer's weight (64 elements) and bias (8) close a bucket of at least 65.
BUCKETED = {"bucket_size": 65}
LABELS = {  # by whether parameters are cut: buckets in forward order
    False: [f"(bucket {number})" for number in (2, 1, 0)],
    True: [f"layers.{number}" for number in range(NUM_LAYERS)],
}
CALLS = [f"call layers.{number}" for number in range(NUM_LAYERS)]


def make(
    config: Config, *, gradients: bool = False
) -> tuple[fe.DistributedDataParallel, torch.optim.Optimizer, Timeline]:
    """A wrapped model, its optimizer and a timeline, after a step that has shown the order."""
    torch.manual_seed(0)
    model = Layers(DIM, NUM_LAYERS)
    timeline = Timeline(model, gradients=gradients)
    ddp = fe.DistributedDataParallel(model, config)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    timed_step(ddp, optimizer, timeline, batch(0))
    return ddp, optimizer, timeline


def batch(number: int) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return (torch.randn(2, DIM, generator=generator),)


def labels_of(level: str) -> list[str]:
    return LABELS[level == "optim_grads_params"]


def reductions(level: str) -> list[str]:
    what = "all-reduce" if level == "no_shard" else "reduce-scatter"
    return [f"{what} of {label}" for label in reversed(labels_of(level))]


def gathers(level: str) -> list[str]:
    return [f"all-gather of {label}" for label in labels_of(level)]


def weights_of(ddp: fe.DistributedDataParallel) -> list[torch.Tensor]:
    return list(ddp.engine.full_state_dict().values())


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_overlap_grad_reduce_reduces_in_backward_instead_of_finish_grad_sync(level: str) -> None:
    results = {}
    for overlap in (False, True):
        config = dataclasses.replace(config_of(level, **BUCKETED), overlap_grad_reduce=overlap)
        ddp, optimizer, timeline = make(config)
        timed_step(ddp, optimizer, timeline, batch(1))
        expected = reductions(level)
        cut = level in ("optim_grads", "optim_grads_params")
        where, elsewhere = ("backward", "finish") if overlap or cut else ("finish", "backward")
        found = [what for what in timeline.in_phase(where) if what in expected]
        assert found == expected, (overlap, timeline.events)
        assert not set(timeline.in_phase(elsewhere)) & set(expected), (overlap, timeline.events)
        # Of two microbatches, only gradients that are cut are reduced in both.
        timed_step(ddp, optimizer, timeline, batch(2), batch(3))
        num_times = sum(what in expected for _, what in timeline.events)
        assert num_times == len(expected) * (2 if cut else 1), timeline.events
        results[overlap] = weights_of(ddp)
    for one, other in zip(results[False], results[True], strict=True):
        assert torch.equal(one, other)


@on_ranks(world_size=2)
def test_overlap_grad_reduce_starts_each_reduction_as_its_bucket_is_full() -> None:
    ddp, optimizer, timeline = make(config_of("optim", overlap=True, **BUCKETED), gradients=True)
    timed_step(ddp, optimizer, timeline, batch(1))
    backward = [what for what in timeline.in_phase("backward") if "gather" not in what]
    expected: list[str] = []
    for label in reversed(labels_of("optim")):
        expected += [f"gradient of {label}"] * 2 + [f"reduce-scatter of {label}"]
    assert backward == expected


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_overlap_param_gather_gathers_in_the_next_forward_instead_of_the_step(level: str) -> None:
    results = {}
    for overlap in (False, True):
        config = dataclasses.replace(
            config_of(level, overlap=True, **BUCKETED), overlap_param_gather=overlap
        )
        ddp, optimizer, timeline = make(config)
        timed_step(ddp, optimizer, timeline, batch(1))
        timed_step(ddp, optimizer, timeline, batch(2))
        expected = [] if level == "no_shard" else gathers(level)
        cut = level == "optim_grads_params"
        where, elsewhere = ("forward", "optimizer")
        if not (overlap or cut):
            where, elsewhere = elsewhere, where
        found = [what for what in timeline.in_phase(where) if "gather" in what]
        assert found == expected, (overlap, timeline.events)
        assert not [what for what in timeline.in_phase(elsewhere) if "gather" in what], (
            overlap,
            timeline.events,
        )
        results[overlap] = weights_of(ddp)
    for one, other in zip(results[False], results[True], strict=True):
        assert torch.equal(one, other)


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim", "optim_grads"])
def test_align_param_gather_leaves_gathers_to_start_param_sync(level: str) -> None:
    by_align: dict[bool, list[list[str]]] = {}
    for align in (False, True):
        config = config_of(level, overlap=True, align_param_gather=align, **BUCKETED)
        ddp, optimizer, timeline = make(config)
        seen = []
        for number, param_sync in enumerate((False, True)):
            timed_step(ddp, optimizer, timeline, batch(number), param_sync=param_sync)
            seen += [timeline.in_phase("sync"), timeline.in_phase("forward")]
        by_align[align] = seen
    everything = gathers(level)
    assert by_align[False] == [[], [*everything, *CALLS], everything, CALLS]
    # Without start_param_sync one by one, each when the first module needs it.
    one_by_one = [each for pair in zip(everything, CALLS, strict=True) for each in pair]
    assert by_align[True] == [[], one_by_one, everything, CALLS]


@on_ranks(world_size=2)
def test_align_param_gather_leaves_cut_parameters_to_forward() -> None:
    everything = gathers("optim_grads_params")
    ahead = [*everything, *CALLS]
    for align in (False, True):
        config = config_of(
            "optim_grads_params",
            overlap=True,
            align_param_gather=align,
            suggested_communication_unit_size=10_000,
        )
        ddp, optimizer, timeline = make(config)
        timed_step(ddp, optimizer, timeline, batch(1))
        assert timeline.in_phase("forward") == ahead
        timed_step(ddp, optimizer, timeline, batch(2), param_sync=True)
        # The first unit, and what the budget lets forward gather ahead of it.
        assert timeline.in_phase("sync") == everything
        assert timeline.in_phase("forward") == CALLS


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES[1:])
def test_suggested_communication_unit_size_says_how_much_is_gathered_ahead(level: str) -> None:
    size = 128  # of each layer: its weight, and its bias at a multiple of 64
    everything = gathers(level)
    one_by_one = [each for pair in zip(everything, CALLS, strict=True) for each in pair]
    ahead = [*everything, *CALLS]
    one_ahead = [everything[0], everything[1], CALLS[0], everything[2], *CALLS[1:]]
    # Weights that stay whole are brought up to date in memory that is held anyway: all at once.
    cut = level == "optim_grads_params"
    expected = {0: one_by_one, 1: one_ahead if cut else ahead, 100 * size: ahead}
    for budget, events in expected.items():
        config = config_of(
            level, overlap=True, suggested_communication_unit_size=budget, **BUCKETED
        )
        ddp, optimizer, timeline = make(config)
        assert ddp.engine.budget == budget
        timed_step(ddp, optimizer, timeline, batch(1))
        assert timeline.in_phase("forward") == events, budget
    ddp, _, _ = make(config_of(level, **BUCKETED))
    # The mean unit, and twice it for gradients; the root, which has no parameters, is none.
    assert (ddp.engine.budget, ddp.engine.staging_budget) == (size, (2 * size, 1))


@on_ranks(world_size=2)
def test_suggested_communication_unit_size_bounds_gradient_buffers_in_use() -> None:
    peaks: dict[int, int] = {}
    for budget in (0, 256, 10_000):
        config = config_of("optim_grads", suggested_communication_unit_size=budget, **BUCKETED)
        ddp, optimizer, timeline = make(config)
        ddp.engine.peak_memory_bytes(reset=True)
        timed_step(ddp, optimizer, timeline, batch(1))
        peaks[budget] = ddp.engine.peak_memory_bytes()["staging"]
    assert peaks == {0: 128 * 4, 256: 2 * 128 * 4, 10_000: 3 * 128 * 4}
