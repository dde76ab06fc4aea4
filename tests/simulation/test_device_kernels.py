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

ROWS, WIDTH, HEADS = 256, 64, 4
CPU = replace(fe.H100, host_runs_ahead=False)
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ELEMENTS = ROWS * WIDTH


class Applied(nn.Module):
    """A function of weights times the input, that many times, whose outputs the last loss keeps."""

    def __init__(self, function: Callable[[Tensor], Tensor], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.function(block(x))
        return x.sum()


def kept(function: Callable[[Tensor], Tensor], machine: fe.Machine) -> int:
    """Bytes that a further block keeps for backward: of its product and of the function."""
    peaks = []
    for count in (4, 8):
        found = fe.simulate(
            partial(Applied, function, count),
            2,
            batch=torch.zeros(ROWS, WIDTH),
            machine=machine,
            strategy="no_shard",
            mp_policy=BF16,
        )
        peaks.append(max(activations for _, (*_, activations) in found.memory_series))
    return (peaks[1] - peaks[0]) // 4


def attention(x: Tensor, dropout: float) -> Tensor:
    x = x.view(1, ROWS, HEADS, -1).transpose(1, 2)
    x = F.scaled_dot_product_attention(x, x, x, None, dropout, is_causal=True)
    return x.transpose(1, 2).reshape(ROWS, WIDTH)


def test_attention_with_dropout_keeps_no_scores_on_a_device() -> None:
    scores = HEADS * ROWS * ROWS * 2
    without, dropping = (partial(attention, dropout=each) for each in (0.0, 0.1))
    assert kept(dropping, fe.H100) == kept(without, fe.H100)
    assert kept(dropping, CPU) > kept(without, CPU) + 2 * scores


def test_dropout_keeps_a_mask_of_bytes_on_a_device() -> None:
    without = kept(F.gelu, fe.H100)
    dropping = partial(F.dropout, p=0.1)
    assert kept(lambda x: dropping(F.gelu(x)), fe.H100) == without + ELEMENTS
    assert kept(lambda x: dropping(F.gelu(x)), CPU) == without + 2 * ELEMENTS
    assert kept(lambda x: dropping(F.gelu(x), training=False), fe.H100) == without


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
