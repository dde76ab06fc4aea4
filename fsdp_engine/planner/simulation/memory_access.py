"""Memory accesses of kernels: bytes read and written, elements that are not accessed as a stream,
and temporary memory.

[Note: Irregular elements]
On a GPU, kernels that read equal tensors element by element nearly reach the memory's bandwidth.
Other kernels take additional time per element: pointwise operations whose operands have different
strides (rows that are broadcast, transposed heads) or dtypes, concatenations, norms, softmax,
dropout, sums. ``benchmarks/gpu_kernels.py`` measured them on an H100 and an H200: the additional
time is 1.0 to 2.2 ps per element. Some kernels take a multiple of this time, for example four times
as much if the rows of one tensor are the columns of another. Casts to a narrower dtype have a fast
kernel. A factor that is a tensor of one element counts as broadcast.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Operations that read only the rows that they return.
LOOKUPS = {"embedding", "index", "index_select", "gather"}
# Operations that allocate or view memory without accessing it.
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NOTHING |= {"set_", "resize_", "detach", "detach_", "alias", "lift_fresh", "_unsafe_view"}
_COPIES = {"copy_", "_to_copy", "clone"}
_TRANSPOSED = 4
# Multiples of the time per element, by operation; see [Note: Irregular elements].
_IRREGULAR: dict[str, float] = tomllib.loads(
    Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8")
)["irregular"]


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes_of(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    return tensor.numel() * tensor.itemsize


def accessed_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int | None:
    """Returns the bytes that an operation reads and writes: those of all arguments, and those of
    all results. Results include arguments that are changed in place. None: the operation only takes
    host time."""
    name = func._overloadpacket.__name__
    if func.is_view or name in _NOTHING:
        return None
    operands = [] if name in LOOKUPS else tensors_of((args, kwargs))
    num_bytes = sum(num_bytes_of(each) for each in (*operands, *tensors_of(out)))
    num_bytes += _written_bytes(func, args, kwargs)
    return 2 * num_bytes if name in LOOKUPS else num_bytes


def _written_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Returns the bytes that an operation writes into arguments that it does not return, as fused
    and ``foreach`` optimizer steps do. Gradients are only read, unless there is a gradient
    scaler."""
    schema = func._schema
    if schema.returns or not schema.is_mutable:
        return 0
    named = zip((each.name for each in schema.arguments), args, strict=False)
    given = {**dict(named), **kwargs}
    return sum(
        num_bytes_of(tensor)
        for each in schema.arguments
        if each.alias_info is not None and each.alias_info.is_write and each.name != "grads"
        for tensor in tensors_of(given.get(each.name))
    )


def irregular_elements(func: Any, args: Any, out: Any) -> float:
    """Returns the number of elements that a kernel does not access as a stream, times the kernel's
    multiple of the time per element; see [Note: Irregular elements]."""
    name = func._overloadpacket.__name__
    if name in _IRREGULAR:
        return _IRREGULAR[name] * max(each.numel() for each in tensors_of((args, out)))
    if name not in _COPIES and torch.Tag.pointwise not in func.tags:
        return 0
    result = next(iter(tensors_of(out)), None)
    if result is None:
        return 0
    operands = tensors_of(args)
    if any(_is_transposed(each, result) for each in operands):
        return _TRANSPOSED * result.numel()
    if name in _COPIES and operands and operands[-1].itemsize > result.itemsize:
        operands = operands[:-1] if operands[-1].stride() == result.stride() else operands
    kinds = {(each.dtype, each.shape, each.stride()) for each in (*operands, result)}
    return result.numel() if len(kinds) > 1 else 0


def _is_transposed(one: Tensor, other: Tensor) -> bool:
    """Returns whether the last dimension is contiguous in only one of two tensors of equal
    shape."""
    if one.shape != other.shape or not one.ndim or one.shape[-1] == 1:
        return False
    return one.stride(-1) != other.stride(-1) and 1 in (one.stride(-1), other.stride(-1))


def scratch_bytes(func: Any, args: Any, out: Any) -> int:
    """Returns the bytes of temporary memory of a GPU kernel, measured by
    ``benchmarks/gpu_kernels.py``.

    Attention's backward sums the gradients of queries in fp32. A sum over rows, as for a bias'
    gradient, has fp32 partial sums in all thread blocks: 1 MiB for each multiprocessor, or less for
    few elements and more for many (``ATen/native/cuda/Reduce.cuh``).
    """
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product") and name.endswith("_backward"):
        return int(args[1].numel() * torch.float32.itemsize)
    if name != "sum" or not args[0].ndim or args[0].stride(-1) != 1:
        return 0
    (result,) = tensors_of(out)
    if result.shape[-1:] != args[0].shape[-1:] or args[0].numel() < _FEWEST_ROWS * result.numel():
        return 0
    numel = args[0].numel()
    return int(max(min(_MULTIPROCESSORS * 2**20, 8 * numel), numel // 2))


# The largest number of multiprocessors of all presets: a B200 has 148, an H100 132.
_MULTIPROCESSORS = 148
_FEWEST_ROWS = 256
