"""Where the elements of each sharded parameter lie, on all ranks that share it."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.comm.lanes import Lanes
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.layout import Coordinate, Layout
from fsdp_engine.memory.allocator import Memory


@dataclass(frozen=True, eq=False)
class BufferSite:
    """What the parameters of one buffer have in common.

    Attributes:
        mesh: the ranks that share them.
        layout: of the buffer.
        depth: at which main weights and reduced gradients are sharded: 0, 1 or 2.
        grad_dtype: of reduced gradients.
    """

    mesh: DataMesh
    layout: Layout
    depth: int
    grad_dtype: torch.dtype
    # What lanes have been given refers to parameters.
    _lanes: weakref.ref[Lanes]
    _memory: weakref.ref[Memory]

    @property
    def lanes(self) -> Lanes:
        """Those of the buffer's engine, which must be alive."""
        lanes = self._lanes()
        assert lanes is not None
        return lanes

    @property
    def memory(self) -> Memory:
        """That of the buffer's engine, which must be alive."""
        memory = self._memory()
        assert memory is not None
        return memory


class ParamSite(NamedTuple):
    """One parameter's place.

    Attributes:
        buffer: its buffer.
        number: its place in the layout.
    """

    buffer: BufferSite
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's tensor: for a DTensor over other mesh dimensions, of the shard."""
        return self.buffer.layout.slots[self.number].shape

    def range_of(self, rank: int) -> tuple[int, int]:
        """The elements ``[start, stop)`` that a rank of the mesh holds; ``(k, k)``: none."""
        outer, inner = divmod(rank, self.buffer.mesh.inner.size)
        return self.buffer.layout.tensor_range(
            self.number, self.buffer.depth, Coordinate(outer, inner)
        )


_SITES: MutableMapping[Tensor, ParamSite] = WeakIdKeyDictionary()


def add_site(buffer: BufferSite, params: Sequence[Tensor]) -> None:
    """Remember where ``params``, in the layout's order, lie."""
    for index, param in enumerate(params):
        _SITES[param] = ParamSite(buffer, index)


def site_of(param: Tensor) -> ParamSite | None:
    """The place of a parameter; None if it is not one of an engine."""
    return _SITES.get(param)
