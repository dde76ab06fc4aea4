"""Parameters that are DTensors already, over mesh dimensions that are not the engine's.

[Note: Parameters that are DTensors]
Tensor, expert or context parallelism may have cut a parameter before the engine sees it. Buffers,
messages and optimizers then know this rank's *shard* of it alone, a plain tensor, which is cut by
flat ranges as any other; what makes it global is one value, a :class:`Spread`.

    global (6, 4), Shard(0) over tp 2     this rank's shard (3, 4)     its flat ranges
    rows 0-2 on tp 0, 3-5 on tp 1         elements 0 to 11             [0, 6) on dp 0, [6, 12) on 1

Modules compute with DTensors over the full shards, made once; their gradients are brought to the
parameter's placements (a partial one is reduced over the other dimensions), and what lies here of
them is written. Users see one FlatDTensor of the global shape, over the mesh of all dimensions.

Along a dimension with ``Replicate()``, and along any that the parameter is not over, several ranks
hold the same elements. Where these are written, once each, the first of the ranks does it: flat
ranges of the others may begin elsewhere, where shards are uneven.
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
class Spread:
    """How a tensor lies over mesh dimensions that are not the engine's.

    Attributes:
        mesh: these dimensions.
        placements: one for each, ``Shard`` or ``Replicate``.
        shape: of the global tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of(cls, tensor: DTensor) -> Spread:
        """That of a DTensor.

        Raises:
            ValueError: a placement is neither ``Shard`` nor ``Replicate``.
        """
        others = [each for each in tensor.placements if type(each) not in (Shard, Replicate)]
        if others:
            raise ValueError(
                f"expected placements Shard and Replicate, of which shards can be kept; found "
                f"{others[0]} in {tensor.placements}"
            )
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's shard."""
        return torch.Size(self._box[0])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the shard begins in the global tensor, in each dim."""
        return tuple(self._box[1])

    @cached_property
    def shard_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which elements are spread, so that each lies on one rank of a group."""
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
        """Ranks of ``mesh`` that hold different elements."""
        sizes = zip(self.mesh.shape, self.placements, strict=True)
        return math.prod(size for size, placement in sizes if isinstance(placement, Shard))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Elements ``[start, stop)`` of this rank's shard, in row-major order, as ranges that are
        contiguous in the global tensor, too: (first there, first here, how many)."""
        if start == stop:
            return
        whole, mine = self.shape, self.local_shape
        last = max((dim for dim in range(len(whole)) if mine[dim] < whole[dim]), default=0)
        inner = math.prod(whole[last + 1 :])
        length, outer = math.prod(mine[last:]), mine[:last]
        for row in range(start // length, -(-stop // length)):
            low, high = max(start, row * length), min(stop, (row + 1) * length)
            place, left = 0, row
            for dim, size in enumerate(outer):
                index, left = divmod(left, math.prod(outer[dim + 1 :]))
                assert index < size
                place = place * whole[dim] + index + self.offsets[dim]
            place = (place * whole[last] + self.offsets[last]) * inner if whole else 0
            yield place + low - row * length, low, high - low

    def wrap(self, shard: Tensor) -> DTensor:
        """The DTensor of this rank's shard, over its memory; autograd does not follow it."""
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

    def shard_of(self, whole: Tensor) -> Tensor:
        """This rank's shard of a plain global tensor; a view of it."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            whole = whole.narrow(dim, min(offset, whole.shape[dim] - size), size)
        return whole

    def whole_of(self, shard: Tensor) -> Tensor:
        """The plain global tensor of the ranks' shards. Collective over ``mesh``."""
        with torch.no_grad():
            return self.wrap(shard).full_tensor()

    def has(self, tensor: Any) -> bool:
        """Whether a tensor is a DTensor that lies like this."""
        return (
            isinstance(tensor, DTensor)
            and tensor.shape == self.shape
            and tuple(tensor.placements) == self.placements
            and tensor.device_mesh == self.mesh
        )

    def shard_of_gradient(self, grad: Tensor, name: str) -> Tensor:
        """This rank's shard of a gradient that autograd left at the full parameter. Collective over
        ``mesh`` where the gradient has other placements than the parameter.

        Raises:
            RuntimeError: it is no DTensor over ``mesh``.
        """
        if not isinstance(grad, DTensor) or grad.device_mesh != self.mesh:
            found = f"one over {grad.device_mesh}" if isinstance(grad, DTensor) else "a plain one"
            raise RuntimeError(
                f"backward: expected for {name} a gradient that is a DTensor over {self.mesh}, as "
                f"the parameter is; found {found}"
            )
        with torch.no_grad():
            if tuple(grad.placements) != self.placements:
                grad = grad.redistribute(placements=self.placements)
            return grad.to_local()

    def __reduce__(self) -> Any:
        return Spread, (self.mesh, self.placements, self.shape)  # groups do not pickle

    @cached_property
    def _box(self) -> tuple[Sequence[int], Sequence[int]]:
        return compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
