"""Memory of kernels of devices: what autograd keeps, temporary memory, and elements that are not
streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_engine as fe
from fsdp_engine.planner.simulation.device_kernels import device_kernels
from fsdp_engine.planner.simulation.memory_access import irregular_elements, scratch_bytes
from tests.planner.simulation.applied import attention, simulated_activations


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


LENGTH, SIZE, HEADS = 256, 64, 4
CPU = replace(fe.H100, host_runs_ahead=False)
ELEMENTS = LENGTH * SIZE


def kept(function: Callable[[Tensor], Tensor], machine: fe.Machine) -> int:
    """Bytes that one more block, a product and the function, keeps for backward."""
    few, many = (simulated_activations(function, LENGTH, SIZE, count, machine) for count in (3, 5))
    return (many - few) // 2


def test_attention_with_dropout_keeps_no_scores_on_a_device() -> None:
    scores = HEADS * LENGTH * LENGTH * 2
    without, dropping = (partial(attention, heads=HEADS, dropout=each) for each in (0.0, 0.1))
    assert kept(dropping, fe.H100) == kept(without, fe.H100)
    assert kept(dropping, CPU) > kept(without, CPU) + 2 * scores


def test_dropout_keeps_a_mask_of_bytes_on_a_device() -> None:
    without = kept(F.gelu, fe.H100)

    def dropping(x: Tensor, *, training: bool = True) -> Tensor:
        return F.dropout(F.gelu(x), 0.1, training)

    assert kept(dropping, fe.H100) == without + ELEMENTS
    assert kept(dropping, CPU) == without + 2 * ELEMENTS
    assert kept(partial(dropping, training=False), fe.H100) == without


def test_real_tensors_are_computed_as_ever_and_nothing_is_left() -> None:
    before = F.dropout, F.rms_norm, F.scaled_dot_product_attention, torch.rms_norm
    x = torch.randn(4, 8)
    expected = F.rms_norm(x, [8])
    with device_kernels():
        assert torch.equal(F.rms_norm(x, [8]), expected)
        assert torch.equal(torch.rms_norm(x, [8]), expected)
    assert before == (F.dropout, F.rms_norm, F.scaled_dot_product_attention, torch.rms_norm)


def test_rms_norm_keeps_its_input_on_a_device() -> None:
    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, [SIZE])

    # Kept: the product's input, which is the previous norm's output; the norm's input; four bytes
    # for each row.
    assert kept(norm, fe.H100) == 2 * 2 * ELEMENTS + 4 * LENGTH
    assert kept(norm, CPU) > 3 * 2 * ELEMENTS


ROWS, WIDTH = 8, 16
COUNT = ROWS * WIDTH
X = torch.randn(ROWS, WIDTH)
BY_HEAD = X.view(2, 4, 4, 4)


class Counted(TorchDispatchMode):
    """Sums irregular elements of operations."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found += irregular_elements(func, args, out)
        return out


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: X * X, 0),
        (lambda: X.t() + X.t(), 0),
        (lambda: X @ X.t(), 0),
        (lambda: X.sum(0), COUNT / 2),
        (lambda: torch.zeros_like(X).copy_(X), 0),
        (lambda: X.to(torch.bfloat16), 0),
        (lambda: X.bfloat16().float(), COUNT),
        (lambda: X + X.bfloat16(), COUNT),
        (lambda: X * X[0], COUNT),
        (lambda: X * X[:, :1], COUNT),
        (lambda: BY_HEAD.transpose(1, 2).contiguous(), COUNT),
        (lambda: X.t().contiguous(), 4 * COUNT),
        (lambda: X.t().bfloat16().contiguous(), 4 * COUNT),
        (lambda: X[:, :1].t().contiguous(), 4 * ROWS),
        (lambda: torch.stack((X, X)), 2 * 2 * COUNT),
        (lambda: BY_HEAD.transpose(1, 2) + BY_HEAD, COUNT),
        (lambda: torch.cat((X, X), -1), 2 * 2 * COUNT),
        (lambda: torch.softmax(X, -1), COUNT),
        (lambda: F.layer_norm(X, [WIDTH]), COUNT),
    ],
)
def test_elements_that_are_not_streamed(function: Callable[[], Tensor], expected: float) -> None:
    with Counted() as counted:
        function()
    assert counted.found == expected


def test_sums_over_rows_have_partial_sums() -> None:
    total = torch.ops.aten.sum.dim_IntList
    for rows, columns, expected in (
        (128, 4096, 0),  # too few rows for several thread blocks
        (512, 64, 8 * 512 * 64),
        (8192, 4096, 148 * 2**20),
        (2**16, 2**14, 2**29),
    ):
        x = torch.empty(rows, columns, device="meta", dtype=torch.bfloat16)
        assert scratch_bytes(total, (x, [0]), total(x, [0])) == expected
        assert scratch_bytes(total, (x, [1]), total(x, [1])) == 0
        assert scratch_bytes(total, (x, [0, 1]), total(x, [0, 1])) == 0


def test_a_bias_gradient_s_partial_sums_are_in_the_peak_of_a_device() -> None:
    rows, width = 4096, 1024

    def peak(bias: bool) -> int:
        def build() -> torch.nn.Module:
            return torch.nn.Sequential(*[torch.nn.Linear(width, width, bias) for _ in range(8)])

        batch = torch.zeros(rows, width)
        found = fe.simulate(build, 1, batch=batch, loss=Tensor.sum, strategy="no_shard")
        return found.peak_bytes

    assert peak(bias=True) - peak(bias=False) == pytest.approx(8 * rows * width, rel=0.05)


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_functions_within_functions_and_recomputations(checkpointing: bool | str) -> None:
    scores = HEADS * LENGTH * LENGTH * 4
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 2 * SIZE, 0.1, batch_first=True)
    options = {"batch": torch.zeros(1, LENGTH, SIZE), "loss": Tensor.sum}
    found = [
        fe.simulate(
            partial(nn.TransformerEncoder, layer, 2),
            2,
            machine=machine,
            checkpointing=checkpointing,
            **options,
        ).peak_bytes
        for machine in (fe.H100, CPU)
    ]
    assert found[0] + scores < found[1]


def test_attention_s_backward_sums_gradients_of_queries_in_fp32_on_devices() -> None:
    shape = (2, 4, 256, 64)

    def peak(machine: fe.Machine) -> int:
        options = {"strategy": "no_shard", "machine": machine}
        found = fe.simulate(_Attention, 1, batch=torch.zeros(shape), **options)
        return found.peak_bytes

    # At the peak there are the query, which is also key and value, the output, its gradient, and
    # three results.
    assert peak(fe.H100) - peak(CPU) == pytest.approx(4 * torch.zeros(shape).numel(), rel=0.01)
