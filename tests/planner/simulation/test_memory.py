"""Planned memory by kind, compared with that of two gloo ranks.

``benchmarks/planner_memory.py`` makes the table of many models.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import fsdp_engine as fe
from fsdp_engine.planner.simulation.memory_tracker import MemoryTracker, as_returned, lstm_workspace
from fsdp_engine.strategies import LEVELS
from tests.planner.simulation.live_storages import LiveStorages
from tests.planner.simulation.memory_runs import HOST, MODELS, NUM_RANKS, Run, measured_all, planned
from tests.pool import Ranks

# Largest relative difference between planned and measured memory, due to tensors of one element.
# The goal in docs/internals/planner.md is less strict: up to 3 % above the measured memory.
MOST = 0.0002

LEVEL_3 = "optim_grads_params"
WEIGHTED = Run("weighted experts", "optim")
CUSTOM = [Run("custom function", "optim", True), Run("custom function", LEVEL_3)]
SOME = [
    WEIGHTED,
    CUSTOM[0],
    Run("buffers", "optim", microbatches=2, checkpointing=True),
    Run("decoder", LEVEL_3, "selective", in_bf16=True),
]
WAYS: list[dict[str, Any]] = [
    *({"checkpointing": each} for each in (False, "selective", True)),
    *({"checkpointing": True, "microbatches": 2, "in_bf16": each} for each in (False, True)),
]


planned_once = functools.cache(planned)


def compare(ranks: Ranks, runs: list[Run]) -> None:
    found = ranks.run(measured_all, runs, world_size=NUM_RANKS)
    for run, *held in zip(runs, *found, strict=True):
        assert held == [pytest.approx(planned_once(run).peak_bytes, rel=MOST)] * NUM_RANKS, run


def test_the_tracker_records_memory_that_is_freed_outside_operations() -> None:
    before = torch.zeros(100)
    with LiveStorages() as watch:
        watch.restart()
        held = watch.num_bytes
        storage = torch.zeros(10).untyped_storage()
        assert watch.num_bytes == held + 40
        storage.resize_(4000)
        assert watch.num_bytes == held + 4000
        storage.resize_(0)
        del before
        assert watch.num_bytes == held - 400
        torch.zeros(1)
    # The new tensor is found when the next operation begins.
    assert watch.peak >= held + 40


def test_planned_memory_equals_that_of_ranks(ranks: Ranks) -> None:
    compare(ranks, SOME)


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_planned_memory_of_all_models(ranks: Ranks, name: str, level: str) -> None:
    # Not all models compute in bf16.
    ways = WAYS if name in ("decoder", "buffers") else WAYS[:3]
    compare(ranks, [Run(name, level, **each) for each in ways])


WIDTH = 64


class Kinds(nn.Module):
    """Weights and a buffer of one size; nothing in forward is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.register_buffer("scale", torch.ones(WIDTH, WIDTH))
        self.kept = [torch.ones(WIDTH, WIDTH)]  # an unregistered tensor

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x @ (self.scale + self.kept[0])).sum()


def test_kinds_of_memory_by_hand() -> None:
    batch = torch.zeros(2, WIDTH)
    whole, state, cut = (
        fe.simulate(
            Kinds, 4, batch=batch, strategy=level, options=fe.Options(min_unit_size=0)
        ).memory
        for level in ("no_shard", "optim", LEVEL_3)
    )
    one = WIDTH * WIDTH * 4
    # The peak is in the optimizer's step, or at the end of backward, when all gradients exist.
    assert whole["transient"] == 0
    assert whole["optimizer"] == pytest.approx(4 * one, abs=64)
    for each in (whole, state):
        assert (each["weights"], each["gradients"]) == (4 * one, 2 * one)
    for each in (state, cut):
        assert each["optimizer"] == pytest.approx(one, abs=64)
    assert cut["weights"] == pytest.approx(2.5 * one, abs=64)
    assert cut["gradients"] <= 0.5 * one
    assert cut["transient"] in (one, 2 * one, 3 * one)


class Large(nn.Module):
    """A batch that is not used, and a large tensor on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        self.kept = torch.empty(1 << 30, device="meta")
        return (x * self.scale).sum()


def test_a_batch_counts_and_tensors_on_the_meta_device_do_not() -> None:
    found = fe.simulate(Large, 2, batch=(torch.zeros(4), torch.zeros(1000)), strategy="no_shard")
    assert 4016 <= found.memory["activations"] < 5000


def test_results_on_the_host_are_not_in_the_record() -> None:
    """One or both results of an operation are on the host."""
    for count in (1, 2):
        tracker = MemoryTracker()
        tracker.watch(dict)
        results = [torch.zeros(100), torch.zeros(100)]
        tracker.place = lambda: ("forward", "norm")
        tracker.made(results)
        for each in results[:count]:
            tracker.moved(each, "host")
        on_device = 400 * (2 - count)
        assert tracker.elsewhere == {"host": 400 * count}
        assert sum(tracker.peak.values()) == on_device
        assert sum(tracker.series[-1][1]) == on_device
        assert sum(sum(each) for each in tracker.by_place.values()) == on_device


def on_device(run: Run) -> fe.Simulation:
    batch = MODELS[run.name].batch
    return fe.simulate(run.build, NUM_RANKS, batch=batch, **run.options)


def test_memory_that_gradients_are_received_in_is_transient() -> None:
    """With two ranks this memory is half of each unit's gradients, until backward ends, whatever
    the speed of the machine."""
    found, device = planned_once(WEIGHTED), on_device(WEIGHTED)
    assert device.memory["transient"] == 0
    assert found.memory["transient"] == pytest.approx(found.memory["gradients"] / 2, rel=0.01)
    assert found.memory["activations"] <= device.memory["activations"]
    link = replace(HOST.within_node, bandwidth=1e6, latency=1.0)
    slow = replace(HOST, within_node=link, between_nodes=link, host_seconds=0.0)
    assert planned(WEIGHTED, slow).memory == found.memory


def test_a_host_holds_memory_that_a_device_frees() -> None:
    """Scratch memory of gloo's reductions, and idle memory, which on a device belongs to the
    allocator."""
    # Before torch 2.13 nothing is kept idle.
    for run in CUSTOM[: 1 + hasattr(torch.UntypedStorage, "_swap_data_ptr_")]:
        assert planned_once(run).peak_bytes > 1.02 * on_device(run).peak_bytes


def returned_alike(func: Any, given: tuple[Any, ...]) -> None:
    """Assert that planned results have the dtype, shape and memory of the kernel's results."""
    kernel = func(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = as_returned(func, given, func(*given))
    for each, other in zip(tree_leaves(found), tree_leaves(kernel), strict=True):
        assert (each.shape, each.dtype) == (other.shape, other.dtype)
        assert each.untyped_storage().nbytes() == other.untyped_storage().nbytes()


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_statistics_of_norms_have_the_dtype_of_the_kernel(weights: torch.dtype) -> None:
    aten = torch.ops.aten
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16)
    w = torch.ones(8, dtype=weights)
    returned_alike(aten.native_batch_norm.default, (x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5))
    returned_alike(aten.native_group_norm.default, (x, w, w, 2, 8, 16, 4, 1e-5))
    returned_alike(aten.native_layer_norm.default, (x, [4], w[:4], w[:4], 1e-5))


@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss"]
)
def test_a_loss_keeps_the_memory_that_the_kernel_keeps(name: str) -> None:
    x = torch.rand(4, 8)
    weights = [None] if name == "binary_cross_entropy" else []
    for reduction in range(3):  # none, mean, sum
        returned_alike(getattr(torch.ops.aten, name).default, (x, x, *weights, reduction))


def test_the_workspace_of_the_lstm_of_onednn() -> None:
    choose = random.Random(0)
    sizes = [1, 3, 16, 33, 64, 100, 128, 250, 256]
    for _ in range(20):
        steps, rows, width, hidden = (choose.choice(sizes) for _ in range(4))
        x = torch.zeros(steps, rows, width)
        weights = [torch.zeros(4 * hidden, n, requires_grad=True) for n in (width, hidden)]
        biases = [torch.zeros(4 * hidden, requires_grad=True) for _ in range(2)]
        states = [torch.zeros(rows, hidden) for _ in range(2)]
        options = (False, [], 2, hidden, 1, True, False, False, True)
        out = torch.ops.aten.mkldnn_rnn_layer(x, *weights, *biases, *states, *options)
        assert lstm_workspace(x, hidden) == out[3].nbytes
