"""Torch in place of the CUDA kernels that Transformer Engine's Python tensor layer calls.

:func:`module` is a ``transformer_engine_torch`` whose functions compute, on a CPU, what those of
2.20.2 compute; ``te_on_cpu.py`` installs it. Where the real kernel leaves something behind, so does
this:

    quantize                         with delayed scaling the quantizer's amax can only grow;
                                     the transpose is made if the quantizer asks for it
    fp8_block_scaling_partial_cast   writes whole 128x128 tiles: elements of a tile outside of
                                     the given range get ``GARBAGE``
    multi_tensor_compute_scale_..    scales of blocks that do not exist become 1 (0 for e8m0)
    mxfp8_..                         amaxes, and so the weight's nominal dtype, must be bf16
"""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import Tensor

from tests.extensions.transformer_engine.te_reference import (
    TILE,
    Quantised,
    block_amax,
    dequantise,
    exponent_of,
    power_of,
    quantise,
    scale_of,
    spread,
    to_bytes,
)

# The real kernel leaves arbitrary contents of its shared memory there.
GARBAGE = 0xAA


class DType(enum.IntEnum):
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
    made = Kernels("transformer_engine_torch")
    contents: list[Any] = [
        DType,
        compute_amax,
        multi_tensor_scale,
        multi_tensor_compute_scale_and_scale_inv,
        multi_tensor_compute_scale_inv_e8m0,
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


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


# Amaxes and scales of many tensors.


def compute_amax(values: Tensor, amax: Tensor) -> None:
    amax.copy_(values.abs().max().view_as(amax) if values.numel() else torch.zeros_like(amax))


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], scale: float
) -> None:
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
    _check(epsilon == 0, "no stand-in for an epsilon")
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, power_of_two, maximum))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, unused: None, lists: list[list[Tensor]]
) -> None:
    _check(lists[0][0].dtype == torch.bfloat16, "amax should be bf16")
    for amax, scale_inv in zip(*lists, strict=True):
        scale_inv.copy_(exponent_of(amax))


# Parts of a weight, from ``start`` on.


def _in_matrix(part: Tensor, start: int, rows: int, columns: int) -> Tensor:
    assert 0 <= start <= start + part.numel() <= rows * columns, (start, part.numel())
    line = torch.zeros(rows * columns, dtype=torch.float32)
    line[start : start + part.numel()] = part.reshape(-1)
    return line.view(rows, columns)


def fp8_block_scaling_compute_partial_amax(
    part: Tensor, amax: Tensor, rows: int, columns: int, start: int, block: int
) -> None:
    """Amax of each tile over its elements in the part."""
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
    """Casts the part, and spoils the rest of every tile that it touches: the kernel assumes that
    ``out`` is a slice of the whole weight, and that the rest is gathered later."""
    _check(out.dtype == torch.uint8 and out.is_contiguous(), "out must be contiguous bytes")
    stop = start + part.numel()
    if stop == start:
        return
    _spoil_tiles(out, rows, columns, start, stop)
    line = spread(scale, TILE, TILE, (rows, columns)).reshape(-1)[start:stop]
    out.view(-1).copy_(to_bytes(part.reshape(-1).float() * line))


def _spoil_tiles(out: Tensor, rows: int, columns: int, start: int, stop: int) -> None:
    index = torch.arange(rows * columns).view(rows, columns)
    inside = (index >= start) & (index < stop)
    touched = block_amax(inside.to(torch.uint8), TILE, TILE)
    outside = (spread(touched, TILE, TILE, (rows, columns)).bool() & ~inside).view(-1).nonzero()
    if not outside.numel():
        return
    places = outside.view(-1) - start + out.storage_offset()
    low, high, size = int(places.min()), int(places.max()), out.untyped_storage().nbytes()
    assert 0 <= low <= high < size, f"cast outside the buffer: bytes {low} to {high} of {size}"
    torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage()).index_fill_(0, places, GARBAGE)


def mxfp8_scaling_compute_partial_amax(
    part: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, columns: int, start: int
) -> None:
    """Amax of each 1x32 and of each 32x1 block over its elements in the part."""
    _check(rows % 32 == columns % 32 == 0, "rows and cols must be divisible by 32")
    _check(part.ndim == 1, "input must be a 1D tensor")
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
    _check(part.numel() == out_rowwise.numel() == out_colwise.numel(), "sizes mismatch")
    for out, scale_inv, block in (
        (out_rowwise, scale_inv_rowwise[:, : columns // 32], (1, 32)),
        (out_colwise, scale_inv_colwise[: rows // 32], (32, 1)),
    ):
        scales = spread(power_of(scale_inv, -1), *block, (rows, columns)).reshape(-1)
        out.copy_(to_bytes(part.float() * scales[start : start + part.numel()]))


# Whole tensors.


def fp8_transpose(data: Tensor, dtype: int, out: Tensor | None = None) -> Tensor:
    transposed = data.reshape(-1, data.shape[-1]).t().contiguous()
    if out is None:
        return transposed
    out.view(transposed.shape).copy_(transposed)
    return out


_RECIPES = {
    "Float8Quantizer": "delayed",
    "Float8CurrentScalingQuantizer": "current",
    "Float8BlockQuantizer": "block",
    "MXFP8Quantizer": "mxfp8",
}


def quantize(
    values: Tensor, quantizer: Any, out: Any = None, noop_flag: Tensor | None = None
) -> Any:
    """Quantises into ``out``, or into a new tensor with the quantizer's encodings."""
    _check(noop_flag is None, "no stand-in for noop_flag")
    _check(int(quantizer.dtype) == DType.kFloat8E4M3, "no stand-in but for e4m3")
    values = values.detach()
    if out is None:
        out = create_empty_quantized_tensor(
            quantizer, list(values.shape), values.dtype, values.device, False
        )
    recipe = _RECIPES[type(quantizer).__name__]
    matrix = values.reshape(-1, values.shape[-1])
    scale = quantizer.scale if recipe == "delayed" else None
    found = quantise(matrix, recipe, values.dtype, scale)
    if scale is not None and quantizer.amax.numel():
        quantizer.amax.clamp_(min=found.amax)
    if recipe in ("delayed", "current"):
        _fill_float8(out, found, quantizer)
    else:
        _fill_blocks(out, found)
    return out


def _fill_float8(out: Any, found: Quantised, quantizer: Any) -> None:
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    out._data.copy_(found.row_bytes.view(out._data.shape))
    out._scale_inv.copy_(found.row_scale_inv.view(out._scale_inv.shape))
    if quantizer.columnwise_usage and not is_non_tn_fp8_gemm_supported():
        transposed = found.row_bytes.t().contiguous()
        if out._transpose is None:
            out._transpose = torch.empty_like(transposed)
        out._transpose.copy_(transposed.view(out._transpose.shape))
        out._transpose_invalid = False
    else:
        out._transpose, out._transpose_invalid = None, True


def _fill_blocks(out: Any, found: Quantised) -> None:
    encodings = {"_rowwise": found[:2], "_columnwise": found[2:4]}
    for name, (data, scale_inv) in encodings.items():
        if (target := getattr(out, f"{name}_data")) is None:
            continue
        if name == "_columnwise" and type(out).__name__ == "Float8BlockwiseQTensor":
            data, scale_inv = data.t(), scale_inv.t()
        target.copy_(data.reshape(target.shape))
        rows, columns = scale_inv.shape
        getattr(out, f"{name}_scale_inv")[:rows, :columns] = scale_inv


def dequantize(tensor: Any, dtype: int) -> Tensor:
    """An MXFP8 tensor's values, of its row encoding if it has one. (Float8Tensor and
    Float8BlockwiseQTensor do it in torch themselves.)"""
    in_rows = tensor._rowwise_data is not None
    data = tensor._rowwise_data if in_rows else tensor._columnwise_data
    matrix = data.view(-1, data.shape[-1])
    rows, columns = matrix.shape
    if in_rows:
        scale_inv = tensor._rowwise_scale_inv[:rows, : columns // 32]
    else:
        scale_inv = tensor._columnwise_scale_inv[: rows // 32, :columns]
    return dequantise(matrix, scale_inv).view(data.shape).to(TORCH_DTYPES[DType(int(dtype))])


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """A quantised tensor with the encodings that its quantizer makes. All scales are zero;
    ``quantize`` does not write those of blocks that do not exist."""
    from transformer_engine.pytorch.tensor import Float8Quantizer, Float8Tensor
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    _check(not quantizer.internal and not pin_memory, "no stand-in for internal or pinned tensors")
    size = torch.Size(shape)
    if isinstance(quantizer, Float8Quantizer):
        keep = quantizer.columnwise_usage and not is_non_tn_fp8_gemm_supported()
        options = {"dtype": torch.uint8, "device": device}
        return Float8Tensor(
            shape=size,
            dtype=dtype,
            data=torch.empty(size, **options),
            fp8_scale_inv=torch.zeros(1, device=device),
            fp8_dtype=quantizer.dtype,
            data_transpose=torch.empty((size[-1], *size[:-1]), **options) if keep else None,
            quantizer=quantizer,
            device=device,
        )
    inner = quantizer.alloc_tensors(size, device=device)
    for name, tensor in inner.items():
        if "scale" in name:
            tensor.zero_()
    context = quantizer.create_metadata(size, dtype=dtype)
    return context["cls"].__tensor_unflatten__(inner, context, size, None)
