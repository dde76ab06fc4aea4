"""The time of attention and of products: by size, by dtype, and in a step by hand."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Attention, Machine
from tests.planner.simulation.scene import plain_machine

BF16, F32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def with_figures(matrix_flops: Any = None, **figures: Any) -> Machine:
    """A machine on which only products take time, unless ``figures`` say otherwise."""
    plain = plain_machine()
    flops = matrix_flops or plain.processor.matrix_flops
    processor = dataclasses.replace(plain.processor, matrix_flops=flops, **figures)
    return dataclasses.replace(plain, processor=processor)


# Attention.

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# TFLOPS of FlashAttention-2 on H100 with 16k tokens and heads of 128; for causal attention, half of
# the flops are counted:
# J. Shah et al., "FlashAttention-3", arXiv:2407.08608, figures 5 and 6.
ATTENTION = {
    "forward": (309, 350, 362, 368, 370, 370),
    "causal": (191, 260, 298, 319, 333, 335),
    "backward": (214, 260, 291, 310, 318, 322),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_on_h100_takes_the_published_time_by_length(kind: str) -> None:
    for length, published in zip(LENGTHS, ATTENTION[kind], strict=True):
        shape = Attention(length, length, kind == "causal", kind == "backward")
        seconds = fe.H100.processor.seconds(1e15, 0, BF16, attention=shape)
        counted = 1e15 / 2 if kind == "causal" else 1e15
        assert counted / seconds == pytest.approx(published * 1e12, rel=0.16), length


def test_causal_attention_skips_blocks() -> None:
    for queries, keys, block, computed in (
        (4, 4, 1, 1 + 2 + 3 + 4),  # the triangle and its diagonal
        (4, 4, 2, 2 * 2 + 2 * 4),
        (4, 4, 3, 3 * 3 + 1 * 4),
        (4, 4, 8, 4 * 4),  # one block
        (2, 6, 1, 1 + 2),  # the queries are the first two of six positions
        (6, 2, 1, 1 + 2 + 2 * 4),
    ):
        share = Attention(queries, keys, is_causal=True).causal_share(block)
        assert share == pytest.approx(computed / (queries * keys))


class Attending(nn.Module):
    """Attention with one parameter; ``options`` are those of the attention function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.gelu(F.scaled_dot_product_attention(x, x, x, **self.options)).sum()


BATCH, HEADS, LENGTH, SIZE = SHAPE = 2, 3, 24, 8


def attending(machine: Machine, **options: Any) -> fe.Simulation:
    build = partial(Attending, **options)
    return fe.simulate(build, 2, batch=torch.zeros(SHAPE), machine=machine, strategy="no_shard")


def test_a_step_of_attention_by_hand() -> None:
    product = 2 * BATCH * HEADS * LENGTH**2 * SIZE
    shares = {"attention_share": 0.5, "attention_backward_share": 0.25}
    sizes = {"attention_length": LENGTH / 3, "causal_block": LENGTH / 4}
    # Two products in forward and five in backward, at 3/4 of the rate of long sequences.
    whole = (2 / 0.5 + 5 / 0.25) * product / 0.75 / 1e9
    full = attending(with_figures(**shares, **sizes))
    assert full.compute_seconds == pytest.approx(whole)
    causal = attending(with_figures(**shares, **sizes), is_causal=True)
    assert causal.compute_seconds == pytest.approx(whole * (1 + 2 + 3 + 4) / 16)
    # A mask of values skips nothing, and model flops count causal attention in full.
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    masked = attending(with_figures(**shares, **sizes), attn_mask=mask)
    assert masked.compute_seconds == pytest.approx(whole)
    assert causal.model_flops == full.model_flops == pytest.approx(6 * product)
    # By default backward has the speed of forward, and causal attention computes all scores.
    plain = attending(with_figures(attention_share=0.5, function_seconds=1e-3), is_causal=True)
    elements = BATCH * HEADS * LENGTH * SIZE
    seconds = 7 * product / 0.5 / 1e9 + 2 * 1e-3 * elements
    assert plain.compute_seconds == pytest.approx(seconds)


# Products.

INNER = (256, 512, 1024, 2048, 4096)
# TFLOPS of products in bf16 on H100 by inner size, for (matrices, rows, columns): OpenXLA,
# xla/service/gpu/model/matmul_interpolator_data.h, "sm_90".
PRODUCTS = {
    (1, 1024, 1024): (82, 146, 236, 350, 470),
    (1, 4096, 512): (142, 239, 371, 522, 650),
    (1, 2048, 2048): (213, 345, 494, 632, 738),
    (1, 4096, 4096): (392, 543, 677, 739, 783),
    (4, 4096, 2048): (458, 607, 688, 759, 809),
    (4, 4096, 4096): (504, 620, 726, 765, 793),
}
# Flops a second of very large products at the clock of that table.
RATE = 832e12


def test_products_on_h100_take_the_published_time_by_size() -> None:
    processor = dataclasses.replace(
        fe.H100.processor, matrix_flops={BF16: RATE, F32: RATE}, achievable_flops=1.0
    )
    for (matrices, rows, columns), published in PRODUCTS.items():
        elements = matrices * rows * columns
        for inner, teraflops in zip(INNER, published, strict=True):
            flops = 2.0 * elements * inner
            seconds = processor.seconds(flops, 0, BF16, product_elements=elements)
            assert flops / seconds == pytest.approx(teraflops * 1e12, rel=0.17), (elements, inner)
    flops, elements = 2.0 * 65536**3, 65536**2
    seconds = processor.seconds(flops, 0, BF16, product_elements=elements)
    assert flops / seconds == pytest.approx(RATE, rel=2e-3)


class Products(nn.Linear):
    """A linear, a batched product, and attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = (x @ x.transpose(1, 2)).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x).sum()


def test_a_step_of_products_by_hand() -> None:
    batch, rows = 3, 4
    base, by_product, by_element = (
        fe.simulate(
            lambda: Products(8, 16, bias=False),
            2,
            batch=torch.zeros(batch, rows, 8),
            machine=with_figures(**figures),
            strategy="no_shard",
        ).compute_seconds
        for figures in ({}, {"product_seconds": 1.0}, {"product_element_seconds": 1e-3})
    )
    # Five products: the linear and its weight's gradient; the batched product and its two
    # gradients.
    assert by_product == pytest.approx(base + 5.0)
    results = batch * rows * 16 + 16 * 8 + batch * rows * rows + 2 * batch * rows * 16
    assert by_element == pytest.approx(base + 1e-3 * results)


# fp8, as in torchao's float8 training.

ROWS, WIDTH = 64, 128
PRODUCT = 2 * ROWS * WIDTH * WIDTH


class Float8Product(torch.autograd.Function):
    """A product in e4m3; gradients are in e5m2, but that of the weight is a product in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(x.to(E4M3), weight.to(E4M3).t(), one, one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad, one = grads[0].to(E5M2), torch.ones((), device=x.device)
        by_columns = weight.to(E4M3).t().contiguous().t()
        of_x = torch._scaled_mm(grad, by_columns, one, one, out_dtype=x.dtype)
        return of_x, grads[0].t() @ x


class Float8Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Float8Product.apply(x * self.scale, self.weight).sum()


def in_float8(machine: Machine) -> fe.Simulation:
    batch = torch.zeros(ROWS, WIDTH)
    return fe.simulate(Float8Layer, 4, batch=batch, machine=machine, strategy="optim")


def test_products_take_the_time_of_fp8_in_both_formats() -> None:
    found = in_float8(with_figures({F32: 1e9, E4M3: 4e9}))
    # Forward in e4m3 and the input's gradient in e5m2; the weight's in fp32.
    seconds = 2 * PRODUCT / 4e9 + PRODUCT / 1e9
    assert found.compute_seconds == pytest.approx(seconds)
    assert found.model_flops == 3 * PRODUCT
    assert found.mfu == pytest.approx(seconds / found.seconds)


def test_a_machine_without_fp8_raises() -> None:
    with pytest.raises(fe.SimulationError, match=r"forward failed.*expected matrix_flops of torch"):
        in_float8(fe.A100)


def test_presets_have_the_ratio_of_fp8_to_bf16() -> None:
    """For H100 and H200 the ratio was measured."""
    for machine, ratio in ((fe.H100, 1.69), (fe.H200, 1.69), (fe.B200, 2)):
        seconds = partial(machine.processor.seconds, 1e15, 0)
        for dtype in (E4M3, E5M2):
            assert seconds(BF16) / seconds(dtype) == pytest.approx(ratio, rel=1e-3)
