"""Which elements of a tensor a rank holds, and how that range looks to others.

A flat range ``[start, stop)`` of a row-major tensor is a union of boxes. Worked example, shape
(4, 5), range [3, 17):

    row 0   . . . 3 4      box 1: offsets (0, 3), sizes (1, 2), elements [3, 5)
    row 1   5 6 7 8 9      box 2: offsets (1, 0), sizes (2, 5), elements [5, 15)
    row 2   . . . . .        "
    row 3   15 16 . . .    box 3: offsets (3, 0), sizes (1, 2), elements [15, 17)

Each dim adds at most one box before and one after, the first dim only one: ``2 * ndim - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import all_reduce_
from fsdp_engine.devices.mesh import DataMesh, joint_mesh
from fsdp_engine.flat_dtensor.spread import Spread


class Box(NamedTuple):
    """A box of a tensor that is contiguous in row-major order.

    Attributes:
        offsets: first index in each dim.
        sizes: extent in each dim; their product is ``stop - start``.
        start: first row-major element of the tensor in the box.
        stop: the element after the last.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The fewest boxes whose union is elements ``[start, stop)`` of a row-major tensor, in order.

    At most ``2 * ndim - 1``; none for an empty range. See the module docstring for an example.

    Raises:
        ValueError: the range does not lie inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"range: expected 0 <= start <= stop <= {math.prod(shape)} for shape {tuple(shape)}; "
            f"found [{start}, {stop})"
        )
    return tuple(_boxes(tuple(shape), (), start, stop)) if start < stop else ()


def _boxes(shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes of ``[start, stop)``, counted from index ``prefix`` of the dims already fixed."""
    dims = shape[len(prefix) :]
    base = 0
    for index, size in zip(prefix, shape, strict=False):
        base = base * size + index
    base *= math.prod(dims)
    if not dims:
        return [Box(prefix, (1,) * len(prefix), base, base + 1)]
    row = math.prod(dims[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # the range lies inside one row
        return _boxes(shape, (*prefix, last), start - last * row, stop - last * row)
    found = []
    if start < first * row:
        found += _boxes(shape, (*prefix, first - 1), start - (first - 1) * row, row)
    if first < last:
        offsets = (*prefix, first, *(0 for _ in dims[1:]))
        sizes = (*(1 for _ in prefix), last - first, *dims[1:])
        found.append(Box(offsets, sizes, base + first * row, base + last * row))
    if last * row < stop:
        found += _boxes(shape, (*prefix, last), 0, stop - last * row)
    return found


class FlatShard(Partial):
    """Along this mesh axis the tensor is cut by flat ranges, not along a dim.

    Neither a ``Shard``, since code that takes ``Shard(0)`` at its word would read or write wrong
    elements, nor a ``Replicate``. It is a ``Partial`` in class alone, which is what
    ``distribute_tensor`` asks about a value that it has on all ranks: so
    ``distribute_tensor(whole, weight.device_mesh, weight.placements)`` has this rank's slice, and
    ``full_tensor()`` of that the whole.

    Attributes:
        flat: of the tensor whose placement this is. None: not known.
        span: elements of the tensor, in row-major order, that this rank holds. None: not known.
    """

    flat: FlatPlacement | None
    span: tuple[int, int] | None

    def __init__(self, flat: FlatPlacement | tuple[int, int] | None = None) -> None:
        super().__init__("sum")
        self.flat = flat if isinstance(flat, FlatPlacement) else None
        self.span = (flat.start, flat.stop) if isinstance(flat, FlatPlacement) else flat

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if mesh_dim < mesh.ndim - 1:
            return tensor  # the last axis cuts for all
        if self.span is None:
            raise RuntimeError(
                "distribute_tensor: expected the placements of a sharded parameter, which know "
                "what a rank holds; found FlatShard() of none"
            )
        if mesh.size() == 1:
            return tensor.clone()  # full_tensor() takes it as it is
        return tensor.reshape(-1)[slice(*self.span)].clone()

    def _to_replicate_tensor(
        self, local: Tensor, mesh: DeviceMesh, mesh_dim: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        flat = self.flat
        if flat is None or flat.spread is not None:
            raise RuntimeError(
                "redistribute, full_tensor: expected a FlatDTensor; found a DTensor over flat "
                "slices, as distribute_tensor makes it. copy_() it into the parameter, and ask "
                "that one"
            )
        # torch asks each axis that has several ranks; the last one gathers for all.
        last = max(dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
        return flat.whole_of(local) if mesh_dim == last else local

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """False: what ranks hold is final."""
        return False

    def is_replicate(self) -> bool:
        """False: this rank does not hold the whole."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        """True, but for no dim in particular."""
        return dim is None

    def __eq__(self, other: object) -> bool:
        # With the span: DTensor keeps what it found for equal placements.
        return type(other) is FlatShard and other.span == self.span and other.flat == self.flat

    def __hash__(self) -> int:
        return hash((FlatShard, self.span))

    def __repr__(self) -> str:
        return "FlatShard()"

    __str__ = __repr__

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatShard:
        return self

    def __reduce__(self) -> Any:
        return FlatShard, (self.span,)


@dataclass(frozen=True)
class FlatPlacement:
    """The slice of a row-major tensor that this rank holds, and with whom it shares the rest.

    Costs O(1) memory: nothing here grows with the number of ranks.

    Attributes:
        shape: of the whole tensor; of the global one where it is a DTensor over others' dimensions.
        start: first element held, counted in row-major order: of the whole tensor, or of this
            rank's shard of it (``spread``).
        stop: the element after the last; equal to ``start`` when this rank holds nothing.
        mesh: (inner,) or (outer, inner).
        given_groups: groups over which the tensor is cut, innermost first. A group of one rank may
            be left out. None: :attr:`split_groups` finds them by the mesh, as for a placement that
            was unpickled.
        num_cut_axes: how many mesh axes cut the tensor, counted from the innermost; None: one for
            each of ``given_groups``.
        name: of the parameter, for messages; "" if it is not known.
        spread: of a tensor that is a DTensor over other mesh dimensions.
        is_written: a checkpoint takes these elements from here; False: from another rank that holds
            them, at another place of others' mesh dimensions.
        num_rows: rows of consecutive ranks that a mesh of one axis consists of, each of which holds
            the whole tensor.
        norm_is_dtensor: the norm of several such tensors is a replicated DTensor, as FSDP2's is;
            False: a plain tensor.

    Raises:
        ValueError: the range does not lie inside the tensor, or more axes cut it than there are.
    """

    shape: torch.Size
    start: int
    stop: int
    mesh: DeviceMesh
    # Equal placements may have groups of their own: the mesh says between which ranks they are.
    given_groups: tuple[ProcessGroup, ...] | None = field(default=(), compare=False)
    num_cut_axes: int | None = None
    name: str = field(default="", compare=False)
    spread: Spread | None = None
    is_written: bool = field(default=True, compare=False)
    num_rows: int = 1
    norm_is_dtensor: bool = field(default=False, compare=False)
    # One for each dtype that this slice is held in; they cost more to make than to keep.
    _specs: dict[torch.dtype, DTensorSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        numel = math.prod(self.cut_shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise ValueError(
                f"placement: expected 0 <= start <= stop <= {numel} for shape "
                f"{tuple(self.cut_shape)}; found [{self.start}, {self.stop})"
            )
        num_groups = len(self.given_groups or ())
        if self.num_cut_axes is None:
            object.__setattr__(self, "num_cut_axes", num_groups)
        # One axis of a mesh may be two of the engine's: ranks of a row, and rows.
        least = min(num_groups, self.mesh.ndim)
        if not least <= self._num_cut <= self.mesh.ndim:
            raise ValueError(
                f"placement: expected {least} to {self.mesh.ndim} cut axes; "
                f"found {self.num_cut_axes}"
            )

    def rename(self, name: str) -> None:
        """Messages call the parameter ``name`` from now on; nothing is compared by it."""
        object.__setattr__(self, "name", name)

    def give_norms_as_dtensors(self) -> None:
        """Set ``norm_is_dtensor``; nothing is compared by it."""
        object.__setattr__(self, "norm_is_dtensor", True)

    @classmethod
    def on_mesh(
        cls,
        shape: Sequence[int],
        start: int,
        stop: int,
        mesh: DeviceMesh,
        num_cut_axes: int,
        spread: Spread | None = None,
        name: str = "",
        is_written: bool = True,
        num_rows: int = 1,
    ) -> FlatPlacement:
        """A placement with the mesh's own groups, for the ``num_cut_axes`` innermost axes."""
        return cls(
            torch.Size(shape),
            start,
            stop,
            mesh,
            None,
            num_cut_axes,
            name=name,
            spread=spread,
            is_written=is_written,
            num_rows=num_rows,
        )

    @cached_property
    def split_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the tensor is cut, innermost first.

        Raises:
            RuntimeError: this process has no groups between the ranks of ``mesh``.
        """
        if self.given_groups is not None:
            return self.given_groups
        axes = range(self.mesh.ndim - 1, self.mesh.ndim - 1 - self._num_cut, -1)
        try:
            if self.num_rows == 1:
                return tuple(self.mesh.get_group(axis) for axis in axes)
            what = "groups of a sharded tensor that was loaded"
            row = DataMesh.create(self.mesh, num_instances=self.num_rows, what=what).inner
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name or 'sharded tensor'}: expected the process groups of {self.mesh}, "
                "over which its slices are spread, since the whole tensor is asked for; found none "
                "in this process. Initialise torch.distributed and make the same mesh; "
                ".to_local() has the slice that was saved"
            ) from error
        return () if row.gather_group is None else (row.gather_group,)

    def __str__(self) -> str:
        ranks = f"{self.mesh.size()} rank" + "s" * (self.mesh.size() > 1)
        return f"elements [{self.start}, {self.stop}) of shape {tuple(self.shape)} over {ranks}"

    @property
    def _num_cut(self) -> int:
        assert self.num_cut_axes is not None
        return self.num_cut_axes

    @property
    def cut_shape(self) -> torch.Size:
        """Shape of what is cut by flat ranges: the whole tensor, or this rank's shard of it."""
        return self.shape if self.spread is None else self.spread.local_shape

    @cached_property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the elements of the whole tensor are spread, each on one rank of a
        group: what is summed over them counts every element once."""
        others = () if self.spread is None else self.spread.shard_groups
        return self.split_groups + others

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """All dimensions: the engine's, then those of ``spread``."""
        if self.spread is None:
            return self.mesh
        return joint_mesh(self.mesh, self.spread.mesh) if self._num_cut else self.spread.mesh

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's slice of a plain whole tensor, 1-D."""
        shard = whole if self.spread is None else self.spread.shard_of(whole)
        return shard.reshape(-1)[self.start : self.stop]

    def whole_of(self, local: Tensor) -> Tensor:
        """The whole tensor from its slices, of which ``local`` is this rank's. Collective.

        Every rank writes its bytes into zeros, and the sum has them all: exact for every dtype,
        with memory for one tensor. Added as 64-bit words, in which no two ranks share a byte.
        """
        if local.is_meta:
            return memory.empty(tuple(self.shape), local.dtype, "meta")
        if hasattr(local, "__tensor_flatten__"):
            # Codes of a torchao optimizer; on other ranks the slice may be plain.
            local = local.dequantize().to(local.dtype)
        itemsize, numel = local.dtype.itemsize, math.prod(self.cut_shape)
        mesh_type = self.mesh.device_type
        remote = bool(self.groups) and local.device.type != mesh_type
        device = mesh_type if remote else local.device
        words = memory.zeros(-(-numel * itemsize // 8), torch.int64, device)
        full = words.view(torch.uint8)[: numel * itemsize]
        place = full[self.start * itemsize : self.stop * itemsize]
        # Of stride 1, also where torch calls another stride contiguous (one element).
        dense = (
            local if local.stride() == (1,) else local.clone(memory_format=torch.contiguous_format)
        )
        place.copy_(dense.view(torch.uint8))
        for group in self.split_groups:
            all_reduce_(words, group)
        shard = full.view(local.dtype).view(self.cut_shape)
        whole = shard if self.spread is None else self.spread.whole_of(shard)
        return whole.to(local.device)

    @cached_property
    def of_parts(self) -> FlatPlacement:
        """That of a complex tensor as ``torch.view_as_real`` has it: a last dim of two parts."""
        shape = torch.Size((*self.shape, 2))
        spread = None if self.spread is None else replace(self.spread, shape=shape)
        return replace(self, shape=shape, spread=spread, start=2 * self.start, stop=2 * self.stop)

    @cached_property
    def of_numbers(self) -> FlatPlacement | None:
        """The opposite of :attr:`of_parts`; None where a boundary parts a number in two."""
        if self.shape[-1:] != (2,) or self.start % 2 or self.stop % 2:
            return None
        shape = self.shape[:-1]
        spread = None if self.spread is None else replace(self.spread, shape=shape)
        if spread is not None and len(shape) in {getattr(p, "dim", -1) for p in spread.placements}:
            return None
        return replace(self, shape=shape, spread=spread, start=self.start // 2, stop=self.stop // 2)

    @property
    def numel(self) -> int:
        """Elements held by this rank."""
        return self.stop - self.start

    @property
    def placements(self) -> tuple[Placement, ...]:
        """For each axis of ``device_mesh``: ``FlatShard()`` or ``Replicate()``, then those of
        ``spread``."""
        others = () if self.spread is None else self.spread.placements
        if self.spread is not None and not self._num_cut:
            return others
        num_whole = self.mesh.ndim - self._num_cut
        cut = (FlatShard(self),) * self._num_cut
        return (Replicate(),) * num_whole + cut + others

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The slice as boxes of the whole tensor, in order; see :func:`flat_range_boxes`. Their
        ``start`` and ``stop`` count as this placement's do."""
        boxes = flat_range_boxes(self.cut_shape, self.start, self.stop)
        if self.spread is None:
            return boxes
        first = self.spread.offsets
        return tuple(box._replace(offsets=tuple(map(add, box.offsets, first))) for box in boxes)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What DTensor's own dispatch is told, shared by all tensors of this slice and dtype.

        Only the autograd engine gets there, when it adds gradients. ``Shard(0)`` makes it add
        slices; a 0-d tensor has no dim to name, there ``Replicate()`` does the same.
        """
        spec = self._specs.get(dtype)
        if spec is None:
            cut: Placement = Shard(0) if self.shape else Replicate()
            placements = tuple(
                cut if isinstance(placement, FlatShard) else placement
                for placement in self.placements
            )
            stride = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
            meta = TensorMeta(self.shape, stride, dtype)
            spec = DTensorSpec(self.device_mesh, placements, tensor_meta=meta)
            self._specs[dtype] = spec
        return spec

    def __copy__(self) -> FlatPlacement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatPlacement:
        # Groups and meshes are not values, and the rest is frozen.
        return self

    def __reduce__(self) -> Any:
        # Groups do not pickle; those of the mesh reach the same ranks.
        args = (tuple(self.shape), self.start, self.stop, self.mesh, self._num_cut, self.spread)
        return _on_mesh, (*args, self.name, self.is_written, self.num_rows)


def _on_mesh(*args: Any) -> FlatPlacement:
    return FlatPlacement.on_mesh(*args)
