"""Specs of parameters that are DTensors over mesh dimensions other than the engine's.

[Note: Parameters that are DTensors]
Tensor, expert or context parallelism may have sharded a parameter before the engine does. Buffers,
collectives and optimizers then operate on this rank's *shard* of it, a plain tensor, which is
sharded further by flat ranges like any other. A :class:`TensorParallelSpec` describes the global
tensor.

    global (6, 4), Shard(0) over tp 2     this rank's shard (3, 4)     its flat ranges
    rows 0-2 on tp 0, 3-5 on tp 1         elements 0 to 11             [0, 6) on dp 0, [6, 12) on 1

Modules compute with DTensors over the full shards, which are created once. Their gradients are
redistributed to the parameter's placements (a ``Partial`` gradient is reduced over the other
dimensions), and this rank's shard is copied to the buffer. Users see one FlatDTensor of the global
shape, over the mesh of all dimensions.

Along a dimension with ``Replicate()``, and along dimensions that are not in the parameter's mesh,
several ranks hold the same elements. Checkpoints save them from the first of these ranks: if shards
are uneven, the flat ranges of the others may have other boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class TensorParallelSpec:
    """Mesh, placements and shape of a tensor over mesh dimensions other than the engine's.

    Attributes:
        mesh: The mesh of these dimensions.
        placements: ``Shard`` or ``Replicate`` for each dimension.
        shape: The shape of the global tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: DTensor) -> TensorParallelSpec:
        """Returns the spec of a DTensor.

        Raises:
            ValueError: A placement is neither ``Shard`` nor ``Replicate``.
        """
        others = [each for each in tensor.placements if type(each) not in (Shard, Replicate)]
        if others:
            raise ValueError(
                f"expected placements Shard and Replicate, since only these can be sharded "
                f"further; found {others[0]} in {tensor.placements}"
            )
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    @cached_property
    def local_shape(self) -> torch.Size:
        """The shape of this rank's shard."""
        return torch.Size(self._box[0])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of the shard in the global tensor, in each dim."""
        return tuple(self._box[1])

    @cached_property
    def shard_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the tensor is sharded. Each element is on one rank of a group."""
        sizes = self.mesh.shape
        return tuple(
            self.mesh.get_group(dim)
            for dim, placement in enumerate(self.placements)
            if isinstance(placement, Shard) and sizes[dim] > 1
        )

    @property
    def shard_names(self) -> set[str]:
        """Names of the dimensions along which ranks hold different elements."""
        names = zip(self.mesh.mesh_dim_names or (), self.placements, strict=True)
        return {name for name, placement in names if isinstance(placement, Shard)}

    @cached_property
    def num_shards(self) -> int:
        """Number of distinct shards over ``mesh``."""
        sizes = zip(self.mesh.shape, self.placements, strict=True)
        return math.prod(size for size, placement in sizes if isinstance(placement, Shard))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Divide a range of this rank's shard into ranges that are contiguous in the global tensor.

        Args:
            start, stop: The range ``[start, stop)`` of elements of the shard in row-major order.

        Yields:
            (first element in the global tensor, first element in the shard, number of elements).
        """
        if start == stop:
            return
        full, local = self.shape, self.local_shape
        last = max((dim for dim in range(len(full)) if local[dim] < full[dim]), default=0)
        inner = math.prod(full[last + 1 :])
        length, outer = math.prod(local[last:]), local[:last]
        for row in range(start // length, -(-stop // length)):
            low, high = max(start, row * length), min(stop, (row + 1) * length)
            place, left = 0, row
            for dim, size in enumerate(outer):
                index, left = divmod(left, math.prod(outer[dim + 1 :]))
                assert index < size
                place = place * full[dim] + index + self.offsets[dim]
            place = (place * full[last] + self.offsets[last]) * inner if full else 0
            yield place + low - row * length, low, high - low

    def wrap(self, shard: Tensor) -> DTensor:
        """Returns a DTensor over the memory of this rank's shard, without a graph."""
        stride = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        with torch.no_grad():
            return DTensor.from_local(
                shard,
                self.mesh,
                self.placements,
                run_check=False,
                shape=self.shape,
                stride=tuple(stride),
            )

    def shard_of(self, full: Tensor) -> Tensor:
        """Returns this rank's shard of a plain global tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            full = full.narrow(dim, min(offset, full.shape[dim] - size), size)
        return full

    def gather_full(self, shard: Tensor) -> Tensor:
        """Gather the plain global tensor from the ranks' shards. Collective over ``mesh``."""
        with torch.no_grad():
            return self.wrap(shard).full_tensor()

    def has(self, tensor: Any) -> bool:
        """Returns whether a tensor is a DTensor with this mesh, placements and shape."""
        return (
            isinstance(tensor, DTensor)
            and tensor.shape == self.shape
            and tuple(tensor.placements) == self.placements
            and tensor.device_mesh == self.mesh
        )

    def shard_of_gradient(self, grad: Tensor, name: str) -> Tensor:
        """Returns this rank's shard of a gradient that autograd has accumulated.

        Collective over ``mesh`` if the placements of gradient and parameter differ.

        Args:
            grad: The gradient of the parameter that modules compute with.
            name: Name of the parameter, for errors.

        Raises:
            RuntimeError: The gradient is not a DTensor over ``mesh``.
        """
        if not isinstance(grad, DTensor) or grad.device_mesh != self.mesh:
            found = "a plain tensor"
            if isinstance(grad, DTensor):
                found = f"one over {grad.device_mesh}"
            raise RuntimeError(
                f"backward: expected a gradient of {name} that is a DTensor over {self.mesh}, like "
                f"the parameter; found {found}"
            )
        with torch.no_grad():
            if tuple(grad.placements) != self.placements:
                grad = grad.redistribute(placements=self.placements)
            return grad.to_local()

    def __reduce__(self) -> Any:
        return TensorParallelSpec, (
            self.mesh,
            self.placements,
            self.shape,
        )  # groups cannot be pickled

    @cached_property
    def _box(self) -> tuple[Sequence[int], Sequence[int]]:
        return compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)


Spread = TensorParallelSpec  # the name in files that were saved before version 0.1.0
