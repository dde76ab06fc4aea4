"""Tensors as a checkpoint's files have them, of those in memory: names, and what conversions of
``transformers`` do to them (``pretrained/conversions.py``)."""

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

# Where elements are in a tensor, int64; and their values.
Places = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that the receiver is given.

    Attributes:
        name, shape, dtype: its own.
        sources: what it is made of.
        pieces: how; None: it is its one source.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[StreamedTensor, ...]
    pieces: Pieces | None = None

    def boxes(self, source: StreamedTensor) -> list[Box]:
        """What of it ``source`` is; for one that has pieces."""
        assert self.pieces is not None
        return [box for box in self.pieces.boxes if box.stored == source.name]

    def whole(self, whole_of: Callable[[StreamedTensor], Tensor]) -> Tensor:
        """It, contiguous, given the whole of each source."""
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
        """Of elements of ``source`` (from ``first`` on of what this rank's buffer knows), those
        that are here, in parts that are contiguous here."""
        for there, part in source.parts(first, flat):
            if self.pieces is None:
                yield there, part
                continue
            for box in self.boxes(source):
                yield from parts_of_box(self.shape, box, there, part)

    def places(self, source: StreamedTensor, elements: Tensor, values: Tensor) -> Iterator[Places]:
        """Of some elements of ``source``, where they are here, int64; and their values.

        Args:
            source: one of the sources.
            elements: numbers in what this rank's buffer knows, int64, ascending.
            values: theirs.
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
    """What a receiver is given of these.

    Args:
        sents: parameters and buffers of the model.
        model: says how files have them.
        as_in_files: as files have them; else under their own names.

    Raises:
        ValueError: a rule of transformers does not fit, or is no reindexing.
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
    """The elements of a box, in the dims of the whole, given all of its tensor."""
    steps = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    first = sum(start * step for start, step in zip(box.starts, steps, strict=True))
    own = [(box.lengths[dim], steps[dim]) if dim != -1 else (1, 1) for dim in box.dims]
    sizes, strides = [size for size, _ in own], [step for _, step in own]
    return flat.as_strided(sizes, strides, int(flat.storage_offset()) + first)


def _in_box(shape: Sequence[int], box: Box, elements: Tensor, values: Tensor) -> Iterator[Places]:
    """Of some elements of a box's tensor those in the box: where they are in the whole."""
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
