"""Finds the parameters and persistent buffers of a weight stream, and this rank's pieces of them.

The receiver gets the tensors of the model, or the tensors of checkpoint files, which conversions of
``transformers`` assemble from the model's tensors (``pretrained/conversions.py``).

[Note: Local pieces]
If each rank streams its own elements, each element is streamed by exactly one rank. Ranks that hold
the same slice of a flat buffer divide it into equal shares. So at every level each rank streams
``1 / number of ranks`` of the model, which is also what its ``WeightVersion`` stores:

    flat buffer                        [................................]
    sharded over 2 inner ranks         [   inner 0     ][    inner 1    ]
    and replicated on 2 outer ranks    [out 0  ][out 1 ][out 0  ][out 1 ]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.export_source import Part
from fsdp_engine.checkpoint.model_state import is_extra_state
from fsdp_engine.checkpoint.pieces import Box, Pieces
from fsdp_engine.checkpoint.sharded_model import SavedParam, saved_params
from fsdp_engine.checkpoint.writing_pieces import parts_of_box
from fsdp_engine.engine import Engine
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.memory import allocator
from fsdp_engine.pretrained.conversions import as_on_disk
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True, eq=False)
class StreamedParam:
    """A parameter of the stream.

    Attributes:
        name: The first name of the parameter in the order of modules.
        shape: The shape of the unsharded tensor.
        dtype: The dtype of the streamed elements.
        buffer, index: The buffer that holds the main weights, and the parameter's index in it.
        before: Number of elements in the unsharded tensor that precede the buffer's tensor. They
            belong to experts of other ranks.
        is_of_experts: Whether the parameter belongs to experts that differ between ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: ParamAndGradBuffer
    index: int
    before: int
    is_of_experts: bool

    def own(self) -> Part:
        """Returns this rank's piece (see [Note: Local pieces]): the index of its first element in
        the buffer's tensor, and its main weights, 1-D."""
        buffer = self.buffer
        depth, at = buffer.spec.optim_depth, buffer.mesh.coordinate
        local = buffer.weights.main.local(self.index, depth)
        low, high = buffer.layout.tensor_range(self.index, depth, at)
        if not buffer.records[self.index].is_written:
            return low, local[:0]
        begin, end = _share(buffer)
        offset = buffer.layout.slots[self.index].offset
        start, stop = max(low, begin - offset), min(high, end - offset)
        return (start, local[start - low : stop - low]) if start < stop else (low, local[:0])

    def parts(self, first: int, flat: Tensor) -> Iterator[Part]:
        """Split a flat range of the buffer's tensor into parts that are contiguous in the unsharded
        tensor. Yields the elements of each part, preceded by the index of the first one in the
        unsharded tensor."""
        if self._spread is None:
            yield self.before + first, flat
            return
        for there, here, count in self._spread.runs(first, first + flat.numel()):
            yield there, flat[here - first : here - first + count]

    def places(self, elements: Tensor) -> Tensor:
        """Convert flat indices in the buffer's tensor to flat indices in the unsharded tensor.

        Args:
            elements: Indices, int64, ascending. The result has the same dtype and is also
                ascending.
        """
        if self._spread is None:
            return elements + self.before
        place = allocator.zeros_like(elements, torch.int64)
        for dim, size in enumerate(self._spread.local_shape):
            step = math.prod(self._spread.local_shape[dim + 1 :])
            index = elements // step % size + self._spread.offsets[dim]
            place += index * math.prod(self.shape[dim + 1 :])
        return place

    @property
    def _spread(self) -> TensorParallelSpec | None:
        return self.buffer.records[self.index].spread


@dataclass(frozen=True, eq=False)
class StreamedBuffer:
    """A persistent buffer of a module, with the interface of :class:`StreamedParam`.

    If each rank streams its own piece, the first rank streams the full buffer.

    Attributes:
        tensor: The tensor of the buffer.
        is_mine: Whether this rank is the first rank, which streams the buffer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor
    is_mine: bool

    def own(self) -> Part:
        """See :class:`StreamedParam`."""
        flat = self.tensor.detach().reshape(-1)
        return 0, flat if self.is_mine else flat[:0]

    def parts(self, first: int, flat: Tensor) -> Iterator[Part]:
        """See :class:`StreamedParam`."""
        yield first, flat

    def places(self, elements: Tensor) -> Tensor:
        """See :class:`StreamedParam`."""
        return elements


StreamedTensor = StreamedParam | StreamedBuffer


def streamed_tensors(
    engine: Engine, dtype: torch.dtype | None
) -> tuple[list[StreamedParam], list[StreamedBuffer]]:
    """Returns the parameters of a model, in the order of units, and its persistent buffers.

    A tied parameter is listed once. Entries that a user's hook removes from the ``state_dict`` are
    omitted.

    Args:
        engine: An engine without a running forward, backward or ``unsharded()``.
        dtype: The streamed dtype of floating-point tensors. None: the dtype of the main weights.

    Raises:
        ValueError: A tensor cannot be streamed; the message names it.
    """
    found: dict[int, tuple[Tensor, str]] = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            found.setdefault(id(value), (value, name))
    saved = saved_params(engine)
    params: list[StreamedParam] = []
    for buffer in engine.buffers:
        for index, param in enumerate(buffer.sharded_params):
            if (entry := found.pop(id(param), None)) is not None:
                as_saved = saved[id(param)]
                name = as_saved.name if as_saved.is_of_experts else entry[1]
                params.append(_param(buffer, index, name, as_saved, dtype))
    is_first = engine.ranks.rank == 0
    buffers = []
    for tensor, name in found.values():
        if isinstance(tensor, DTensor):
            raise ValueError(f"{name}: expected a plain persistent buffer; found a DTensor")
        streamed = _streamed_dtype(tensor.dtype, dtype)
        buffers.append(StreamedBuffer(name, tuple(tensor.shape), streamed, tensor, is_first))
    return params, buffers


def _param(
    buffer: ParamAndGradBuffer,
    index: int,
    name: str,
    as_saved: SavedParam,
    dtype: torch.dtype | None,
) -> StreamedParam:
    shape, before = tuple(buffer.placement(index).shape), 0
    if isinstance(as_saved.saved, FlatDTensor) and as_saved.saved is not as_saved.held:
        if buffer.records[index].spread is not None:
            raise ValueError(
                f"{name}: expected a DTensor of experts that all ranks share, or plain tensors of "
                "experts; found a DTensor whose experts differ between ranks"
            )
        place = as_saved.saved.flat_placement
        low, _ = buffer.layout.tensor_range(index, buffer.spec.optim_depth, buffer.mesh.coordinate)
        shape, before = tuple(place.shape), place.start - low
    main = buffer.weights.main.tensor.dtype
    streamed = _streamed_dtype(main, dtype)
    return StreamedParam(name, shape, streamed, buffer, index, before, as_saved.is_of_experts)


def _share(buffer: ParamAndGradBuffer) -> tuple[int, int]:
    """Returns the range of the flat buffer that this rank streams. See [Note: Local pieces]."""
    depth, mesh = buffer.spec.optim_depth, buffer.mesh
    start, stop = buffer.layout.range(depth, mesh.coordinate)
    number, count = 0, 1
    for axis in (Axis.OUTER, Axis.INNER):
        if axis not in AXIS_BELOW_DEPTH[:depth]:
            place = mesh.axis(axis)
            number, count = number * place.size + place.rank, count * place.size
    length = stop - start
    return start + length * number // count, start + length * (number + 1) // count


def _streamed_dtype(found: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and found.is_floating_point else found


# Flat indices of elements in a tensor, int64, and the values of these elements.
Places = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that the receiver gets.

    Attributes:
        name, shape, dtype: The name, shape and dtype of the tensor.
        sources: The tensors of the model from which it is assembled.
        pieces: The boxes of the sources from which it is assembled. None: it equals its only
            source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[StreamedTensor, ...]
    pieces: Pieces | None = None

    def boxes(self, source: StreamedTensor) -> list[Box]:
        """Returns the boxes of a source. Requires ``pieces``."""
        assert self.pieces is not None
        return [box for box in self.pieces.boxes if box.stored == source.name]

    def whole(self, whole_of: Callable[[StreamedTensor], Tensor]) -> Tensor:
        """Assemble the contiguous tensor from unsharded sources."""
        if self.pieces is None:
            return whole_of(self.sources[0])
        tensors = {source.name: whole_of(source) for source in self.sources}
        views = [(box, _view(box, tensors[box.stored].reshape(-1))) for box in self.pieces.boxes]
        if len(views) == 1 and views[0][1].is_contiguous():
            return views[0][1].view(self.shape)
        device = next(iter(tensors.values())).device
        made = allocator.empty(self.shape, self.dtype, device)
        for box, view in views:
            part = made
            for dim, (at, size) in enumerate(zip(box.at, view.shape, strict=True)):
                part = part.narrow(dim, at, size)
            part.copy_(view)
        return made

    def parts(self, source: StreamedTensor, first: int, flat: Tensor) -> Iterator[Part]:
        """Yield a range of a source's elements, in parts that are contiguous in this tensor.

        Args:
            source: One of ``sources``.
            first: The index of the first element in the buffer's tensor.
            flat: The elements of the range, 1-D.
        """
        for there, part in source.parts(first, flat):
            if self.pieces is None:
                yield there, part
                continue
            for box in self.boxes(source):
                yield from parts_of_box(self.shape, box, there, part)

    def places(self, source: StreamedTensor, elements: Tensor, values: Tensor) -> Iterator[Places]:
        """Convert indices of elements of a source to indices in this tensor.

        Args:
            source: One of ``sources``.
            elements: Indices in the buffer's tensor, int64, ascending.
            values: The values of these elements.

        Yields:
            Indices in this tensor, int64, and the values.
        """
        there = source.places(elements)
        if self.pieces is None:
            yield there, values
            return
        for box in self.boxes(source):
            yield from _in_box(self.shape, box, there, values)


def output_tensors(
    sents: Sequence[StreamedTensor], model: nn.Module, *, as_in_files: bool
) -> list[OutputTensor]:
    """Returns the tensors that the receiver gets.

    Args:
        sents: The streamed parameters and buffers of the model.
        model: The model, whose class determines the layout in files.
        as_in_files: Use the names and layout of files. False: those of the model.

    Raises:
        ValueError: A conversion of transformers does not fit, or is not a reindexing.
    """
    if not as_in_files:
        return [OutputTensor(each.name, each.shape, each.dtype, (each,)) for each in sents]
    by_name = {each.name: each for each in sents}
    whole = {each.name: Pieces.of(each.name, each.shape, each.dtype) for each in sents}
    source_of = {id(pieces): name for name, pieces in whole.items()}
    found = []
    for name, pieces in as_on_disk(model, whole).items():
        same = source_of.get(id(pieces))
        names = [same] if same is not None else list(dict.fromkeys(b.stored for b in pieces.boxes))
        # A tensor without elements has no boxes, and gets an arbitrary source.
        sources = tuple(by_name[each] for each in names) or (sents[0],)
        kept = None if same is not None else pieces
        found.append(OutputTensor(name, tuple(pieces.shape), pieces.dtype, sources, kept))
    return found


def _view(box: Box, flat: Tensor) -> Tensor:
    """Returns a view of the elements of a box, with the dims of the assembled tensor.

    Args:
        box: The box of a stored tensor.
        flat: All elements of the stored tensor, 1-D.
    """
    steps = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    first = sum(start * step for start, step in zip(box.starts, steps, strict=True))
    own = [(box.lengths[dim], steps[dim]) if dim != -1 else (1, 1) for dim in box.dims]
    sizes, strides = [size for size, _ in own], [step for _, step in own]
    return flat.as_strided(sizes, strides, int(flat.storage_offset()) + first)


def _in_box(shape: Sequence[int], box: Box, elements: Tensor, values: Tensor) -> Iterator[Places]:
    """Yield the elements that are within a box, with their indices in the assembled tensor."""
    steps = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    first = sum(start * step for start, step in zip(box.starts, steps, strict=True))
    last = sum(
        (start + length - 1) * step
        for start, length, step in zip(box.starts, box.lengths, steps, strict=True)
    )
    ends = torch.tensor([first, last + 1], device=elements.device)
    low, high = torch.searchsorted(elements, ends).tolist()
    if low == high:
        return
    elements, values = elements[low:high], values[low:high]
    index = [
        elements // step % size - start
        for step, size, start in zip(steps, box.shape, box.starts, strict=True)
    ]
    inside = elements >= 0
    for each, length in zip(index, box.lengths, strict=True):
        inside &= (each >= 0) & (each < length)
    place = allocator.zeros_like(elements, torch.int64)
    for dim, (at, own) in enumerate(zip(box.at, box.dims, strict=True)):
        step = math.prod(shape[dim + 1 :])
        place += (index[own] + at) * step if own != -1 else at * step
    if bool(inside.any()):
        yield place[inside], values[inside]
