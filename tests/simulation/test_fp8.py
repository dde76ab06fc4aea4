"""Products in fp8, as torchao's float8 training has them: their time, and machines without them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.simulation.kernels import Kernels
from fsdp_engine.simulation.machine import Machine, Processor
from tests.simulation.scene import machine, network

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, WIDTH = 64, 128
PRODUCT = 2 * ROWS * WIDTH * WIDTH


class _Product(torch.autograd.Function):
    """A product in e4m3; gradients are in e5m2, as in torchao."""

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
    """A weight that multiplies in fp8; its own gradient is a product in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x * self.scale, self.weight)  # type: ignore[no-untyped-call]
        return product.sum()


def simulated(on: Machine) -> fe.Simulation:
    return fe.simulate(Float8Layer, 4, batch=torch.zeros(ROWS, WIDTH), machine=on, strategy="optim")


def test_products_take_the_time_of_fp8_in_both_formats() -> None:
    plain = machine(network(0.5))
    flops = {torch.float32: 1e9, E4M3: 4e9}
    processor = dataclasses.replace(plain.processor, matrix_flops=flops)
    found = simulated(dataclasses.replace(plain, processor=processor))
    # Forward in e4m3 and the input's gradient in e5m2; the weight's in fp32.
    seconds = 2 * PRODUCT / 4e9 + PRODUCT / 1e9
    assert found.compute_seconds == pytest.approx(seconds)
    assert found.model_flops == 3 * PRODUCT
    assert found.mfu == pytest.approx(seconds / found.seconds)


def test_casts_and_products_access_their_bytes() -> None:
    plain = machine(network(0.5))
    processor = Processor({torch.float32: 1e30, E4M3: 1e30}, 1e9, 1e12)
    found = simulated(dataclasses.replace(plain, processor=processor))
    spans: Counter[str] = Counter()
    for each in found.spans:
        spans[each.label] += each.end - each.start
    # Operands in fp8, two scales, a result in fp32; forward and the input's gradient.
    one = ROWS * WIDTH + WIDTH * WIDTH + 2 * 4 + 4 * ROWS * WIDTH
    assert spans["_scaled_mm"] == pytest.approx(2 * one / 1e9)
    # x and the gradient once each, the weight twice: 4 bytes of an element are read, 1 is written.
    casts = 5 * (2 * ROWS * WIDTH + 2 * WIDTH * WIDTH)
    assert spans["_to_copy"] == pytest.approx(casts / 1e9)


@pytest.mark.parametrize("on", [fe.A100, machine(network(0.5))], ids=["A100", "a host"])
def test_a_machine_without_fp8_raises(on: Machine) -> None:
    with pytest.raises(fe.SimulationError, match=r"forward failed.*expected matrix_flops of torch"):
        simulated(on)


@pytest.mark.parametrize(
    ("preset", "ratio"),
    [(fe.H100, 1.69), (fe.H200, 1.69), (fe.B200, 2)],
    ids=["h100", "h200", "b200"],
)
def test_presets_multiply_fp8_faster_than_bf16(preset: Machine, ratio: float) -> None:
    seconds = preset.processor.seconds
    in_bf16 = seconds(1e15, 0, torch.bfloat16)
    for dtype in (E4M3, E5M2):
        assert in_bf16 / seconds(1e15, 0, dtype) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("card", ["h100", "h200"])
def test_presets_have_the_measured_ratio_of_fp8_to_bf16(card: str) -> None:
    report = Path(__file__).parents[2] / "benchmarks" / "results" / f"{card}_machine.json"
    flops = json.loads(report.read_text())["processor"]["matrix_flops"]
    preset = fe.H100.processor.matrix_flops
    assert flops["float8_e4m3fn"] / flops["bfloat16"] == pytest.approx(
        preset[E4M3] / preset[torch.bfloat16], rel=0.01
    )


def test_fp8_is_measured() -> None:
    kernels = Kernels(torch.device("cpu"), 1.0, 0.02, lambda value: value)
    assert 1e7 < kernels.matrix_flops(E4M3) < 1e14
