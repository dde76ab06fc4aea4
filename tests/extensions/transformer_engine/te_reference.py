"""Transformer Engine's fp8 recipes for weights, written down again from their definitions.

    recipe     one scale for                     is
    delayed    the tensor                        given
    current    the tensor                        448 / amax
    block      128 x 128 elements                448 / amax, rounded down to a power of two
    mxfp8      1 x 32 (rows), 32 x 1 (columns)   amax / 448, rounded up to a power of two, inverted

Bytes are e4m3. Loops over blocks, and Python's exact arithmetic for powers of two: slow, and
unlike the tested code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MAX = 448.0
LARGEST = torch.finfo(torch.float32).max


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
    """``master``, (rows, columns), first rounded to the nominal dtype.

    Args:
        scale: of delayed scaling only.
    """
    assert (scale is not None) == (recipe == "delayed"), (recipe, scale)
    values = master.detach().to(nominal).float()
    amax = max(values.flatten().abs().tolist(), default=0.0)
    if recipe == "mxfp8":
        rows, columns = _mx_blocks(values, 1, 32), _mx_blocks(values, 32, 1)
        return Quantised(*rows, *columns, amax)
    size = (128, 128) if recipe == "block" else tuple(values.shape)
    shape = [math.ceil(n / part) for n, part in zip(values.shape, size, strict=True)]
    found, scale_inv = torch.empty_like(values, dtype=torch.uint8), torch.empty(shape)
    for place, block in _blocks(values, *size):
        factor = (
            torch.as_tensor(scale)
            if scale is not None
            else _scale(values[block], recipe == "block")
        )
        found[block] = _rounded(values[block] * factor)
        scale_inv[place] = 1 / factor
    return Quantised(found, scale_inv, found, scale_inv, amax)


def dequantise(data: Tensor, scale_inv: Tensor) -> Tensor:
    """fp32 values of bytes, by their scales: as many for each element of a row or column as there
    are, whole blocks first."""
    if scale_inv.dtype == torch.uint8:
        scale_inv = torch.pow(2.0, scale_inv.double() - 127).float()
    for dim, (count, length) in enumerate(zip(scale_inv.shape, data.shape, strict=True)):
        size = next(n for n in (1, 32, 128, length) if math.ceil(length / n) == count)
        scale_inv = scale_inv.repeat_interleave(size, dim).narrow(dim, 0, length)
    return data.view(torch.float8_e4m3fn).float() * scale_inv


def _blocks(
    values: Tensor, height: int, width: int
) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """(place among the blocks, the block's elements)."""
    tops, lefts = range(0, values.shape[0], height), range(0, values.shape[1], width)
    for top, left in itertools.product(tops, lefts):
        place = (top // height, left // width)
        yield place, (slice(top, top + height), slice(left, left + width))


def _scale(block: Tensor, power_of_two: bool) -> Tensor:
    amax = block.abs().max().item()
    if amax == 0 or math.isinf(amax):
        return torch.tensor(1.0)
    # Rounded to fp32 before it is rounded down.
    scale = torch.tensor(min(MAX / amax, LARGEST), dtype=torch.float32)
    return torch.tensor(2.0 ** (math.frexp(scale.item())[1] - 1)) if power_of_two else scale


def _rounded(scaled: Tensor) -> Tensor:
    return scaled.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _mx_blocks(values: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    found = torch.empty_like(values, dtype=torch.uint8)
    scales = torch.empty(values.shape[0] // height, values.shape[1] // width, dtype=torch.uint8)
    for place, block in _blocks(values, height, width):
        power = _power_above((values[block].abs().max() * torch.tensor(1 / MAX)).item())
        found[block] = _rounded(values[block] * 2.0**-power)
        scales[place] = power + 127
    return found, scales


def _power_above(value: float) -> int:
    """The smallest power of two that is no less, as far as e8m0 goes."""
    if value == 0:
        return -127
    fraction, power = math.frexp(value)
    return min(max(power - (fraction == 0.5), -127), 127)
