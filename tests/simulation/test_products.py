"""The time of products by size: that of a product and of its result's elements beside flops."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.simulation.machine import Attention, Processor
from tests.simulation.scene import machine, network

BF16, F32 = torch.bfloat16, torch.float32
INNER = (256, 512, 1024, 2048, 4096)
# TFLOPS of products in bf16 on H100 by inner size, of so many (matrices, rows, columns): OpenXLA,
# xla/service/gpu/model/matmul_interpolator_data.h, "sm_90".
PUBLISHED = {
    (1, 1024, 1024): (82, 146, 236, 350, 470),
    (1, 4096, 512): (142, 239, 371, 522, 650),
    (1, 2048, 2048): (213, 345, 494, 632, 738),
    (1, 4096, 1024): (216, 344, 488, 632, 738),
    (1, 4096, 2048): (304, 447, 593, 716, 758),
    (1, 4096, 4096): (392, 543, 677, 739, 783),
    (2, 4096, 4096): (464, 608, 693, 763, 808),
    (4, 4096, 2048): (458, 607, 688, 759, 809),
    (4, 4096, 4096): (504, 620, 726, 765, 793),
}
# Flops a second of very large products at the clock of that table.
RATE = 832e12


@pytest.mark.parametrize("shape", PUBLISHED)
def test_products_on_h100_take_the_published_time_by_size(shape: tuple[int, int, int]) -> None:
    elements = shape[0] * shape[1] * shape[2]
    processor = dataclasses.replace(
        fe.H100.processor, matrix_flops={BF16: RATE, F32: RATE}, achievable_flops=1.0
    )
    for inner, published in zip(INNER, PUBLISHED[shape], strict=True):
        flops = 2.0 * elements * inner
        seconds = processor.seconds(flops, 0, BF16, product_elements=elements)
        assert flops / seconds == pytest.approx(published * 1e12, rel=0.17), inner


def test_large_products_reach_the_full_rate() -> None:
    processor = fe.H100.processor
    flops, elements = 2.0 * 65536**3, 65536**2
    seconds = processor.seconds(flops, 0, BF16, product_elements=elements)
    rate = processor.achievable_flops * processor.peak_flops(BF16)
    assert flops / seconds == pytest.approx(rate, rel=2e-3)


def test_attention_and_copies_are_not_products() -> None:
    processor = dataclasses.replace(
        Processor({F32: 1e9}, 1e8, 1e9), product_seconds=1.0, product_element_seconds=1e-3
    )
    assert processor.seconds(1e9, 0, F32, product_elements=500) == pytest.approx(2.5)
    assert processor.seconds(1e9, 0, F32, attention=Attention(8, 8)) == pytest.approx(1.0)
    assert processor.seconds(0, 1e8, F32) == pytest.approx(1.0)


class _Products(nn.Module):
    """A linear, a batched product, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = (x @ x.transpose(1, 2)).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x).sum()


def test_a_step_by_hand() -> None:
    plain = machine(network(0.5))
    batch, rows = 3, 4

    def seconds(**figures: float) -> float:
        processor = dataclasses.replace(plain.processor, **figures)
        found: float = fe.simulate(
            _Products,
            2,
            batch=torch.zeros(batch, rows, 8),
            machine=dataclasses.replace(plain, processor=processor),
            strategy="no_shard",
        ).compute_seconds
        return found

    base = seconds()
    # The linear and its weight's gradient; the batched product and two gradients.
    assert seconds(product_seconds=1.0) == pytest.approx(base + 5.0)
    results = batch * rows * 16 + 16 * 8 + batch * rows * rows + 2 * batch * rows * 16
    assert seconds(product_element_seconds=1e-3) == pytest.approx(base + 1e-3 * results)
