"""Allocation of transient storages from one block of memory, by first fit.

[Note: Arena]
An arena is one block of memory for all transient storages of one role. Filling a storage assigns
it the lowest free range of bytes that is long enough. Steps fill and free storages in nearly the
same order, so in steady steps each storage finds its range free again and nothing is allocated.
Each range that was used has a *piece*, a storage object over its bytes. A storage is filled by
swapping its memory, which is empty, with that of the piece (``UntypedStorage._swap_data_ptr_``,
from torch 2.13 on), and freed by swapping back: the storage under autograd's views stays the same
object. Every piece keeps the memory of the arena alive.

Ranges are assigned in an unbounded address space, of which the arena backs the first bytes. A
storage whose range is beyond the end gets ordinary memory. If this happened in a step, the arena
is reallocated at the next fill at which no storage uses its memory. Its new length is the highest
address assigned so far, but at most ``SLACK`` times the most bytes ever filled at once. It never
becomes shorter.

    fill a, fill b, free a, fill c, free b, fill d        equal sizes: a 0, b 1, c 0, d 1

On CUDA, storages of one role are freed after compute has finished with them, and filled after the
work that was submitted to compute before. So all work on a range, on any lane, is done before the
range is assigned again. An arena is allocated within a fill, so that its memory belongs to the lane
of the fill. With ``nccl_ub`` it is allocated before any step, for a step in module order, and keeps
its length (``expect``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

# Ranges start at multiples of this many bytes, like those of torch's caching allocator on CUDA.
ALIGNMENT = 512
# Largest ratio of the arena's length to the most bytes that were filled at once.
SLACK = 1.5


def aligned(num_bytes: int) -> int:
    """Returns ``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Range(NamedTuple):
    """Bytes ``start`` to ``stop``, assigned to ``owner``; ``piece`` is None outside the arena."""

    start: int
    stop: int
    owner: Hashable
    piece: torch.UntypedStorage | None


class Arena:
    """The memory of all storages of one role. See the module docstring.

    Args:
        allocate: Returns a 1-D uint8 tensor of the given number of bytes.
        book: Called with the number of bytes by which the arena grows.

    Attributes:
        memory: The memory of the arena. None until :meth:`expect` is called, or until the first
            fill after a step has ended.
        load: Most bytes that were filled at once; each storage is rounded up to the alignment.
    """

    def __init__(self, allocate: Callable[[int], Tensor], book: Callable[[int], None]) -> None:
        self.memory: Tensor | None = None
        self.load = 0
        self._allocate = allocate
        self._book = book
        self._is_fixed = False
        self._num_bytes = 0
        self._taken: list[_Range] = []  # sorted by start
        self._num_taken = 0  # bytes in assigned ranges
        self._end = 0  # highest end of a range that was assigned
        self._is_due = False
        self._pieces: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._units: list[list[int]] = []

    def begin_unit(self) -> None:
        """Start the next unit. Storages that are added afterwards belong to it."""
        self._units.append([])

    def add(self, num_bytes: int) -> None:
        """Record the size of a storage of the current unit, for :meth:`expect`."""
        if self._units:
            self._units[-1].append(num_bytes)

    def expect(self, moments: Sequence[Sequence[int]]) -> None:
        """Allocate the arena before any step. Its length does not change afterwards.

        Args:
            moments: For each moment, the indices of the units whose storages are filled, in the
                order of filling. Units are numbered in the order of :meth:`begin_unit`.
        """
        held: dict[int, None] = {}
        for moment in moments:
            for unit in [each for each in held if each not in moment]:
                del held[unit]
                for place in range(len(self._units[unit])):
                    self._release((unit, place))
            for unit in moment:
                if unit not in held:
                    held[unit] = None
                    for place, num_bytes in enumerate(self._units[unit]):
                        self._reserve((unit, place), num_bytes)
        self._taken.clear()
        self._num_taken = 0
        self._grow()
        self._is_fixed = True

    def fill(self, storage: torch.UntypedStorage, num_bytes: int) -> bool:
        """Fill the empty ``storage`` from the arena; returns whether the arena had room."""
        if self._is_due and all(taken.piece is None for taken in self._taken):
            self._grow()
        piece = self._reserve(storage._cdata, num_bytes)
        if piece is None:
            return False
        storage._swap_data_ptr_(piece)  # type: ignore[attr-defined]
        return True

    def free(self, storage: torch.UntypedStorage) -> bool:
        """Free ``storage`` if the arena has filled it; returns whether the arena had."""
        piece = self._release(storage._cdata)
        if piece is None:
            return False
        storage._swap_data_ptr_(piece)  # type: ignore[attr-defined]
        return True

    def end_step(self) -> None:
        """End a step. If the arena was too short, the next possible fill reallocates it."""
        self._is_due = not self._is_fixed and self._length() > self._num_bytes

    def _length(self) -> int:
        return min(self._end, aligned(int(SLACK * self.load)))

    def _reserve(self, owner: Hashable, num_bytes: int) -> torch.UntypedStorage | None:
        """Assign the first free range; returns its piece if the range is within the arena."""
        size, start, place = aligned(num_bytes), 0, 0
        for taken in self._taken:
            if start + size <= taken.start:
                break
            start = taken.stop
            place += 1
        stop, piece = start + size, None
        if stop <= self._num_bytes:
            piece = self._piece(start, num_bytes)
        self._taken.insert(place, _Range(start, stop, owner, piece))
        self._end = max(self._end, stop)
        self._num_taken += size
        self.load = max(self.load, self._num_taken)
        return piece

    def _release(self, owner: Hashable) -> torch.UntypedStorage | None:
        """Free the range of ``owner``; returns its piece if the range is within the arena."""
        for place, taken in enumerate(self._taken):
            if taken.owner == owner:
                del self._taken[place]
                self._num_taken -= taken.stop - taken.start
                return taken.piece
        return None

    def _piece(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Returns a storage over these bytes, which keeps the memory of the arena alive."""
        piece = self._pieces.get((start, num_bytes))
        if piece is None:
            assert self.memory is not None
            part: Tensor = from_dlpack(to_dlpack(self.memory[start : start + num_bytes]))
            piece = self._pieces[start, num_bytes] = part.untyped_storage()
        return piece

    def _grow(self) -> None:
        self._is_due = False
        # Free the old memory first, so that both are never allocated together.
        self.memory = None
        self._pieces.clear()
        self._book(-self._num_bytes)
        self._num_bytes = self._length()
        self.memory = self._allocate(self._num_bytes)
        self._book(self._num_bytes)
