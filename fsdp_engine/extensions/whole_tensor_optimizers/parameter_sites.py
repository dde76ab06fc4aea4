"""Sites of sharded parameters: the elements that each rank holds."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.comm.lanes import Lanes
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.units.build import buffer_of


class BufferSite:
    """The mesh, layout and depth of the parameters of one buffer. This object keeps neither the
    buffer nor its engine alive.

    Args:
        buffer: The buffer.

    Attributes:
        mesh: The ranks that share the parameters.
        layout: The layout of the buffer.
        depth: The depth of main weights and reduced gradients: 0, 1 or 2.
    """

    def __init__(self, buffer: ParamAndGradBuffer) -> None:
        self.mesh = buffer.mesh
        self.layout = buffer.layout
        self.depth = buffer.spec.optim_depth
        self._buffer = weakref.ref(buffer)

    def _alive(self) -> ParamAndGradBuffer:
        buffer = self._buffer()
        assert buffer is not None, "the engine of the parameters is alive"
        return buffer

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of reduced gradients."""
        return self._alive().kind.dtypes.optim_grad

    @property
    def lanes(self) -> Lanes:
        """The lanes of the engine."""
        lanes: Lanes = self._alive().context.lanes
        return lanes

    @property
    def memory(self) -> Memory:
        """The memory manager of the engine."""
        memory: Memory = self._alive().context.memory
        return memory


class ParamSite(NamedTuple):
    """The site of one parameter.

    Attributes:
        buffer: The site of its buffer.
        number: Number of the parameter in the layout.
    """

    buffer: BufferSite
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full parameter. For a DTensor over other mesh dimensions, the shape of
        this rank's shard of it."""
        return self.buffer.layout.slots[self.number].shape

    def range_of(self, rank: int) -> tuple[int, int]:
        """Returns the range ``[start, stop)`` of elements that a rank holds; ``(k, k)`` if none."""
        outer, inner = divmod(rank, self.buffer.mesh.inner.size)
        return self.buffer.layout.tensor_range(
            self.number, self.buffer.depth, Coordinate(outer, inner)
        )


_SITES: weakref.WeakKeyDictionary[ParamAndGradBuffer, BufferSite] = weakref.WeakKeyDictionary()


def site_of(param: Tensor) -> ParamSite | None:
    """Returns the site of a parameter; None if no engine trains it."""
    found = buffer_of(param)
    if found is None or found[0].grads is None:
        return None
    buffer, number = found
    if buffer not in _SITES:
        _SITES[buffer] = BufferSite(buffer)
    return ParamSite(_SITES[buffer], number)
