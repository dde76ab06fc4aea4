"""Tensors of the receiver: the model's, or those of checkpoint files, which conversions of
``transformers`` assemble from the model's (``pretrained/conversions.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_engine.checkpoint.export_source import Part
from fsdp_engine.checkpoint.pieces import Box, Pieces
from fsdp_engine.checkpoint.writing_pieces import parts_of_box
from fsdp_engine.devices import memory
from fsdp_engine.export.streamed_tensors import StreamedTensor
from fsdp_engine.pretrained.conversions import as_on_disk

# Flat indices of elements in a tensor, int64; and their values.
Places = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the receiver.

    Attributes:
        name, shape, dtype: of the tensor.
        sources: tensors from which it is assembled.
        pieces: how it is assembled; None: it equals its single source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[StreamedTensor, ...]
    pieces: Pieces | None = None

    def boxes(self, source: StreamedTensor) -> list[Box]:
        """Boxes of a source. Requires ``pieces``."""
        assert self.pieces is not None
        return [box for box in self.pieces.boxes if box.stored == source.name]

    def whole(self, whole_of: Callable[[StreamedTensor], Tensor]) -> Tensor:
        """Assemble the tensor, contiguous, from unsharded sources."""
        if self.pieces is None:
            return whole_of(self.sources[0])
        tensors = {source.name: whole_of(source) for source in self.sources}
        views = [(box, _view(box, tensors[box.stored].reshape(-1))) for box in self.pieces.boxes]
        if len(views) == 1 and views[0][1].is_contiguous():
            return views[0][1].view(self.shape)
        device = next(iter(tensors.values())).device
        made = memory.empty(self.shape, self.dtype, device)
        for box, view in views:
            part = made
            for dim, (at, size) in enumerate(zip(box.at, view.shape, strict=True)):
                part = part.narrow(dim, at, size)
            part.copy_(view)
        return made

    def parts(self, source: StreamedTensor, first: int, flat: Tensor) -> Iterator[Part]:
        """Yield the elements of a range of a source, in parts that are contiguous in this tensor.

        Args:
            source: one of the sources.
            first: index of the first element in the buffer's tensor.
            flat: the elements.
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
            source: one of the sources.
            elements: indices in the buffer's tensor, int64, ascending.
            values: of these elements.

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
    """Returns the tensors of the receiver.

    Args:
        sents: parameters and buffers of the model.
        model: determines the layout in files.
        as_in_files: use names and layout of files; False: of the model.

    Raises:
        ValueError: a conversion of transformers does not fit, or is not a reindexing.
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
        sources = tuple(by_name[each] for each in names) or (sents[0],)  # an empty tensor has none
        kept = None if same is not None else pieces
        found.append(OutputTensor(name, tuple(pieces.shape), pieces.dtype, sources, kept))
    return found


def _view(box: Box, flat: Tensor) -> Tensor:
    """View of the elements of a box, with the dims of the assembled tensor.

    Args:
        box: of a stored tensor.
        flat: all elements of the stored tensor.
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
    place = memory.zeros_like(elements, torch.int64)
    for dim, (at, own) in enumerate(zip(box.at, box.dims, strict=True)):
        step = math.prod(shape[dim + 1 :])
        place += (index[own] + at) * step if own != -1 else at * step
    if bool(inside.any()):
        yield place[inside], values[inside]
