"""Torch in place of the CUDA kernels that Transformer Engine's Python tensor layer calls.

:func:`module` is a ``transformer_engine_torch`` whose functions compute, on a CPU, what those of
2.20.2 compute; ``te_on_cpu.py`` installs it. Where the real kernel checks something, so does
the one here, and where it leaves something behind, so does this:

    quantize                         with delayed scaling the new amax is the larger of it and the
                                     old one; the transpose is made if the quantizer asks for it
    fp8_block_scaling_partial_cast   writes whole 128x128 tiles: what of a tile lies outside the
                                     given range gets ``GARBAGE``
    multi_tensor_compute_scale_..    scales of blocks that do not exist become 1 (0 for e8m0)
    mxfp8_..                         amaxes must be bf16, so the weight's nominal dtype must be

All arithmetic is in fp32. Values are clamped before they are cast: torch 2.11 makes NaN of what
overflows, the kernels saturate.
"""

from __future__ import annotations

import enum
import math
import types
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MAX = 448.0
TILE = 128
# What the real kernel leaves there is whatever its shared memory held.
GARBAGE = 0xAA


class DType(enum.IntEnum):
    """The numbers of the library's dtypes."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TORCH_DTYPES = {
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


class _AnyName(type):
    """A class whose attributes are all 0: an enum whose members are not read here."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{cls.__name__} has no stand-in")


class Kernels(types.ModuleType):
    """A module in which every name can be imported and only the functions below be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyName(name, (), {})
        setattr(self, name, value)
        return value


def module() -> types.ModuleType:
    """A new ``transformer_engine_torch``."""
    made = Kernels("transformer_engine_torch")
    contents: list[Any] = [
        DType,
        compute_amax,
        multi_tensor_scale,
        multi_tensor_compute_scale_and_scale_inv,
        multi_tensor_compute_scale_inv_e8m0,
        fused_amax_and_scale_update_after_reduction,
        fp8_block_scaling_compute_partial_amax,
        fp8_block_scaling_partial_cast,
        mxfp8_scaling_compute_partial_amax,
        mxfp8_scaling_partial_cast,
        quantize,
        dequantize,
        fp8_transpose,
        create_empty_quantized_tensor,
    ]
    vars(made).update({each.__name__: each for each in contents})
    return made


# Values, scales and bytes.


def to_bytes(values: Tensor) -> Tensor:
    """fp32 values, already scaled, as e4m3 bytes."""
    assert values.dtype == torch.float32, values.dtype
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def scale_of(amax: Tensor, maximum: float, power_of_two: bool, epsilon: float) -> Tensor:
    """What values are multiplied with, by their amax: never zero, NaN or Inf."""
    floored = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(floored, maximum) / floored  # a number / a tensor rounds twice
    largest = torch.full_like(scale, torch.finfo(torch.float32).max)
    scale = torch.where(scale.isinf(), largest, scale)
    if power_of_two:  # without the mantissa
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return torch.where((floored == 0) | ~floored.isfinite(), torch.ones_like(scale), scale)


def exponent_of(amax: Tensor) -> Tensor:
    """The e8m0 byte: the smallest power of two, at least 2**-127, that brings amax to 448."""
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
    """A scale for every element of a matrix, of one for each block of (height, width)."""
    rows, columns = shape
    wide = scales.repeat_interleave(width, 1)[:, :columns]
    return wide.repeat_interleave(height, 0)[:rows]


def block_amax(matrix: Tensor, height: int, width: int) -> Tensor:
    """Largest absolute value of each block."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return blocks.abs().amax((1, 3))


def _in_matrix(part: Tensor, start: int, rows: int, columns: int) -> Tensor:
    """A matrix of zeros with ``part`` in it, as fp32."""
    assert 0 <= start <= start + part.numel() <= rows * columns, (start, part.numel())
    line = torch.zeros(rows * columns, dtype=torch.float32)
    line[start : start + part.numel()] = part.reshape(-1)
    return line.view(rows, columns)


def _check(condition: bool, text: str) -> None:
    """What NVTE_CHECK and TORCH_CHECK do."""
    if not condition:
        raise RuntimeError(text)


# Amaxes and scales of many tensors.


def compute_amax(values: Tensor, amax: Tensor) -> None:
    """Overwrites ``amax``."""
    _check(amax.numel() == 1 and amax.dtype == torch.float32, "amax must be one float")
    amax.copy_(values.abs().max().view_as(amax) if values.numel() else torch.zeros_like(amax))


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: float
) -> None:
    """Second list = first list x scale."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    lists: list[list[Tensor]],
    maximum: float,
    power_of_two: bool,
    epsilon: float,
) -> None:
    """(amaxes, scales, reciprocals), all fp32."""
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, maximum, power_of_two, epsilon))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, unused: None, lists: list[list[Tensor]]
) -> None:
    """(amaxes, e8m0 bytes)."""
    _check(lists[0][0].dtype == torch.bfloat16, "amax should be bf16")
    for amax, scale_inv in zip(*lists, strict=True):
        scale_inv.copy_(exponent_of(amax))


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor,
    histories: list[Tensor],
    scales: list[Tensor],
    algorithm: str,
    dtype: int,
    margin: float,
) -> None:
    """Delayed scaling at a step's end. Row 0 of a history is this step's, ``amaxes`` takes its
    place; the others are older, from row 1, the oldest, on."""
    _check(algorithm in ("max", "most_recent"), "unsupported amax compute algorithm")
    maximum = MAX if dtype == DType.kFloat8E4M3 else 57344.0
    for amax, history, scale in zip(
        amaxes.split([scale.numel() for scale in scales]), histories, scales, strict=True
    ):
        rolled = torch.cat([history[1:], amax[None]])
        seen = rolled.amax(0) if algorithm == "max" else amax
        new = scale_of(seen, maximum * 2.0**-margin, False, 0.0)
        scale.copy_(torch.where((seen > 0) & seen.isfinite(), new, scale))
        rolled[0] = 0
        history.copy_(rolled)


# Parts of a weight, from ``start`` on.


def fp8_block_scaling_compute_partial_amax(
    part: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """Amax of each tile over what of it lies in the part."""
    _check(block == TILE, "Currently only block_len = 128 is supported")
    _check(part.dtype in (torch.float32, torch.bfloat16), "must be a float or bfloat16 tensor")
    found = block_amax(_in_matrix(part, start, rows, columns), TILE, TILE)
    amax[: found.shape[0], : found.shape[1]] = found


def fp8_block_scaling_partial_cast(
    part: Tensor,
    out: Tensor,
    scale: Tensor,
    rows: int,
    columns: int,
    start: int,
    block: int,
    dtype: int,
) -> None:
    """Casts the part, and spoils the rest of every tile that it touches: the kernel takes ``out``
    for a slice of the whole weight, the rest of which is about to be gathered."""
    _check(block == TILE and dtype == DType.kFloat8E4M3, "128x128 blocks of e4m3 only")
    _check(out.dtype == torch.uint8 and out.is_contiguous(), "out must be contiguous bytes")
    stop = start + part.numel()
    if stop == start:
        return
    _spoil_tiles(out, rows, columns, start, stop)
    first, last = start // columns, (stop - 1) // columns + 1
    scales = spread(scale[first // TILE :], TILE, TILE, (last - first // TILE * TILE, columns))
    line = scales.reshape(-1)[start - first // TILE * TILE * columns :][: stop - start]
    out.view(-1).copy_(to_bytes(part.reshape(-1).float() * line))


def _spoil_tiles(out: Tensor, rows: int, columns: int, start: int, stop: int) -> None:
    index = torch.arange(rows * columns).view(rows, columns)
    inside = (index >= start) & (index < stop)
    touched = block_amax(inside.to(torch.uint8), TILE, TILE)
    outside = (spread(touched, TILE, TILE, (rows, columns)).bool() & ~inside).view(-1).nonzero()
    if not outside.numel():
        return
    places = outside.view(-1) - start + out.storage_offset()
    low, high = int(places.min()), int(places.max())
    size = out.untyped_storage().nbytes()
    if low < 0 or high >= size:
        raise AssertionError(
            f"the block recipe's cast of elements {start} to {stop} of a weight of {rows} x "
            f"{columns} writes outside the buffer: bytes {low} to {high} of {size}"
        )
    torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage()).index_fill_(0, places, GARBAGE)


def mxfp8_scaling_compute_partial_amax(
    part: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, columns: int, start: int
) -> None:
    """Amax of each 1x32 and of each 32x1 block over what of it lies in the part."""
    _check(rows % 32 == 0, "rows must be divisible by 32")
    _check(columns % 32 == 0, "cols must be divisible by 32")
    _check(part.ndim == 1, "input must be a 1D tensor")
    _check(amax_rowwise.dtype == part.dtype, "Wrong dtype of amax_rowwise")
    _check(amax_rowwise.shape[0] % 128 == 0, "Wrong padding of amax_rowwise's rows")
    _check(amax_colwise.shape[1] % 128 == 0, "Wrong padding of amax_colwise's cols")
    matrix = _in_matrix(part, start, rows, columns)
    amax_rowwise[:rows, : columns // 32] = block_amax(matrix, 1, 32)
    amax_colwise[: rows // 32, :columns] = block_amax(matrix, 32, 1)


def mxfp8_scaling_partial_cast(
    part: Tensor,
    out_rowwise: Tensor,
    out_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: int,
    columns: int,
    start: int,
) -> None:
    """Casts the part into both encodings, and writes nothing else."""
    _check(part.ndim == out_rowwise.ndim == out_colwise.ndim == 1, "must be 1D tensors")
    _check(part.numel() == out_rowwise.numel() == out_colwise.numel(), "sizes mismatch")
    values = part.float()
    for out, scales in zip(
        (out_rowwise, out_colwise),
        _element_scales(scale_inv_rowwise, scale_inv_colwise, (rows, columns), -1),
        strict=True,
    ):
        out.copy_(to_bytes(values * scales.reshape(-1)[start : start + part.numel()]))


def _element_scales(
    rowwise: Tensor, colwise: Tensor, shape: tuple[int, int], sign: int
) -> tuple[Tensor, Tensor]:
    return (
        spread(power_of(rowwise[:, : shape[1] // 32], sign), 1, 32, shape),
        spread(power_of(colwise[: shape[0] // 32], sign), 32, 1, shape),
    )


# Whole tensors.


def fp8_transpose(data: Tensor, dtype: int, out: Tensor | None = None) -> Tensor:
    """Bytes transposed, into ``out`` if there is one."""
    _check(data.ndim >= 2, "Need at least 2D tensor to transpose.")
    transposed = data.reshape(-1, data.shape[-1]).t().contiguous()
    if out is None:
        return transposed
    out.view(transposed.shape).copy_(transposed)
    return out


def quantize(
    values: Tensor, quantizer: Any, out: Any = None, noop_flag: Tensor | None = None
) -> Any:
    """Quantises into ``out``, or a new tensor: the encodings that the quantizer is to make."""
    from transformer_engine.pytorch.tensor import (
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
    )

    _check(noop_flag is None, "no stand-in for noop_flag")
    _check(int(quantizer.dtype) == DType.kFloat8E4M3, "no stand-in but for e4m3")
    values = values.detach()
    if out is None:
        out = create_empty_quantized_tensor(
            quantizer, list(values.shape), values.dtype, values.device, False
        )
    if isinstance(quantizer, Float8Quantizer):
        if quantizer.amax.numel() and values.numel():
            amax = values.abs().max().float().view(quantizer.amax.shape)
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax))
        _fill_float8(values, quantizer, quantizer.scale, out)
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        _check(not quantizer.with_amax_reduction, "no stand-in for amax reduction")
        amax = torch.zeros(1)
        compute_amax(values, amax)
        options = (quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        _fill_float8(values, quantizer, scale_of(amax, MAX, *options), out)
    elif isinstance(quantizer, Float8BlockQuantizer):
        _fill_block(values, quantizer, out)
    elif isinstance(quantizer, MXFP8Quantizer):
        _fill_mxfp8(values, quantizer, out)
    else:
        raise NotImplementedError(f"no stand-in for {type(quantizer).__name__}")
    return out


def _fill_float8(values: Tensor, quantizer: Any, scale: Tensor, out: Any) -> None:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    out._data.copy_(to_bytes(values.float() * scale).view(out._data.shape))
    out._scale_inv.copy_((1 / scale).view(out._scale_inv.shape))
    if quantizer.columnwise_usage and not is_non_tn_fp8_gemm_supported():
        transposed = out._data.reshape(-1, out._data.shape[-1]).t()
        if out._transpose is None:
            out._transpose = torch.empty_like(transposed).contiguous()
        out._transpose.copy_(transposed.reshape(out._transpose.shape))
        out._transpose_invalid = False
    else:
        out._transpose, out._transpose_invalid = None, True


def _fill_block(values: Tensor, quantizer: Any, out: Any) -> None:
    _check(quantizer.block_scaling_dim == 2, "no stand-in for 1x128 blocks")
    matrix = values.reshape(-1, values.shape[-1]).float()
    amax = block_amax(matrix, TILE, TILE)
    scale = scale_of(amax, MAX, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = to_bytes(matrix * spread(scale, TILE, TILE, tuple(matrix.shape)))
    rows, columns = scale.shape
    if out._rowwise_data is not None:
        out._rowwise_data.copy_(data.view(out._rowwise_data.shape))
        out._rowwise_scale_inv[:rows, :columns] = 1 / scale
    if out._columnwise_data is not None:
        out._columnwise_data.copy_(data.t().reshape(out._columnwise_data.shape))
        out._columnwise_scale_inv[:columns, :rows] = (1 / scale).t()


def _fill_mxfp8(values: Tensor, quantizer: Any, out: Any) -> None:
    _check(not quantizer.with_2d_quantization, "no stand-in for 32x32 blocks")
    _check(not quantizer.optimize_for_gemm, "no stand-in for swizzled scales")
    matrix = values.reshape(-1, values.shape[-1]).float()
    rows, columns = matrix.shape
    if out._rowwise_data is not None:
        exponent = exponent_of(block_amax(matrix, 1, 32))
        scales = spread(power_of(exponent, -1), 1, 32, (rows, columns))
        out._rowwise_data.copy_(to_bytes(matrix * scales).view(values.shape))
        out._rowwise_scale_inv[:rows, : columns // 32] = exponent
    if out._columnwise_data is not None:
        exponent = exponent_of(block_amax(matrix, 32, 1))
        scales = spread(power_of(exponent, -1), 32, 1, (rows, columns))
        out._columnwise_data.copy_(to_bytes(matrix * scales).view(values.shape))
        out._columnwise_scale_inv[: rows // 32, :columns] = exponent


def dequantize(tensor: Any, dtype: int) -> Tensor:
    """An MXFP8 tensor's values, of its row encoding if it has one. (Float8Tensor and
    Float8BlockwiseQTensor do it in torch themselves.)"""
    in_rows = tensor._rowwise_data is not None
    data = tensor._rowwise_data if in_rows else tensor._columnwise_data
    rows, columns = math.prod(data.shape[:-1]), data.shape[-1]
    if in_rows:
        blocks = power_of(tensor._rowwise_scale_inv[:, : columns // 32], 1)
        scales = spread(blocks, 1, 32, (rows, columns))
    else:
        blocks = power_of(tensor._columnwise_scale_inv[: rows // 32], 1)
        scales = spread(blocks, 32, 1, (rows, columns))
    values = data.view(torch.float8_e4m3fn).float() * scales.view(data.shape)
    return values.to(TORCH_DTYPES[DType(int(dtype))])


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A quantised tensor with the encodings that its quantizer makes. Scales are zero, as those of
    blocks that do not exist stay."""
    from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    _check(not quantizer.internal and not pin_memory, "no stand-in for internal or pinned tensors")
    size = torch.Size(shape)
    if isinstance(quantizer, Float8Quantizer):
        keep = quantizer.columnwise_usage and not is_non_tn_fp8_gemm_supported()
        options = {"dtype": torch.uint8, "device": device}
        transposed = torch.empty((size[-1], *size[:-1]), **options) if keep else None
        return Float8Tensor(
            shape=size,
            dtype=dtype,
            data=torch.empty(size, **options),
            fp8_scale_inv=torch.zeros(1, device=device),
            fp8_dtype=quantizer.dtype,
            data_transpose=transposed,
            quantizer=quantizer,
            device=device,
        )
    inner = quantizer.alloc_tensors(size, device=device)
    for name, tensor in inner.items():
        if "scale" in name:
            tensor.zero_()
    context = quantizer.create_metadata(size, dtype=dtype)
    return context["cls"].__tensor_unflatten__(inner, context, size, None)
