"""A flat tensor held at one depth of a layout: see [Note: Depth] in ``strategies/pair.py``.

``redistribute.py`` moves bytes between depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.layout import Coordinate, Layout


@dataclass(frozen=True)
class ShardedBuffer:
    """One flat tensor holding ``layout.range(depth, at)``.

    Attributes:
        layout: where tensors sit.
        at: this rank's place.
        depth: the range that ``tensor`` holds.
        tensor: 1-D, as long as that range.
    """

    layout: Layout
    at: Coordinate
    depth: int
    tensor: Tensor

    def __post_init__(self) -> None:
        start, stop = self.layout.range(self.depth, self.at)
        assert self.tensor.numel() == stop - start

    def narrow(self, depth: int) -> Tensor:
        """The part that this rank holds at ``depth``, which must be this buffer's or deeper."""
        assert depth >= self.depth
        if depth == self.depth:
            return self.tensor
        base, _ = self.layout.range(self.depth, self.at)
        start, stop = self.layout.range(depth, self.at)
        return self.tensor[start - base : stop - base]

    def local(self, index: int, depth: int) -> Tensor:
        """The 1-D part of tensor ``index`` that this rank holds at ``depth``; may be empty."""
        base, _ = self.layout.range(self.depth, self.at)
        low, high = self.layout.tensor_range(index, depth, self.at)
        offset = self.layout.slots[index].offset - base
        if low == high:
            # An empty range still has a place, so that its tensor shares this buffer's version.
            return self.tensor[:0]
        return self.tensor[offset + low : offset + high]

    def full(self, index: int) -> Tensor:
        """Tensor ``index`` in its own shape; the buffer must hold the whole line."""
        assert self.depth == 0
        slot = self.layout.slots[index]
        return self.tensor[slot.offset : slot.stop].view(slot.shape)


def flat_source(param: torch.Tensor) -> Tensor:
    """The row-major elements of ``param``, whatever its strides; a copy only where needed."""
    return param.detach().reshape(-1)
