"""The range of a tensor's elements that a rank holds, as a DTensor placement and as boxes.

A flat range ``[start, stop)`` of a row-major tensor is a union of boxes. Worked example, shape
(4, 5), range [3, 17):

    row 0   . . . 3 4      box 1: offsets (0, 3), sizes (1, 2), elements [3, 5)
    row 1   5 6 7 8 9      box 2: offsets (1, 0), sizes (2, 5), elements [5, 15)
    row 2   . . . . .        "
    row 3   15 16 . . .    box 3: offsets (3, 0), sizes (1, 2), elements [15, 17)

Each dim but the first adds at most one box before and one after the complete rows, so there are at
most ``2 * ndim - 1`` boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.comm.mesh import DataMesh, joint_mesh
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.layout.layout import RangesOfRanks
from fsdp_engine.memory import allocator


class Box(NamedTuple):
    """A box of a tensor that is contiguous in row-major order.

    Attributes:
        offsets: First index in each dim.
        sizes: Size in each dim. The product of sizes is ``stop - start``.
        start: Row-major index in the tensor of the first element of the box.
        stop: Row-major index after the last element.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Returns the fewest boxes whose union is the range ``[start, stop)`` of a row-major tensor.

    These are at most ``2 * ndim - 1`` boxes, in order; none for an empty range. See the module
    docstring for an example.

    Raises:
        ValueError: The range is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"range: expected 0 <= start <= stop <= {math.prod(shape)} for shape {tuple(shape)}; "
            f"found [{start}, {stop})"
        )
    return tuple(_boxes(tuple(shape), (), start, stop)) if start < stop else ()


def _boxes(shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Returns the boxes of a range ``[start, stop)`` of the sub-tensor at index ``prefix``.

    ``prefix`` has the indices of the first dims. The range is relative to the sub-tensor.
    """
    dims = shape[len(prefix) :]
    base = 0
    for index, size in zip(prefix, shape, strict=False):
        base = base * size + index
    base *= math.prod(dims)
    if not dims:
        return [Box(prefix, (1,) * len(prefix), base, base + 1)]
    row = math.prod(dims[1:])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # the range is inside one row
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
    """Placement along a mesh axis over which a tensor is sharded by flat ranges, not along a dim.

    It is not a ``Shard``, because code that handles ``Shard(0)`` would access other elements, and
    not a ``Replicate``. It subclasses ``Partial`` only because ``distribute_tensor`` then calls
    ``_partition_value`` for a value that is the same on all ranks:
    ``distribute_tensor(full, weight.device_mesh, weight.placements)`` returns this rank's slice,
    whose ``full_tensor()`` is the full tensor.

    Attributes:
        flat: Placement of the tensor. None: unknown.
        span: Range of the elements, in row-major order, that this rank holds. None: unknown.
    """

    flat: FlatPlacement | None
    span: tuple[int, int] | None

    def __init__(self, flat: FlatPlacement | tuple[int, int] | None = None) -> None:
        super().__init__("sum")
        self.flat = flat if isinstance(flat, FlatPlacement) else None
        self.span = (flat.start, flat.stop) if isinstance(flat, FlatPlacement) else flat

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if mesh_dim < mesh.ndim - 1:
            return tensor  # the call for the last axis shards over all axes
        if self.span is None:
            raise RuntimeError(
                "distribute_tensor: expected the placements of a sharded parameter, which contain "
                "this rank's range of elements; found FlatShard() without a range"
            )
        if mesh.size() == 1:
            return tensor.clone()  # full_tensor() returns the local tensor unchanged
        return tensor.reshape(-1)[slice(*self.span)].clone()

    def _to_replicate_tensor(
        self, local: Tensor, mesh: DeviceMesh, mesh_dim: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        flat = self.flat
        if flat is None or flat.spread is not None:
            raise RuntimeError(
                "redistribute, full_tensor: expected a FlatDTensor; found a DTensor over flat "
                "slices, as returned by distribute_tensor. copy_() it into the parameter, and call "
                "the parameter's full_tensor()"
            )
        # torch calls this for each axis with several ranks. The last call gathers over all axes.
        last = max(dim for dim in range(mesh.ndim) if mesh.size(dim) > 1)
        return flat.gather_full(local) if mesh_dim == last else local

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Returns False, because ranks hold final values."""
        return False

    def is_replicate(self) -> bool:
        """Returns False, because this rank does not hold the full tensor."""
        return False

    def is_shard(self, dim: int | None = None) -> bool:
        """Returns True if ``dim`` is None, because the tensor is sharded, but not along a dim."""
        return dim is None

    def __eq__(self, other: object) -> bool:
        # Spans are compared because DTensor caches results by placements.
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
    """The slice of a row-major tensor that this rank holds, and the groups that shard the tensor.

    An object takes O(1) memory, independent of the number of ranks.

    Attributes:
        shape: Shape of the full tensor. For a DTensor over other dimensions (``spread``) this is
            the global shape.
        start: Index of the first element held, in row-major order of the full tensor, or of this
            rank's shard of it if there is a ``spread``.
        stop: Index after the last element held. Equal to ``start`` if this rank holds no element.
        mesh: The mesh with the axes (inner,) or (outer, inner).
        given_groups: Groups over which the tensor is sharded, innermost first. Groups of one rank
            may be omitted. None: :attr:`split_groups` gets them from the mesh, for example after
            unpickling.
        num_sharded_axes: Number of mesh axes over which the tensor is sharded, counted from the
            innermost axis. None: the number of ``given_groups``.
        name: Name of the parameter, for messages. "" if unknown.
        spread: Placement over other mesh dimensions, if the tensor is a DTensor over these.
        is_written: Whether checkpoints save these elements from this rank. False: they are saved
            from another rank that holds them, along other mesh dimensions.
        num_rows: Number of rows of consecutive ranks in a mesh of one axis. Each row holds the full
            tensor.
        norm_is_dtensor: Whether the norm of several such tensors is a replicated DTensor, as in
            FSDP2, instead of a plain tensor.
        boundary_multiple: Number of which ``start`` and ``stop`` of all ranks are multiples, except
            for the end of the tensor. 0: one rank holds the tensor. None: unknown.
        ranges: The ranges of all ranks. None: unknown.

    Raises:
        ValueError: The range is not inside the tensor, or ``num_sharded_axes`` does not match the
            mesh and the groups.
    """

    shape: torch.Size
    start: int
    stop: int
    mesh: DeviceMesh
    # Groups are not compared: equal placements may have different groups of the mesh's ranks.
    given_groups: tuple[ProcessGroup, ...] | None = field(default=(), compare=False)
    num_sharded_axes: int | None = None
    name: str = field(default="", compare=False)
    spread: TensorParallelSpec | None = None
    is_written: bool = field(default=True, compare=False)
    num_rows: int = 1
    norm_is_dtensor: bool = field(default=False, compare=False)
    boundary_multiple: int | None = field(default=None, compare=False)
    ranges: RangesOfRanks | None = field(default=None, compare=False)
    # Specs are cached by dtype, because they are expensive to make.
    _specs: dict[torch.dtype, DTensorSpec] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        numel = math.prod(self.sharded_shape)
        if not 0 <= self.start <= self.stop <= numel:
            raise ValueError(
                f"placement: expected 0 <= start <= stop <= {numel} for shape "
                f"{tuple(self.sharded_shape)}; found [{self.start}, {self.stop})"
            )
        num_groups = len(self.given_groups or ())
        if self.num_sharded_axes is None:
            object.__setattr__(self, "num_sharded_axes", num_groups)
        # A mesh axis may correspond to two axes of the engine, within rows and across rows.
        least = min(num_groups, self.mesh.ndim)
        if not least <= self._num_sharded <= self.mesh.ndim:
            raise ValueError(
                f"placement: expected {least} to {self.mesh.ndim} sharded axes; "
                f"found {self.num_sharded_axes}"
            )

    def is_same_on_all_ranks(self, other: FlatPlacement | None) -> bool:
        """Returns whether two tensors have the same slice on each rank.

        ``==`` compares the slices of this rank. It can be True on some ranks and False on others,
        so it must not decide whether a rank communicates or raises.
        """
        if self is other:
            return True
        if other is None or self.ranges is None or other.ranges is None:
            return self == other
        return (self.ranges, self._tensor_and_mesh) == (other.ranges, other._tensor_and_mesh)

    @property
    def _tensor_and_mesh(self) -> tuple[Any, ...]:
        """The compared fields but this rank's slice."""
        return self.shape, self.mesh, self.num_sharded_axes, self.spread, self.num_rows

    def rename(self, name: str) -> None:
        """Set ``name``, which is not part of comparisons."""
        object.__setattr__(self, "name", name)

    def give_norms_as_dtensors(self) -> None:
        """Set ``norm_is_dtensor``, which is not part of comparisons, to True."""
        object.__setattr__(self, "norm_is_dtensor", True)

    @classmethod
    def on_mesh(
        cls,
        shape: Sequence[int],
        start: int,
        stop: int,
        mesh: DeviceMesh,
        num_sharded_axes: int,
        spread: TensorParallelSpec | None = None,
        name: str = "",
        is_written: bool = True,
        num_rows: int = 1,
    ) -> FlatPlacement:
        """Returns a placement with the mesh's groups of the ``num_sharded_axes`` innermost axes."""
        return cls(
            torch.Size(shape),
            start,
            stop,
            mesh,
            None,
            num_sharded_axes,
            name=name,
            spread=spread,
            is_written=is_written,
            num_rows=num_rows,
        )

    @cached_property
    def split_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the tensor is sharded, innermost first.

        Raises:
            RuntimeError: This process has no groups of the ranks of ``mesh``.
        """
        if self.given_groups is not None:
            return self.given_groups
        axes = range(self.mesh.ndim - 1, self.mesh.ndim - 1 - self._num_sharded, -1)
        try:
            if self.num_rows == 1:
                return tuple(self._group_of_axis(axis) for axis in axes)
            what = "groups of a sharded tensor that was loaded"
            row = DataMesh.create(self.mesh, num_instances=self.num_rows, what=what).inner
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name or 'sharded tensor'}: expected the process groups of {self.mesh}, "
                "over which it is sharded, to gather the full tensor; found none in this process. "
                "Initialize torch.distributed and create the same mesh; .to_local() returns the "
                "slice that was saved"
            ) from error
        return () if row.gather_group is None else (row.gather_group,)

    def _group_of_axis(self, axis: int) -> ProcessGroup:
        """Returns the group of an axis of the mesh.

        Raises:
            RuntimeError: This process has no such group. A mesh from a file finds groups by names,
                which are numbers, and in this process a group of that name may have other ranks.
        """
        group = self.mesh.get_group(axis)
        place = self.mesh.get_coordinate()
        found = dist.get_process_group_ranks(group)
        if place is not None:
            index: Any = (*place[:axis], slice(None), *place[axis + 1 :])
            if self.mesh.mesh[index].tolist() == found:
                return group
        raise RuntimeError(f"expected a group of ranks of {self.mesh}; found one of ranks {found}")

    def __str__(self) -> str:
        ranks = f"{self.mesh.size()} rank" + "s" * (self.mesh.size() > 1)
        return f"elements [{self.start}, {self.stop}) of shape {tuple(self.shape)} over {ranks}"

    @property
    def _num_sharded(self) -> int:
        assert self.num_sharded_axes is not None
        return self.num_sharded_axes

    @property
    def sharded_shape(self) -> torch.Size:
        """The shape of the tensor that is sharded by flat ranges.

        This is the full tensor, or this rank's shard of it if there is a ``spread``.
        """
        return self.shape if self.spread is None else self.spread.local_shape

    @cached_property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Groups over which the full tensor is sharded, including those of other mesh dimensions.

        A sum over these groups counts every element once.
        """
        others = () if self.spread is None else self.spread.shard_groups
        return self.split_groups + others

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all dimensions: the engine's, then those of ``spread``."""
        if self.spread is None:
            return self.mesh
        return joint_mesh(self.mesh, self.spread.mesh) if self._num_sharded else self.spread.mesh

    def slice_of_full(self, full: Tensor) -> Tensor:
        """Returns this rank's slice of a plain full tensor, 1-D."""
        shard = full if self.spread is None else self.spread.shard_of(full)
        return shard.reshape(-1)[self.start : self.stop]

    def gather_full(self, local: Tensor) -> Tensor:
        """Gather the full tensor from the slices of all ranks. Collective.

        Every rank writes its bytes into zeros, and an all-reduce sums them as 64-bit words. No two
        ranks write the same byte, so the sum is exact for every dtype. This needs memory for one
        full tensor.

        Args:
            local: This rank's slice, 1-D.
        """
        if local.is_meta:
            return allocator.empty(tuple(self.shape), local.dtype, "meta")
        if hasattr(local, "__tensor_flatten__"):
            # Quantised state of torchao is gathered as numbers, since other ranks may hold plain
            # slices.
            local = local.dequantize().to(local.dtype)
        itemsize, numel = local.dtype.itemsize, math.prod(self.sharded_shape)
        mesh_type = self.mesh.device_type
        remote = bool(self.groups) and local.device.type != mesh_type
        device = mesh_type if remote else local.device
        words = allocator.zeros(-(-numel * itemsize // 8), torch.int64, device)
        full_bytes = words.view(torch.uint8)[: numel * itemsize]
        place = full_bytes[self.start * itemsize : self.stop * itemsize]
        # The stride is checked because torch considers one element with any stride contiguous.
        dense = (
            local if local.stride() == (1,) else local.clone(memory_format=torch.contiguous_format)
        )
        place.copy_(dense.view(torch.uint8))
        what = f"full_tensor() of {self.name or 'a sharded tensor'} (every rank must call it)"
        for group in self.split_groups:
            all_reduce_(words, group, what=what)
        shard = full_bytes.view(local.dtype).view(self.sharded_shape)
        full = shard if self.spread is None else self.spread.gather_full(shard)
        return full.to(local.device)

    def of_blocks(self, size: int) -> FlatPlacement:
        """Returns the placement of a vector with one element for each block of the tensor.

        Blocks have ``size`` elements; the last one may have fewer. No shard boundary may be inside
        a block.
        """
        shape = torch.Size((-(-math.prod(self.shape) // size),))
        return self._converted(shape, self.spread, lambda element: -(-element // size))

    @cached_property
    def of_parts(self) -> FlatPlacement:
        """The placement of ``torch.view_as_real`` of a complex tensor. Its last dim has size 2."""
        shape = torch.Size((*self.shape, 2))
        spread = None if self.spread is None else replace(self.spread, shape=shape)
        return self._converted(shape, spread, lambda element: 2 * element)

    @cached_property
    def of_numbers(self) -> FlatPlacement | None:
        """The inverse of :attr:`of_parts`: the placement of ``torch.view_as_complex``.

        None if a shard boundary separates the components of a number.
        """
        if self.shape[-1:] != (2,) or self.start % 2 or self.stop % 2:
            return None
        shape = self.shape[:-1]
        spread = None if self.spread is None else replace(self.spread, shape=shape)
        if spread is not None and len(shape) in {getattr(p, "dim", -1) for p in spread.placements}:
            return None
        return self._converted(shape, spread, lambda element: element // 2)

    def _converted(
        self,
        shape: torch.Size,
        spread: TensorParallelSpec | None,
        convert: Callable[[int], int],
    ) -> FlatPlacement:
        """Returns the placement of a tensor of another shape, of which the index of an element is
        ``convert`` of the index in this tensor."""
        ranges = self.ranges
        if ranges is not None:
            ranges = RangesOfRanks(ranges.first_rank, *map(convert, ranges[1:]))
        return replace(
            self,
            shape=shape,
            spread=spread,
            start=convert(self.start),
            stop=convert(self.stop),
            boundary_multiple=None,
            ranges=ranges,
        )

    @property
    def numel(self) -> int:
        """Number of elements that this rank holds."""
        return self.stop - self.start

    @property
    def placements(self) -> tuple[Placement, ...]:
        """``FlatShard()`` or ``Replicate()`` for each axis of the engine, followed by the
        placements of ``spread``."""
        others = () if self.spread is None else self.spread.placements
        if self.spread is not None and not self._num_sharded:
            return others
        num_replicated = self.mesh.ndim - self._num_sharded
        sharded = (FlatShard(self),) * self._num_sharded
        return (Replicate(),) * num_replicated + sharded + others

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The slice as boxes of the full tensor, in order; see :func:`flat_range_boxes`.

        ``start`` and ``stop`` of boxes are relative to the tensor of ``sharded_shape``.
        """
        boxes = flat_range_boxes(self.sharded_shape, self.start, self.stop)
        if self.spread is None:
            return boxes
        first = self.spread.offsets
        return tuple(box._replace(offsets=tuple(map(add, box.offsets, first))) for box in boxes)

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the spec for DTensor's dispatch, shared by all tensors of this slice and dtype.

        Only the autograd engine uses this dispatch, to sum gradients. With ``Shard(0)`` it sums
        slices; for a 0-d tensor, which has no dim, ``Replicate()`` has the same effect.
        """
        spec = self._specs.get(dtype)
        if spec is None:
            placement_of_slices: Placement = Shard(0) if self.shape else Replicate()
            placements = tuple(
                placement_of_slices if isinstance(placement, FlatShard) else placement
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
        # Groups and meshes must not be copied, and the other fields are immutable.
        return self

    def __reduce__(self) -> Any:
        # Groups cannot be pickled. The mesh has groups of the same ranks.
        args = (tuple(self.shape), self.start, self.stop, self.mesh, self._num_sharded, self.spread)
        # A plain tuple, since torch.load accepts only few classes.
        ranges = None if self.ranges is None else tuple(self.ranges)
        return _on_mesh, (*args, self.name, self.is_written, self.num_rows, ranges)


def _on_mesh(*args: Any) -> FlatPlacement:
    given, ranges = args[:9], args[9] if len(args) > 9 else None  # older files have 9 arguments
    placement = FlatPlacement.on_mesh(*given)
    return placement if ranges is None else replace(placement, ranges=RangesOfRanks(*ranges))
