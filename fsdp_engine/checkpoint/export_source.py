"""Finds the tensors of an export of an engine, and reads parts of tensors from checkpoints.

A :class:`Source` has a name, shape and dtype, which are the same on all ranks, and yields the parts
that this rank writes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from fsdp_engine.checkpoint.model_state import (
    check_at_rest,
    check_shared,
    is_extra_state,
)
from fsdp_engine.checkpoint.reader import ReadBuffer, Reader
from fsdp_engine.checkpoint.sharded_model import EngineLike
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.flat_placement import Box, flat_range_boxes
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.strategies import Axis, Role

# Row-major index of the first element of a part, and a tensor with the elements of the part.
Part = tuple[int, Tensor]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to export.

    Attributes:
        name: The first name of the tensor in the order of modules.
        shape: The shape of the unsharded tensor.
        dtype: The dtype of the written elements.
        aliases: Other names of the tensor, under which it is not written.
        parts: Function that returns the parts that this rank writes. The next part may overwrite
            the memory of the previous one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...]
    parts: Callable[[], Iterable[Part]]


def engine_sources(engine: EngineLike, dtype: torch.dtype | None) -> list[Source]:
    """Returns the parameters and persistent buffers of a sharded model, in the order of modules.

    Ranks that hold the same slices share the work: each writes some consecutive parameters, which
    have about the same number of elements on each rank. Buffers may differ between ranks; the
    buffers of rank 0 are written.

    Args:
        engine: An engine without a running forward, backward or ``unsharded()``.
        dtype: The written dtype of floating-point tensors. None: the dtype of each tensor.

    Raises:
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``, or a load
            failed halfway.
        ValueError: Ranks hold different experts, or a module has another parameter than at
            ``shard()``.
    """
    check_at_rest(engine)
    engine.missing_values.check()
    check_shared("export_safetensors", engine)
    is_written = {
        id(param): record.is_written
        for buffer in engine.buffers
        for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
    }
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            found.setdefault(id(value), (value, []))[1].append(name)
    replica, num_replicas = _replica(engine)
    total = sum(tensor.numel() for key, (tensor, _) in found.items() if key in is_written)
    sources: list[Source] = []
    before = 0  # number of elements of the preceding parameters
    for key, (tensor, names) in found.items():
        is_mine = engine.ranks.rank == 0
        if key in is_written:
            is_mine = before * num_replicas // max(total, 1) == replica and is_written[key]
            before += tensor.numel()
        parts = parts_of(tensor) if is_mine else []
        sources.append(
            Source(
                names[0],
                tuple(tensor.shape),
                written_dtype(tensor.dtype, dtype),
                tuple(names[1:]),
                lambda parts=parts: parts,  # type: ignore[misc]
            )
        )
    return sources


def saved_parts(
    reader: Reader, key: str, entry: TensorStorageMetadata, buffer: ReadBuffer
) -> Iterator[Part]:
    """Yield a saved tensor as consecutive flat ranges, independent of the chunks in the files.

    Args:
        reader: The reader of the checkpoint.
        key: The key of the tensor.
        entry: The metadata of the tensor.
        buffer: The memory of a range. Each range overwrites the previous one.

    Raises:
        OSError, EOFError: A file is missing or too short.
        ValueError: Elements are not in the checkpoint.
    """
    dtype, numel = entry.properties.dtype, math.prod(entry.size)
    step = max(buffer.num_bytes // dtype.itemsize, 1)
    for start in range(0, numel, step):
        flat = buffer.tensor(min(step, numel - start), dtype)
        boxes = flat_range_boxes(entry.size, start, start + flat.numel())
        chunks = [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes
        ]
        items = create_read_items_for_chunk_list(key, entry, chunks)
        if (found := sum(math.prod(item.lengths) for item in items)) != flat.numel():
            raise ValueError(
                f"{key}: expected {flat.numel()} saved elements from {start} on; found {found}"
            )
        reader.read_data(LoadPlan(items), _IntoBoxes(flat, boxes)).wait()
        yield start, flat


class _IntoBoxes(dcp.DefaultLoadPlanner):
    """Planner that reads boxes of a tensor consecutively into a flat tensor."""

    def __init__(self, flat: Tensor, boxes: tuple[Box, ...]) -> None:
        super().__init__()
        self._flat = flat
        self._boxes = boxes

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns the destination of an item."""
        assert read_item.dest_index.index is not None
        box = self._boxes[read_item.dest_index.index]
        first = self._boxes[0].start
        target = self._flat[box.start - first : box.stop - first].view(box.sizes)
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (offset, length) in enumerate(places):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the item was read in place."""


def _replica(engine: EngineLike) -> tuple[int, int]:
    """Returns this rank's index among the ranks that hold the same slices, and the number of these
    ranks."""
    number, count = 0, 1
    for axis in (Axis.OUTER, Axis.INNER):
        if not engine.strategy.shards(Role.OPTIM, axis):
            size = engine.mesh.axis(axis).size
            number, count = number * size + engine.mesh.axis(axis).rank, count * size
    return number, count


def parts_of(tensor: Tensor) -> list[Part]:
    """Returns views of this rank's elements of a tensor, in parts that are contiguous in the
    unsharded tensor."""
    if isinstance(tensor, FlatDTensor):
        first, local, spread = (
            tensor.flat_placement.start,
            tensor.local,
            tensor.flat_placement.spread,
        )
    elif isinstance(tensor, DTensor):
        first, local, spread = 0, tensor.to_local().detach(), TensorParallelSpec.of(tensor)
    else:
        first, local, spread = 0, tensor.detach(), None
    if not local.numel():
        return []
    if spread is None:
        return [(first, local)]
    flat = local.reshape(-1)
    return [
        (global_start, flat[start - first : start - first + count])
        for global_start, start, count in spread.runs(first, first + flat.numel())
    ]


def written_dtype(found: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Returns the dtype in which an export writes a tensor of the dtype ``found``."""
    return wanted if wanted is not None and found.is_floating_point else found
