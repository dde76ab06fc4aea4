"""Functions that are one kernel on devices: what autograd keeps of them, by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.simulation.device_kernels import device_kernels
from tests.simulation.applied import attention, simulated_activations

ROWS, WIDTH, HEADS = 256, 64, 4
CPU = replace(fe.H100, host_runs_ahead=False)
ELEMENTS = ROWS * WIDTH


def kept(function: Callable[[Tensor], Tensor], machine: fe.Machine) -> int:
    """Bytes that a further block keeps for backward: of its product and of the function."""
    few, many = (simulated_activations(function, ROWS, WIDTH, count, machine) for count in (4, 8))
    return (many - few) // 4


def test_attention_with_dropout_keeps_no_scores_on_a_device() -> None:
    scores = HEADS * ROWS * ROWS * 2
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


class Dropping(nn.Module):
    """Functions that call those that are replaced, in a forward that backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 2 * WIDTH, 0.1, batch_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x[None])[0]
        return x.sum()


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_functions_within_functions_and_recomputations(checkpointing: bool | str) -> None:
    scores = HEADS * ROWS * ROWS * 4
    found = [
        fe.simulate(
            Dropping,
            2,
            batch=torch.zeros(ROWS, WIDTH),
            machine=machine,
            checkpointing=checkpointing,
        ).peak_bytes
        for machine in (fe.H100, CPU)
    ]
    assert found[0] + scores < found[1]


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
        return F.rms_norm(x, [WIDTH])

    # The product's input, which is the output of the norm before; the norm's input, and four bytes
    # of each row.
    assert kept(norm, fe.H100) == 2 * 2 * ELEMENTS + 4 * ROWS
    assert kept(norm, CPU) > 3 * 2 * ELEMENTS


def test_rms_norm_of_two_dtypes_has_no_kernel() -> None:
    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, [WIDTH], torch.ones(WIDTH))

    assert kept(norm, fe.H100) == kept(norm, CPU)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    assert kept(lambda x: F.dropout(F.gelu(x), p), fe.H100) == kept(
        lambda x: F.dropout(F.gelu(x), p), CPU
    )
