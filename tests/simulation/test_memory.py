"""Planned memory by kind, compared with that of two gloo ranks.

The full table is in ``benchmarks/planner_memory.py`` and in the thorough test.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fsdp_engine as fe
from fsdp_engine.simulation import simulate as simulate_module
from fsdp_engine.simulation.memory_tracker import as_returned, lstm_workspace
from fsdp_engine.strategies import LEVELS
from tests.models import Transformer, token_batch
from tests.pool import Ranks
from tests.simulation.live_storages import LiveStorages
from tests.simulation.memory_runs import (
    ALL_MODELS,
    HOST,
    NUM_RANKS,
    Run,
    measured_all,
    planned,
)

# The documented limits are 3 % above and 0 below, but for tensors of single elements.
MOST = 0.0002

SOME = [
    Run("LSTM", "no_shard"),
    Run("decoder", "optim_grads_params", "selective"),
    Run("buffers", "optim", microbatches=2, checkpointing=True),
    Run("decoder", "optim_grads", in_bf16=True, checkpointing=True),
    Run("custom function", "optim_grads_params", checkpointing=True),
    Run("weighted experts", "optim"),
    Run("weighted experts", "optim_grads_params"),
]
ALL = [
    Run(name, level, checkpointing)
    for name in ALL_MODELS
    for level in LEVELS
    for checkpointing in (False, "selective", True)
]
OTHERS = [
    Run(name, level, checkpointing=True, in_bf16=in_bf16, microbatches=2)
    for name in ("decoder", "buffers")
    for level in LEVELS
    for in_bf16 in (False, True)
]


def compare(ranks: Ranks, runs: list[Run]) -> None:
    found = ranks.run(measured_all, runs, world_size=NUM_RANKS)
    for run, *held in zip(runs, *found, strict=True):
        assert held == [pytest.approx(planned(run).peak_bytes, rel=MOST)] * NUM_RANKS, run


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
    # Seen when the next operation began.
    assert watch.peak >= held + 40


def test_planned_memory_equals_that_of_ranks(ranks: Ranks) -> None:
    compare(ranks, SOME)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL_MODELS)
def test_planned_memory_of_all_models_at_four_levels(ranks: Ranks, name: str) -> None:
    compare(ranks, [run for run in ALL if run.name == name])


@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
def test_planned_memory_with_microbatches_and_bf16(ranks: Ranks, level: str) -> None:
    compare(ranks, [run for run in OTHERS if run.level == level])


@pytest.mark.parametrize("level", LEVELS)
def test_the_third_step_is_a_steady_one(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> dict[str, int]:
        return fe.simulate(
            lambda: Transformer(4), 2, batch=token_batch(4, 0), strategy=level, min_unit_size=0
        ).memory

    third = peak()
    monkeypatch.setattr(simulate_module, "FIRST_STEPS", 5 * (1,))
    assert peak() == third


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


def kinds(level: str) -> dict[str, int]:
    batch = torch.zeros(2, WIDTH)
    return fe.simulate(Kinds, 4, batch=batch, strategy=level, min_unit_size=0).memory


def test_kinds_of_memory_by_hand() -> None:
    one = WIDTH * WIDTH * 4
    # The peak is in the optimizer's step, or at the end of backward, when all gradients exist.
    whole = kinds("no_shard")
    assert whole["weights"] == 4 * one
    assert whole["gradients"] == 2 * one
    assert whole["optimizer"] == pytest.approx(4 * one, abs=64)
    assert whole["transient"] == 0
    state = kinds("optim")
    assert state["weights"] == 4 * one
    assert state["gradients"] == 2 * one
    assert state["optimizer"] == pytest.approx(one, abs=64)
    cut = kinds("optim_grads_params")
    assert cut["weights"] == pytest.approx(2.5 * one, abs=64)
    assert cut["optimizer"] == pytest.approx(one, abs=64)
    assert cut["gradients"] <= 0.5 * one
    assert cut["transient"] in (one, 2 * one, 3 * one)


def test_a_batch_counts() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return (x * self.scale).sum()

    found = fe.simulate(Large, 2, batch=(torch.zeros(4), torch.zeros(1000)), strategy="no_shard")
    assert found.memory["activations"] >= 4016


def test_tensors_on_the_meta_device_have_no_memory() -> None:
    class Shapes(nn.Linear):
        is_used = True

        def forward(self, x: Tensor) -> Tensor:
            if self.is_used:
                self.kept = torch.empty(1 << 30, device="meta")
            return super().forward(x)

    found = []
    for is_used in (True, False):
        Shapes.is_used = is_used
        found.append(fe.simulate(lambda: Shapes(64, 64), 2, batch=torch.zeros(8, 64)))
    assert found[0].memory == found[1].memory


def test_memory_does_not_depend_on_the_figures_of_a_machine_whose_host_computes() -> None:
    link = replace(HOST.within_node, bandwidth=1e6, latency=1.0)
    slow = replace(HOST, within_node=link, between_nodes=link, host_seconds=0.0)
    run = Run("weighted experts", "optim")
    assert planned(run, slow).memory == planned(run).memory


def test_memory_that_gradients_are_received_in_is_transient() -> None:
    """On two ranks half of each unit's gradients, until backward ends."""
    run = Run("weighted experts", "optim")
    model, found = ALL_MODELS[run.name], planned(run)
    on_device = fe.simulate(run.build, NUM_RANKS, batch=model.batch, **run.options)
    assert on_device.memory["transient"] == 0
    assert found.memory["transient"] == pytest.approx(found.memory["gradients"] / 2, rel=0.01)
    assert found.memory["activations"] <= on_device.memory["activations"]


def test_a_host_holds_memory_that_a_device_frees() -> None:
    """Idle memory, which a device's allocator keeps itself, and scratch of gloo's reductions."""
    runs = [Run("custom function", "optim", checkpointing=True)]
    if hasattr(torch.UntypedStorage, "_swap_data_ptr_"):  # before 2.13 nothing is kept idle
        runs.append(Run("custom function", "optim_grads_params"))
    for run in runs:
        model = ALL_MODELS[run.name]
        on_device = fe.simulate(run.build, NUM_RANKS, batch=model.batch, **run.options)
        assert planned(run).peak_bytes > 1.02 * on_device.peak_bytes


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


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_statistics_of_norms_have_the_dtype_of_the_kernel(weights: torch.dtype) -> None:
    aten = torch.ops.aten
    x = torch.randn(2, 8, 4, 4, dtype=torch.bfloat16)
    w = torch.ones(8, dtype=weights)
    norms: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.native_batch_norm.default, (x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)),
        (aten.native_group_norm.default, (x, w, w, 2, 8, 16, 4, 1e-5)),
        (aten.native_layer_norm.default, (x, [4], w[:4], w[:4], 1e-5)),
    ]
    for norm, given in norms:
        kernel = [each.dtype for each in norm(*given)]
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = as_returned(norm, given, norm(*given))
        assert [each.dtype for each in found] == kernel


@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss", "huber_loss"]
)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_keeps_the_memory_that_the_kernel_keeps(name: str, reduction: str) -> None:
    loss = getattr(torch.ops.aten, name).default
    x = torch.rand(4, 8)
    number = ("none", "mean", "sum").index(reduction)
    given = (x, x, None, number) if name == "binary_cross_entropy" else (x, x, number)
    kernel = loss(*given)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = as_returned(loss, given, loss(*given))
    assert (found.shape, found.dtype) == (kernel.shape, kernel.dtype)
    assert found.untyped_storage().nbytes() == kernel.untyped_storage().nbytes()
