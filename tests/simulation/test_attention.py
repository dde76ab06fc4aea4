"""The time of attention by length, of its backward, and of causal attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.simulation.machine import Attention, Processor
from tests.simulation.scene import machine, network

BF16, F32 = torch.bfloat16, torch.float32
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOPS of FlashAttention-2 on H100 with 16k tokens and heads of 128, of half the flops if causal:
# J. Shah et al., "FlashAttention-3", arXiv:2407.08608, figures 5 and 6.
PUBLISHED = {
    "forward": (309, 350, 362, 368, 370, 370),
    "causal": (191, 260, 298, 319, 333, 335),
    "backward": (214, 260, 291, 310, 318, 322),
}
BATCH, HEADS, LENGTH, SIZE = 2, 3, 24, 8


@pytest.mark.parametrize("kind", PUBLISHED)
def test_attention_on_h100_takes_the_published_time_by_length(kind: str) -> None:
    for length, published in zip(LENGTHS, PUBLISHED[kind], strict=True):
        shape = Attention(length, length, kind == "causal", kind == "backward")
        seconds = fe.H100.processor.seconds(1e15, 0, BF16, attention=shape)
        counted = 1e15 / 2 if kind == "causal" else 1e15
        assert counted / seconds == pytest.approx(published * 1e12, rel=0.16), length


@pytest.mark.parametrize(
    ("queries", "keys", "block", "computed"),
    [
        (4, 4, 1, 1 + 2 + 3 + 4),  # the triangle and its diagonal
        (4, 4, 2, 2 * 2 + 2 * 4),
        (4, 4, 3, 3 * 3 + 1 * 4),
        (4, 4, 8, 4 * 4),  # one block
        (2, 6, 1, 1 + 2),  # queries are the first ones
        (6, 2, 1, 1 + 2 + 2 * 4),
    ],
)
def test_causal_attention_skips_blocks(queries: int, keys: int, block: int, computed: int) -> None:
    share = Attention(queries, keys, is_causal=True).causal_share(block)
    assert share == pytest.approx(computed / (queries * keys))


class _Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x, **self.options).sum()


def _simulated(processor: Processor, **options: Any) -> fe.Simulation:
    plain = machine(network(0.5))
    return fe.simulate(
        lambda: _Attention(**options),
        2,
        batch=torch.zeros(BATCH, HEADS, LENGTH, SIZE),
        machine=dataclasses.replace(plain, processor=processor),
        strategy="no_shard",
    )


def test_a_step_by_hand() -> None:
    product = 2 * BATCH * HEADS * LENGTH**2 * SIZE
    processor = dataclasses.replace(
        machine(network(0.5)).processor,
        attention_share=0.5,
        attention_backward_share=0.25,
        attention_length=LENGTH / 3,
        causal_block=LENGTH / 4,
    )
    # Two products in forward and five in backward, at 3/4 of the rate of long sequences.
    whole = (2 / 0.5 + 5 / 0.25) * product / 0.75 / 1e9
    full = _simulated(processor)
    assert full.compute_seconds == pytest.approx(whole)
    causal = _simulated(processor, is_causal=True)
    assert causal.compute_seconds == pytest.approx(whole * (1 + 2 + 3 + 4) / 16)
    # A mask of values skips nothing, and model flops count causal attention in full.
    masked = _simulated(processor, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    assert masked.compute_seconds == pytest.approx(whole)
    assert causal.model_flops == full.model_flops == pytest.approx(6 * product)


def test_without_figures_backward_is_as_forward_and_causal_attention_counts_in_full() -> None:
    processor = dataclasses.replace(machine(network(0.5)).processor, attention_share=0.5)
    product = 2 * BATCH * HEADS * LENGTH**2 * SIZE
    found = _simulated(processor, is_causal=True)
    assert found.compute_seconds == pytest.approx(7 * product / 0.5 / 1e9)
