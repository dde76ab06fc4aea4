"""Finds the parts of a rank's slices in tensors that have a different layout in files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from fsdp_engine.checkpoint.export_source import Part, Source
from fsdp_engine.checkpoint.pieces import Box, Pieces, rectangles


def source_of(name: str, pieces: Pieces, sources: Mapping[str, Source]) -> Source:
    """Create the source of a tensor in a file that is assembled from tensors in memory.

    Args:
        name: The name of the tensor in the file.
        pieces: The layout of the tensor. ``stored`` of a box is the name of a tensor in memory.
        sources: The tensors in memory, by name.
    """
    dtype = sources[pieces.boxes[0].stored].dtype if pieces.boxes else pieces.dtype

    def parts() -> Iterator[Part]:
        for box in pieces.boxes:
            for first, local in sources[box.stored].parts():
                yield from parts_of_box(pieces.shape, box, first, local.reshape(-1))

    return Source(name, tuple(pieces.shape), dtype, (), parts)


def parts_of_box(shape: Sequence[int], box: Box, first: int, flat: Tensor) -> Iterator[Part]:
    """Yield the intersection of a box with a flat range, in parts that are contiguous in the
    assembled tensor.

    Args:
        shape: The shape of the assembled tensor.
        box: A box of the assembled tensor.
        first: The index of the first element of ``flat`` in the stored tensor of the box.
        flat: Consecutive row-major elements of the stored tensor of the box.
    """
    steps = [math.prod(box.shape[dim + 1 :]) for dim in range(len(box.shape))]
    for starts, stops in rectangles(box.shape, first, first + flat.numel()):
        lows = [max(a, b) for a, b in zip(starts, box.starts, strict=True)]
        ends = [start + length for start, length in zip(box.starts, box.lengths, strict=True)]
        sizes = [min(a, b) - low for a, b, low in zip(stops, ends, lows, strict=True)]
        if any(size <= 0 for size in sizes):
            continue
        offset = sum(low * step for low, step in zip(lows, steps, strict=True)) - first
        own = [(sizes[dim], steps[dim]) if dim != -1 else (1, 1) for dim in box.dims]
        view = flat.as_strided(
            [size for size, _ in own],
            [step for _, step in own],
            int(flat.storage_offset()) + offset,
        )
        places = [
            at + (lows[dim] - box.starts[dim] if dim != -1 else 0)
            for at, dim in zip(box.at, box.dims, strict=True)
        ]
        yield from _runs(shape, places, view)


def _runs(shape: Sequence[int], places: Sequence[int], view: Tensor) -> Iterator[Part]:
    """Split ``view``, a box at offset ``places`` of a tensor of this ``shape``, into parts that are
    contiguous in that tensor."""
    full = len(shape)  # the box spans all dims from this one on
    while full > 0 and view.shape[full - 1] == shape[full - 1]:
        full -= 1
    outer = max(full - 1, 0)  # a range of the preceding dim is also contiguous
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    begin = sum(place * step for place, step in zip(places, steps, strict=True))
    for index in itertools.product(*(range(size) for size in view.shape[:outer])):
        yield begin + sum(i * step for i, step in zip(index, steps, strict=False)), view[index]
