"""Fingerprints of tensors, which ranks compare to find out whether they hold equal values."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of elements that are converted to 64-bit integers at a time.
_CHUNK = 2**18
# An odd number. Products with it wrap around.
_FACTOR = 6364136223846793005


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Returns a number for each tensor that depends on all of its bits and their order.

    Tensors with different bits usually have different numbers. The host waits for the device once.
    """
    found = [fingerprint(tensor) for tensor in tensors]
    return torch.stack(found).tolist() if found else []


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a number for each tensor, by which this process detects changes of its values.

    On a CPU it is the CRC-32 of the bytes, which needs no memory. On other devices it is the
    fingerprint.
    """
    if any(each.device.type != "cpu" for each in tensors):
        return fingerprints(tensors)
    return [_checksum(_integers_of(each)) for each in tensors]


def _checksum(integers: Tensor) -> int:
    num_bytes = integers.numel() * integers.element_size()
    if not num_bytes:
        return 0
    # `Tensor.numpy()` is not used because training requires torch only.
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(integers.data_ptr()))


def fingerprint(tensor: Tensor) -> Tensor:
    """Returns the fingerprint of a tensor, or of this rank's shard of a DTensor.

    The result is a 0-d int64 tensor on the device of ``tensor``.
    """
    integers = _integers_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in integers.split(_CHUNK) if len(integers) else ():
        factors = _factors(len(chunk), tensor.device)
        if chunk.dtype == torch.int64:
            # Mix the high bits into the low ones. Otherwise two sign bits would cancel in the sum,
            # because an odd factor leaves the highest bit in place.
            chunk = chunk ^ (chunk >> 32 & 0xFFFFFFFF)
        total = total * _FACTOR + factors.mul_(chunk).sum()
    return total


def _integers_of(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as a 1-D tensor of integers of the same element size.

    It is a view if the tensor is contiguous. For a DTensor, it has the bits of this rank's shard.
    """
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _factors(num: int, device: torch.device) -> Tensor:
    """Returns an odd pseudo-random number for each of ``num`` elements."""
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device).mul_(_FACTOR)
    mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_FACTOR)
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)
