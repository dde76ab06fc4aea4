"""Offloaded state of parameters that are stepped together.

The state has the structure that the optimizer gives it: any tensors in any containers. It is known
only after a step, so the home is created after the first step, and again if a step or a load has
changed shapes or dtypes. 0-d tensors are not moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.extensions.offload.home import Home, Homes
from fsdp_engine.extensions.offload.moved_bytes import MovedBytes, Piece
from fsdp_engine.extensions.offload.offloading import LEDGER_ROLES, Offloading
from fsdp_engine.layout import round_up
from fsdp_engine.memory.allocator import begin_together, storage_keys
from fsdp_engine.optim.state_leaves import leaves_of, map_leaves
from fsdp_engine.optim.step_placement import StatePlace

_ALIGNMENT = 64


class StateHome(MovedBytes, StatePlace):
    """The state of a chunk at a home.

    Args:
        offload: The object that moves the engine's state.
        homes: The factory for homes of state.
    """

    def __init__(self, offload: Offloading, homes: Homes) -> None:
        super().__init__(offload, "full state")
        self._homes = homes
        self._layout: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._offsets: list[int] = []
        self._home: Home | None = None

    def start_copies(self) -> None:
        """See :class:`StatePlace`."""
        if self._home is not None:
            super().start_copies()

    def on_device(self, state: Any) -> Any:
        """See :class:`StatePlace`."""
        self.wait_for_copies()
        return map_leaves(self._leaf_on_device, state)

    def _leaf_on_device(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.ndim):
            return leaf
        if self._home is not None and storage_keys(leaf) == storage_keys(self._home.bytes):
            first = int(leaf.storage_offset()) * leaf.itemsize
            return _view(self._bytes, first, tuple(leaf.shape), leaf.dtype)
        return leaf.to(self._offload.memory.device)

    def take(self, states: Sequence[Any]) -> list[Any]:
        """See :class:`StatePlace`."""
        # Wait even if no state was read because the user has reset it: otherwise its bytes would
        # be copied over the new state in the same memory.
        self.wait_for_copies()
        large = [leaf for leaf in leaves_of(list(states)) if _is_large(leaf)]
        layout = [(tuple(leaf.shape), leaf.dtype) for leaf in large]
        if not layout and self._home is None:
            return list(states)
        if layout != self._layout or self._home is None:
            self._make(layout)
        self.fill()
        home = self._home
        assert home is not None
        places = [
            _view(self._bytes, first, shape, dtype)
            for first, (shape, dtype) in zip(self._offsets, layout, strict=True)
        ]
        copy_moved(places, large)
        self.begin_return()
        offsets = iter(zip(self._offsets, layout, strict=True))

        def kept(leaf: Any) -> Any:
            if not _is_large(leaf):
                return leaf
            first, (shape, dtype) = next(offsets)
            return _view(home.bytes, first, shape, dtype)

        return [map_leaves(kept, state) for state in states]

    def _make(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Create the home and device memory for tensors of these shapes and dtypes."""
        old = self._storage  # The step may have stored its results there.
        self._offload.wait()
        self._layout, self._offsets, size = list(layout), [], 0
        for shape, dtype in layout:
            self._offsets.append(size)
            size += round_up(math.prod(shape) * dtype.itemsize, _ALIGNMENT)
        self._home = self._homes.make(size, self._offload.state_out.drain)
        self._pieces = [Piece(self._home, 0, 0, size, returns=True)]
        self._taken = None
        self._storage = self._offload.memory.transient(
            size, torch.uint8, LEDGER_ROLES["optimizer_state"]
        )
        self.fill()
        self._bytes = self._storage.view(0, (size,))
        if old is not None:
            old.leave()


@torch.no_grad()
def copy_moved(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy results of a step to their places unless they are already there. If a step exchanges
    state tensors, one may be in the place of another, so such sources are copied first."""
    moved = [
        (place, value)
        for place, value in zip(places, values, strict=True)
        if not begin_together(place, value) or place.stride() != value.stride()
    ]
    storages = {storage_keys(place)[0] for place, _ in moved}
    sources = [value.clone() if storage_keys(value)[0] in storages else value for _, value in moved]
    for (place, _), source in zip(moved, sources, strict=True):
        place.copy_(source)


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _view(memory: Tensor, first: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    shape = tuple(shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory[first : first + num_bytes].view(dtype).view(shape)
