"""Fingerprints of tensors, by which ranks find out whether they hold equal values."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are converted to 64-bit integers at once.
_CHUNK = 2**18
# An odd number; products of it wrap around.
_FACTOR = 6364136223846793005


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """Returns a number for each tensor that follows from all of its bits and their order. Waits for
    the device once.

    Tensors of other bits have another number, but for a chance of about 2**-64.
    """
    found = [fingerprint(tensor) for tensor in tensors]
    return torch.stack(found).tolist() if found else []


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a number for each tensor by which this process finds out whether its values have
    changed: on a CPU the CRC-32 of its bytes, which takes no memory, elsewhere its fingerprint."""
    if any(each.device.type != "cpu" for each in tensors):
        return fingerprints(tensors)
    return [_checksum(_integers_of(each)) for each in tensors]


def _checksum(integers: Tensor) -> int:
    num_bytes = integers.numel() * integers.element_size()
    if not num_bytes:
        return 0
    # Not `numpy()`: torch alone is enough for training.
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(integers.data_ptr()))


def fingerprint(tensor: Tensor) -> Tensor:
    """The same of one tensor (of a DTensor, this rank's shard), as a 0-d tensor on its device."""
    integers = _integers_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in integers.split(_CHUNK) if len(integers) else ():
        factors = _factors(len(chunk), tensor.device)
        total = total * _FACTOR + factors.mul_(chunk).sum()
    return total


def _integers_of(tensor: Tensor) -> Tensor:
    """The bits of a tensor, or of a DTensor's shard on this rank, as integers of its element size:
    flat, and a view where it is contiguous."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _factors(num: int, device: torch.device) -> Tensor:
    """Returns an odd number for each of ``num`` elements, without a pattern. They are not kept,
    since they are as large as the weights."""
    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device).mul_(_FACTOR)
    mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_FACTOR)
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)
