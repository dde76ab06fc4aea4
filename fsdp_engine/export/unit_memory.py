"""Memory for one unit's tensors at a time, which go to somebody who may keep them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.devices.memory import Memory, TransientStorage


class UnitMemory:
    """Bytes for one unit, used again for the next, unless somebody still has tensors over them:
    then they are left to whoever has, and there are others.

    Args:
        memory: which allocates and books them.
        num_bytes: of the largest unit.
    """

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self._held: tuple[TransientStorage, Tensor, int] | None = None

    def take(self) -> Tensor:
        """All of it, for the next unit: uint8, 1-D."""
        if self._held is not None and self._held[0].num_uses > self._held[2]:
            self.leave()
        if self._held is None:
            storage = self._memory.lasting(self._num_bytes, torch.uint8, "stream")
            storage.fill()
            whole = storage.view(0, (self._num_bytes,))
            self._held = storage, whole, storage.num_uses
        return self._held[1]

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor lies here."""
        if self._held is None:
            return False
        mine: int = self._held[1].untyped_storage()._cdata
        is_mine: bool = tensor.untyped_storage()._cdata == mine
        return is_mine

    def leave(self) -> None:
        """It goes, when nobody has tensors over it."""
        if self._held is not None:
            self._held[0].leave()
            self._held = None

    def last_apart(self, items: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """A unit's items, each with a tensor at its end; the last one's gets memory of its own: a
        loop's variable still has it when memory is taken for the next unit."""
        held: tuple[Any, ...] | None = None
        for item in items:
            if held is not None:
                yield held
            held = item
        if held is not None:
            *rest, tensor = held
            yield (*rest, tensor.clone() if self.has(tensor) else tensor)
