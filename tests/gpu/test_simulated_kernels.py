"""Compares memory that autograd keeps for kernels on a CUDA device with simulations. Skipped where
there is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fsdp_engine as fe
from tests.gpu.scene import ON_GPU, requested_bytes
from tests.planner.simulation.applied import Applied, attention, simulated_activations

pytestmark = ON_GPU

ROWS, WIDTH, HEADS = 4096, 512, 8


def kept(function: Callable[[Tensor], Tensor], count: int) -> int:
    model = Applied(function, WIDTH, count).to("cuda", torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    before = requested_bytes("current")
    loss = model(x)
    found = requested_bytes("current") - before
    loss.backward()
    return found


def simulated(function: Callable[[Tensor], Tensor], count: int) -> int:
    return simulated_activations(function, ROWS, WIDTH, count, fe.H100)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.rms_norm(x, [WIDTH]),
        lambda x: F.layer_norm(x, [WIDTH]),
        lambda x: F.dropout(F.gelu(x), 0.1),
        partial(attention, heads=HEADS, dropout=0.0),
        partial(attention, heads=HEADS, dropout=0.1),
    ],
    ids=["rms_norm", "layer_norm", "dropout", "attention", "attention with dropout"],
)
def test_a_block_keeps_what_a_simulation_says(function: Callable[[Tensor], Tensor]) -> None:
    measured, planned = (
        (bytes_of(function, 8) - bytes_of(function, 4)) / 4 for bytes_of in (kept, simulated)
    )
    assert planned == pytest.approx(measured, rel=0.01)
