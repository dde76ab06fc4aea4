"""``Pieces``: a tensor that is assembled from boxes of stored tensors. No elements are read.

[Note: Pieces]
Libraries use different tensors in files than in memory: transformers 5 fuses the experts of a layer
into one tensor, concatenates q, k and v, transposes, interleaves. All of these operations are
reindexing: each element in memory is one element of a file. Therefore a tensor is represented by a
set of *boxes*. Each is a box of a stored tensor, at some offset in the assembled tensor, with
permuted dims. To concatenate, split, transpose or reshape tensors, only the offsets, lengths and
dims of their boxes are computed. Code that was written for tensors (``torch.stack``, ``torch.cat``,
``x.reshape(...)``) can be called with :class:`Pieces`. The boxes of the result determine at which
bytes of the files its elements are, and each rank reads the bytes of its slices.

A box contains the *refined* shape of the stored tensor: a reshape that splits a dim also splits
this dim of the stored tensor, which does not change the order of row-major elements. A reshape that
joins two dims whose elements are not consecutive creates a box for each index of the first dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

# Maximum number of boxes of a tensor. Reading more boxes one by one would be too slow.
MOST_BOXES = 1 << 16

# Value in ``Box.dims`` for a dim of size 1 that does not exist in the stored tensor.
_NEW = -1


@dataclass(frozen=True)
class Box:
    """A box of a stored tensor, and its position in the assembled tensor.

    Attributes:
        stored: An object that identifies the stored tensor.
        shape: The refined shape of the stored tensor.
        starts, lengths: The starts and lengths of the box, for each dim of ``shape``.
        at: The offset of the box in the assembled tensor, for each dim of the assembled tensor.
        dims: The dim of ``shape`` for each dim of the assembled tensor; -1 if there is none. The
            box has length 1 along all other dims of ``shape``.
    """

    stored: Any
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    at: tuple[int, ...]
    dims: tuple[int, ...]

    def length(self, dim: int) -> int:
        """Returns the length of the box along a dim of the assembled tensor."""
        own = self.dims[dim]
        return 1 if own == _NEW else self.lengths[own]

    def moved(self, dim: int, at: int) -> Box:
        """Returns the box at offset ``at`` along a dim of the assembled tensor."""
        return replace(self, at=_put(self.at, dim, at))

    def narrowed(self, dim: int, start: int, stop: int) -> Box | None:
        """Returns the part of the box within [start, stop) of a dim of the assembled tensor; None
        if it is empty."""
        first = max(start, self.at[dim])
        last = min(stop, self.at[dim] + self.length(dim))
        if first >= last:
            return None
        own = self.dims[dim]
        if own == _NEW:
            return self
        return replace(
            self.moved(dim, first),
            starts=_put(self.starts, own, self.starts[own] + first - self.at[dim]),
            lengths=_put(self.lengths, own, last - first),
        )


class Pieces:
    """A tensor that is assembled from boxes, which partition it. See [Note: Pieces].

    Attributes:
        shape: The shape of the assembled tensor.
        dtype: The dtype of its elements.
        boxes: The boxes of its elements.
    """

    def __init__(
        self, shape: Iterable[int], dtype: torch.dtype, boxes: Iterable[Box | None]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.boxes = tuple(box for box in boxes if box is not None)
        if len(self.boxes) > MOST_BOXES:
            raise ValueError(f"expected at most {MOST_BOXES} boxes; found {len(self.boxes)}")

    @classmethod
    def of(cls, stored: Any, shape: Sequence[int], dtype: torch.dtype) -> Pieces:
        """Returns the pieces of one stored tensor of this shape."""
        sizes = tuple(shape)
        zeros = (0,) * len(sizes)
        box = Box(stored, sizes, zeros, sizes, zeros, tuple(range(len(sizes))))
        return cls(sizes, dtype, [box] if math.prod(sizes) else [])

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def dim(self) -> int:
        """Returns the number of dims."""
        return len(self.shape)

    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Returns the sizes of all dims, or the size of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Pieces:
        """Returns the object itself, because pieces have no memory."""
        return self

    clone = contiguous

    def narrow(self, dim: int, start: int, length: int) -> Pieces:
        """Take a range of a dim, as ``torch.narrow`` does.

        Raises:
            ValueError: The range is not within the dim.
        """
        dim %= self.ndim
        size = self.shape[dim]
        start += size if start < 0 else 0
        if not 0 <= start <= start + length <= size:
            raise ValueError(
                f"narrow: expected a range within dim {dim} of size {size}; found "
                f"[{start}, {start + length})"
            )
        parts = (box.narrowed(dim, start, start + length) for box in self.boxes)
        moved = (box.moved(dim, box.at[dim] - start) for box in parts if box is not None)
        return Pieces(_put(self.shape, dim, length), self.dtype, moved)

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[Pieces, ...]:
        """Split a dim into ranges, as ``torch.split`` does."""
        whole = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - low) for low in range(0, whole, sizes)]
        if sum(sizes) != whole:
            raise ValueError(f"split: expected sizes with the sum {whole}; found {list(sizes)}")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return tuple(
            self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)
        )

    def chunk(self, count: int, dim: int = 0) -> tuple[Pieces, ...]:
        """Split a dim into ``count`` ranges, as ``torch.chunk`` does."""
        return self.split(max(math.ceil(self.shape[dim] / count), 1), dim)

    def unbind(self, dim: int = 0) -> tuple[Pieces, ...]:
        """Remove a dim and return the slices along it, as ``torch.unbind`` does."""
        return tuple(part.squeeze(dim) for part in self.split(1, dim))

    def permute(self, *dims: Any) -> Pieces:
        """Permute the dims, as ``torch.permute`` does."""
        order = [dim % self.ndim for dim in _sizes(dims)]
        return Pieces(
            [self.shape[dim] for dim in order],
            self.dtype,
            (
                replace(
                    box,
                    at=tuple(box.at[dim] for dim in order),
                    dims=tuple(box.dims[dim] for dim in order),
                )
                for box in self.boxes
            ),
        )

    def transpose(self, dim0: int, dim1: int) -> Pieces:
        """Swap two dims, as ``torch.transpose`` does."""
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permute(*order)

    def t(self) -> Pieces:
        """Swap the two dims, as ``torch.t`` does."""
        return self.transpose(0, 1) if self.ndim > 1 else self

    def unsqueeze(self, dim: int) -> Pieces:
        """Insert a dim of size 1, as ``torch.unsqueeze`` does."""
        dim %= self.ndim + 1
        return Pieces(
            _insert(self.shape, dim, 1),
            self.dtype,
            (
                replace(box, at=_insert(box.at, dim, 0), dims=_insert(box.dims, dim, _NEW))
                for box in self.boxes
            ),
        )

    def squeeze(self, dim: int) -> Pieces:
        """Remove a dim if its size is 1, as ``torch.squeeze`` does."""
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return Pieces(
            _drop(self.shape, dim),
            self.dtype,
            (replace(box, at=_drop(box.at, dim), dims=_drop(box.dims, dim)) for box in self.boxes),
        )

    def reshape(self, *sizes: Any) -> Pieces:
        """Change the shape, as ``torch.reshape`` does.

        Raises:
            ValueError: The number of elements differs, or the result has more than 65,536 boxes.
        """
        wanted = list(_sizes(sizes))
        if wanted.count(-1) == 1:
            rest = math.prod(size for size in wanted if size != -1)
            wanted[wanted.index(-1)] = self.numel() // max(rest, 1)
        if math.prod(wanted) != self.numel():
            raise ValueError(f"reshape: expected {self.numel()} elements; found {wanted}")
        if not self.numel():
            return Pieces(wanted, self.dtype, ())
        found: Pieces = self
        done = 0  # number of leading dims that match
        while done < len(wanted) or done < found.ndim:
            here = found.shape[done] if done < found.ndim else None
            size = wanted[done] if done < len(wanted) else None
            if here == size:
                done += 1
            elif here is None or (size == 1 and here != 1):
                found = found.unsqueeze(done)
            elif size is None or here == 1:
                found = found.squeeze(done)
            elif here % size == 0:
                found = found._cut(done, size)
            else:
                found = found._joined(done)
        return found

    view = reshape

    def flatten(self, start: int = 0, end: int = -1) -> Pieces:
        """Join the dims from ``start`` to ``end``, as ``torch.flatten`` does."""
        start, end = start % self.ndim, end % self.ndim
        return self.reshape(*self.shape[:start], -1, *self.shape[end + 1 :])

    def _cut(self, dim: int, rows: int) -> Pieces:
        """Split ``dim`` into two dims. The first has size ``rows``."""
        columns = self.shape[dim] // rows
        shape = (*self.shape[:dim], rows, columns, *self.shape[dim + 1 :])
        return Pieces(
            shape, self.dtype, (part for box in self.boxes for part in _cut(box, dim, columns))
        )

    def _joined(self, dim: int) -> Pieces:
        """Join ``dim`` and the next dim."""
        rows, columns = self.shape[dim : dim + 2]
        shape = (*self.shape[:dim], rows * columns, *self.shape[dim + 2 :])
        return Pieces(
            shape, self.dtype, (part for box in self.boxes for part in _joined(box, dim, columns))
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Implement functions such as ``torch.stack`` for pieces."""
        name = getattr(func, "__name__", str(func))
        known = _FUNCTIONS.get(name)
        if known is None:
            raise NotImplementedError(
                f"expected a reindexing ({', '.join(sorted(_FUNCTIONS))}); found torch.{name}"
            )
        return known(*args, **(kwargs or {}))


def cat(pieces: Sequence[Pieces], dim: int = 0) -> Pieces:
    """Concatenate pieces, as ``torch.cat`` does for tensors."""
    first = pieces[0]
    dim %= first.ndim
    at, boxes = 0, []
    for each in pieces:
        if _drop(each.shape, dim) != _drop(first.shape, dim) or each.dtype != first.dtype:
            raise ValueError(
                f"cat: expected shape {tuple(first.shape)} except along dim {dim}, and "
                f"{first.dtype}; found shape {tuple(each.shape)}, {each.dtype}"
            )
        boxes += [box.moved(dim, box.at[dim] + at) for box in each.boxes]
        at += each.shape[dim]
    return Pieces(_put(first.shape, dim, at), first.dtype, boxes)


def stack(pieces: Sequence[Pieces], dim: int = 0) -> Pieces:
    """Stack pieces along a new dim, as ``torch.stack`` does for tensors."""
    return cat([each.unsqueeze(dim) for each in pieces], dim)


def _method(name: str) -> Callable[..., Any]:
    def call(self: Pieces, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return call


_METHODS = ["chunk", "split", "transpose", "permute", "reshape", "narrow", "unsqueeze", "squeeze"]
_METHODS += ["flatten", "unbind", "t", "clone"]
_FUNCTIONS: dict[str, Callable[..., Any]] = {name: _method(name) for name in _METHODS}
_FUNCTIONS |= {"cat": cat, "concat": cat, "stack": stack}


def flat_parts(pieces: Pieces, first: int, last: int) -> Iterator[tuple[Box, list[int]]]:
    """Split a flat range [first, last) of an assembled tensor into boxes.

    Yields:
        Each box, and the row-major strides of the assembled tensor.
    """
    steps = [math.prod(pieces.shape[dim + 1 :]) for dim in range(pieces.ndim)]
    for starts, stops in rectangles(tuple(pieces.shape), first, last):
        for box in pieces.boxes:
            part: Box | None = box
            for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                part = part.narrowed(dim, start, stop) if part is not None else None
            if part is not None:
                yield part, steps


def rectangles(
    shape: tuple[int, ...], first: int, last: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Split a flat range [first, last) of a tensor into boxes. Yields the starts and stops of
    each."""
    if first >= last:
        return
    if not shape:
        yield [], []
        return
    row = math.prod(shape[1:])
    low, high = -(-first // row), last // row  # full rows
    if low > high:  # within one row
        yield from _within(shape, high, first - high * row, last - high * row)
        return
    if first < low * row:
        yield from _within(shape, low - 1, first - (low - 1) * row, row)
    if low < high:
        yield [low] + [0] * (len(shape) - 1), [high, *shape[1:]]
    if high * row < last:
        yield from _within(shape, high, 0, last - high * row)


def _within(
    shape: tuple[int, ...], row: int, first: int, last: int
) -> Iterator[tuple[list[int], list[int]]]:
    for starts, stops in rectangles(shape[1:], first, last):
        yield [row, *starts], [row + 1, *stops]


def _cut(box: Box, dim: int, columns: int) -> Iterator[Box]:
    """Split a dim of ``box`` into rows of ``columns`` elements. Yields full rows and partial
    rows."""
    first, last = box.at[dim], box.at[dim] + box.length(dim)
    low, high = -(-first // columns), last // columns
    if low < high:
        rows = box.narrowed(dim, low * columns, high * columns)
        assert rows is not None
        yield from _cut_rows(rows, dim, columns)
    ends = [(first, low * columns), (high * columns, last)] if low <= high else [(first, last)]
    for start, stop in ends:
        part = box.narrowed(dim, start, stop)
        if part is not None:
            yield _in_row(part, dim, columns)


def _cut_rows(box: Box, dim: int, columns: int) -> Iterator[Box]:
    """Split a dim of a box of full rows. Yields one box if the rows are aligned with rows of the
    stored tensor, else one box for each row."""
    own = box.dims[dim]
    if own == _NEW or box.shape[own] % columns or box.starts[own] % columns:
        for start in range(box.at[dim], box.at[dim] + box.length(dim), columns):
            row = box.narrowed(dim, start, start + columns)
            assert row is not None
            yield _in_row(row, dim, columns)
        return
    rows = [dims + (dims > own) for dims in box.dims]  # dims after `own` shift by one
    yield Box(
        box.stored,
        (*box.shape[:own], box.shape[own] // columns, columns, *box.shape[own + 1 :]),
        (*box.starts[:own], box.starts[own] // columns, 0, *box.starts[own + 1 :]),
        (*box.lengths[:own], box.lengths[own] // columns, columns, *box.lengths[own + 1 :]),
        (*box.at[:dim], box.at[dim] // columns, 0, *box.at[dim + 1 :]),
        (*rows[:dim], own, own + 1, *rows[dim + 1 :]),
    )


def _in_row(box: Box, dim: int, columns: int) -> Box:
    """Returns a box that is within one row, after the dim was split."""
    row, column = divmod(box.at[dim], columns)
    return replace(
        box,
        at=(*box.at[:dim], row, column, *box.at[dim + 1 :]),
        dims=(*box.dims[:dim], _NEW, *box.dims[dim:]),
    )


def _joined(box: Box, dim: int, columns: int) -> Iterator[Box]:
    """Join ``dim`` and the next dim of ``box``. The second has size ``columns``."""
    outer, inner = box.dims[dim], box.dims[dim + 1]
    at = box.at[dim] * columns + box.at[dim + 1]
    kept = (*box.at[:dim], at, *box.at[dim + 2 :])
    if outer == _NEW or box.lengths[outer] == 1:
        yield replace(box, at=kept, dims=(*box.dims[:dim], inner, *box.dims[dim + 2 :]))
    elif columns == 1:
        yield replace(box, at=kept, dims=(*box.dims[:dim], outer, *box.dims[dim + 2 :]))
    elif inner == outer + 1 and box.length(dim + 1) == columns == box.shape[inner]:
        # The rows are also consecutive in the stored tensor.
        fewer = [dims - (dims > outer) for dims in box.dims]
        yield Box(
            box.stored,
            (*box.shape[:outer], box.shape[outer] * columns, *box.shape[inner + 1 :]),
            (*box.starts[:outer], box.starts[outer] * columns, *box.starts[inner + 1 :]),
            (*box.lengths[:outer], box.lengths[outer] * columns, *box.lengths[inner + 1 :]),
            kept,
            (*fewer[:dim], outer, *fewer[dim + 2 :]),
        )
    else:
        for row in range(box.at[dim], box.at[dim] + box.length(dim)):
            part = box.narrowed(dim, row, row + 1)
            assert part is not None
            yield from _joined(part, dim, columns)


def _sizes(given: Sequence[Any]) -> Sequence[int]:
    """Returns the sizes in a call ``f(2, 3)`` or ``f((2, 3))``."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def _put(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _insert(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index:])


def _drop(values: Sequence[int], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])
