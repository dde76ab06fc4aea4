"""A flat tensor held at one depth of a layout, and the climb and descent between depths.

See [Note: Depth] in ``strategies/pair.py``. A gather climbs one axis at a time from this rank's
range to a larger one; a reduction descends. Both work in place, in the ranges where the bytes lie:

    reduce                                   gather
    depth 0  [........................]      [........................]
                      | inner                          ^ inner
    depth 1           [........]                       [........]
                         | outer                          ^ outer
    depth 2              [..]                             [..]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.devices.collectives import Communicator, Steps
from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.layout import Coordinate, Layout
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


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


@dataclass(frozen=True)
class AxisComms:
    """Communicators of one axis, one for each kind of lane. None where the axis has one rank."""

    gather: Communicator | None
    reduce: Communicator | None


class Ladder:
    """Climbs and descends the depths of one mesh."""

    def __init__(self, mesh: DataMesh) -> None:
        self.mesh = mesh
        self.comms = {
            axis: AxisComms(
                Communicator(place.gather_group, mesh.device) if place.gather_group else None,
                Communicator(place.reduce_group, mesh.device) if place.reduce_group else None,
            )
            for axis, place in ((Axis.INNER, mesh.inner), (Axis.OUTER, mesh.outer))
        }

    def climb(self, target: ShardedBuffer, depth: int, source: Tensor | None, tag: int) -> Steps:
        """Gather ``target`` from ``depth + 1`` to ``depth``, along one axis.

        ``source`` is this rank's part where it does not yet lie in ``target``.
        """
        comm = self.comms[AXIS_BELOW_DEPTH[depth]].gather
        if comm is not None:
            return comm.all_gather(target.narrow(depth), source, tag)
        return _bring(source, target.narrow(depth + 1))

    def reduces(self, axis: Axis) -> bool:
        """Whether anything travels along ``axis``."""
        return self.comms[axis].reduce is not None

    def reduce_comm(self, axis: Axis) -> Communicator:
        """The communicator for reductions along ``axis``, which must have several ranks."""
        comm = self.comms[axis].reduce
        assert comm is not None
        return comm


def _bring(source: Tensor | None, target: Tensor) -> Steps:
    if source is not None:
        target.copy_(source)
    yield from ()


def flat_source(param: torch.Tensor) -> Tensor:
    """The row-major elements of ``param``, whatever its strides; a copy only where needed."""
    return param.detach().reshape(-1)
