"""Memory for the tensors of one unit at a time, which the caller may keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.devices.memory import Memory, TransientStorage


class UnitMemory:
    """Bytes for one unit. They are reused for the next unit, unless tensors over them are still
    referenced: then the references keep them, and new bytes are allocated.

    Args:
        memory: allocator.
        num_bytes: of the largest unit.
    """

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self._held: tuple[TransientStorage, Tensor, int] | None = None

    def take(self) -> Tensor:
        """Returns all bytes, for the next unit: uint8, 1-D."""
        if self._held is not None and self._held[0].num_uses > self._held[2]:
            self.release()
        if self._held is None:
            storage = self._memory.lasting(self._num_bytes, torch.uint8, "stream")
            storage.fill()
            whole = storage.view(0, (self._num_bytes,))
            self._held = storage, whole, storage.num_uses
        return self._held[1]

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor uses these bytes."""
        if self._held is None:
            return False
        mine: int = self._held[1].untyped_storage()._cdata
        is_mine: bool = tensor.untyped_storage()._cdata == mine
        return is_mine

    def release(self) -> None:
        """Release the bytes. They are freed with the last tensor over them."""
        if self._held is not None:
            self._held[0].leave()
            self._held = None

    def last_separate(self, items: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield a unit's items, whose last elements are tensors. The tensor of the last item is
        copied, because the caller's loop variable refers to it when the next unit takes memory."""
        held: tuple[Any, ...] | None = None
        for item in items:
            if held is not None:
                yield held
            held = item
        if held is not None:
            *rest, tensor = held
            yield (*rest, tensor.clone() if self.has(tensor) else tensor)
