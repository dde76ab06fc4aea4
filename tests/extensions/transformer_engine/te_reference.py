"""Transformer Engine's fp8 recipes for weights, in plain torch from their definitions.

    recipe     one scale for                     is
    delayed    the tensor                        given
    current    the tensor                        448 / amax
    block      128 x 128 elements                448 / amax, rounded down to a power of two
    mxfp8      1 x 32 (rows), 32 x 1 (columns)   amax / 448, rounded up to a power of two, inverted

Bytes are e4m3. All arithmetic is in fp32. Values are clamped before they are cast: torch 2.11 makes
NaN of what overflows, the kernels saturate.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MAX = 448.0
TILE = 128


class Quantised(NamedTuple):
    """One weight's bytes and scales, in the weight's orientation and without padding.

    Attributes:
        row_bytes: (rows, columns), what forward reads.
        row_scale_inv: fp32, or the bytes of e8m0, one for each block.
        column_bytes: (rows, columns), what backward reads; None where it is not there.
        column_scale_inv: its scales.
        amax: largest absolute value in the nominal dtype; None if it was not requested.
    """

    row_bytes: Tensor
    row_scale_inv: Tensor
    column_bytes: Tensor | None
    column_scale_inv: Tensor | None
    amax: float | None = None


def quantise(
    master: Tensor,
    recipe: str,
    nominal: torch.dtype = torch.bfloat16,
    scale: float | Tensor | None = None,
) -> Quantised:
    """Rounds ``master``, (rows, columns), to the nominal dtype, and quantises it.

    Args:
        scale: The scale of delayed scaling; None for other recipes.
    """
    assert (scale is not None) == (recipe == "delayed"), (recipe, scale)
    values = master.detach().to(nominal).float()
    rows, columns = values.shape
    amax = values.abs().max().item() if values.numel() else 0.0
    if recipe == "mxfp8":
        return Quantised(*_by_powers(values, 1, 32), *_by_powers(values, 32, 1), amax)
    block = (TILE, TILE) if recipe == "block" else (rows, columns)
    if scale is None:
        factors = scale_of(block_amax(values, *block), recipe == "block")
    else:
        factors = torch.as_tensor(scale, dtype=torch.float32).view(1, 1)
    data = to_bytes(values * spread(factors, *block, (rows, columns)))
    return Quantised(data, 1 / factors, data, 1 / factors, amax)


def _by_powers(values: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    exponents = exponent_of(block_amax(values, height, width))
    scales = spread(power_of(exponents, -1), height, width, tuple(values.shape))
    return to_bytes(values * scales), exponents


def dequantise(data: Tensor, scale_inv: Tensor) -> Tensor:
    """fp32 values of bytes, by their scales. The number of scales of a dimension gives its block
    size."""
    if scale_inv.dtype == torch.uint8:
        scale_inv = power_of(scale_inv, 1)
    for dim, (count, length) in enumerate(zip(scale_inv.shape, data.shape, strict=True)):
        size = next(n for n in (1, 32, TILE, length) if math.ceil(length / n) == count)
        scale_inv = scale_inv.repeat_interleave(size, dim).narrow(dim, 0, length)
    return data.view(torch.float8_e4m3fn).float() * scale_inv


def to_bytes(values: Tensor) -> Tensor:
    """fp32 values, already scaled, as e4m3 bytes."""
    assert values.dtype == torch.float32, values.dtype
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def scale_of(amax: Tensor, power_of_two: bool, maximum: float = MAX) -> Tensor:
    """Factors for values, by their amax: never zero, NaN or Inf."""
    scale = torch.full_like(amax, maximum) / amax  # a number / a tensor rounds twice
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:  # without the mantissa
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), torch.ones_like(scale), scale)


def exponent_of(amax: Tensor) -> Tensor:
    """The e8m0 byte of the smallest power of two, from 2**-127 on, that is at least amax / 448."""
    value = amax.float() * (1 / torch.tensor(MAX))
    bits = value.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    denormal_fits = (exponent == 0) & (mantissa <= 0x400000)
    up = (mantissa > 0) & (exponent != 254) & ~denormal_fits
    exponent = torch.where(value == 0, torch.zeros_like(exponent), exponent + up.int())
    exponent = torch.where(value.isinf(), torch.full_like(exponent, 254), exponent)
    return torch.where(value.isnan(), torch.full_like(exponent, 255), exponent).to(torch.uint8)


def power_of(exponent: Tensor, sign: int) -> Tensor:
    """2 to the (signed) power that an e8m0 byte means, in fp32."""
    return torch.pow(2.0, sign * (exponent.double() - 127)).float()


def spread(scales: Tensor, height: int, width: int, shape: tuple[int, int]) -> Tensor:
    """Expand one scale per block of (height, width) to all elements of a matrix."""
    wide = scales.repeat_interleave(width, 1)[:, : shape[1]]
    return wide.repeat_interleave(height, 0)[: shape[0]]


def block_amax(matrix: Tensor, height: int, width: int) -> Tensor:
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return blocks.abs().amax((1, 3))
