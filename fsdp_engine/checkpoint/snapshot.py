"""Copies all entries of a checkpoint to host memory.

All tensors are copied into one block of memory, which the next snapshot reuses, because allocating
pages and pinning them is slow.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_engine.devices import lanes
from fsdp_engine.devices.accelerator import is_accelerator
from fsdp_engine.devices.host_memory import HostBlock
from fsdp_engine.flat_dtensor import FlatDTensor

_ALIGNMENT = 64  # bytes


class HostMemory:
    """A block of host memory for one snapshot at a time.

    Args:
        device: of the tensors; for an accelerator the block is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._block = HostBlock(0, pinned=False)

    @property
    def num_bytes(self) -> int:
        """Allocated bytes, whether or not a snapshot uses them."""
        return self._block.bytes.numel()

    def snapshot(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of ``entries``; of sharded tensors the slices are copied.

        Returns when the copies are complete. A tensor that occurs several times is copied once;
        all other values are copied deeply.
        """
        tensors = {id(leaf): leaf for leaf in tree_leaves(entries) if isinstance(leaf, Tensor)}
        needed = sum(_padded_bytes(tensor) for tensor in tensors.values())
        if needed > self.num_bytes:
            self._block = HostBlock(0, pinned=False)  # free the old block first
            self._block = HostBlock(needed, pinned=is_accelerator(self._device))
        copies: dict[int, Tensor] = {}
        start = 0
        for key, tensor in tensors.items():
            local = _local(tensor)
            piece = (
                self._block.bytes[start : start + local.nbytes].view(local.dtype).view(local.shape)
            )
            piece.copy_(local, non_blocking=True)
            copies[key] = (
                FlatDTensor.from_flat_local(piece, tensor.flat_placement)
                if isinstance(tensor, FlatDTensor)
                else piece
            )
            start += _padded_bytes(tensor)
        lanes.finish_compute(self._device)
        copied: dict[str, Any] = tree_map(
            lambda leaf: copies[id(leaf)] if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
            entries,
        )
        return copied


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, FlatDTensor) else tensor.detach()


def _padded_bytes(tensor: Tensor) -> int:
    return -(-_local(tensor).nbytes // _ALIGNMENT) * _ALIGNMENT
