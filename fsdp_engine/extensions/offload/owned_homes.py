"""State of parameters that are stepped together, where it lies elsewhere between steps.

Its structure is the optimizer's: any tensors in any containers. It is known when a step has made
it, so its home is made after the first step, and anew if a step or a load changed shapes or dtypes.
0-d tensors stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.extensions.offload.chunk_memory import ALIGNMENT, ChunkMemory, Piece, view_of
from fsdp_engine.extensions.offload.home import Home, HomePart, MakeHome
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.layout import round_up
from fsdp_engine.memory.allocator import begin_together, storage_keys
from fsdp_engine.optim.state_leaves import leaves_of, map_leaves
from fsdp_engine.optim.step_placement import StatePlace


class StateHome(ChunkMemory, StatePlace):
    """The state of a chunk, at a home.

    Args:
        offload: The offload of the engine.
        make_home: Makes homes of state.
    """

    def __init__(self, offload: Offloading, make_home: MakeHome) -> None:
        super().__init__(offload, "owned state")
        self._make_home = make_home
        self._layout: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._offsets: list[int] = []
        self._home: Home | None = None

    def bring(self) -> None:
        """See :class:`StatePlace`."""
        if self._home is not None:
            super().bring()

    def on_device(self, state: Any) -> Any:
        """See :class:`StatePlace`."""
        self.await_brought()
        return map_leaves(self._leaf_on_device, state)

    def _leaf_on_device(self, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.ndim):
            return leaf
        if self._home is not None and storage_keys(leaf) == storage_keys(self._home.bytes):
            first = int(leaf.storage_offset()) * leaf.itemsize
            return view_of(self._bytes, first, leaf.shape, leaf.dtype)
        return leaf.to(self._offload.memory.device)

    def take(self, states: Sequence[Any]) -> list[Any]:
        """See :class:`StatePlace`."""
        # Also where no state was read, since the user has reset it: its bytes would still arrive
        # in the memory that the new state is copied into.
        self.await_brought()
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
            view_of(self._bytes, first, shape, dtype)
            for first, (shape, dtype) in zip(self._offsets, layout, strict=True)
        ]
        copy_moved(places, large)
        self.write_back()
        offsets = iter(zip(self._offsets, layout, strict=True))

        def kept(leaf: Any) -> Any:
            if not _is_large(leaf):
                return leaf
            first, (shape, dtype) = next(offsets)
            return view_of(home.bytes, first, shape, dtype)

        return [map_leaves(kept, state) for state in states]

    def _make(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Make the home, for tensors of these shapes and dtypes."""
        old = self._storage  # what a step has made may lie there
        self._offload.wait()
        self._layout, self._offsets, size = list(layout), [], 0
        for shape, dtype in layout:
            self._offsets.append(size)
            size += round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)
        self._home = self._make_home(size, self._offload.state_out.drain)
        self._taken = None
        self._pieces = [Piece(HomePart(self._home, 0, size), 0, returns=True)]
        self.reserve(size)
        if old is not None:
            old.leave()


@torch.no_grad()
def copy_moved(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values of a step to their places, unless they lie there. Some lie in the place of
    another where a step exchanges tensors of its state."""
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
