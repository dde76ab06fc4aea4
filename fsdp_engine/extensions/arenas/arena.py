"""Transient storages that are filled from one piece of memory, first fit.

[Note: Arena]
An arena is one piece of memory for all transient storages of one role. A storage that is filled
gets the lowest range of bytes that is free and long enough. Steps fill and drain storages in nearly
the same order, so in steady steps each range is found again and nothing is allocated. Each range
that was used has a *piece*, a storage object over these bytes. To fill a storage
is to swap its memory, none, with that of the piece (``UntypedStorage._swap_data_ptr_``, from torch
2.13 on), to drain it is to swap back: the storage under autograd's views stays the same object.
Every piece keeps the memory of the arena alive.

Ranges are assigned in an unbounded address space, of which the arena has the first bytes. A storage
whose range lies beyond gets ordinary memory. If a step has done so, the arena is allocated anew
with the next fill at which no storage has memory of it, as long as was needed so far, but at most
``SLACK`` times the most bytes ever filled at once. It never gets shorter.

    fill a, fill b, drain a, fill c, drain b, fill d        equal sizes: a 0, b 1, c 0, d 1

On CUDA all storages of one role are drained after compute is done with them, and filled after
compute. So the work on a range is done before the range is handed out again, on any lane. An arena
is allocated within a fill, so that its memory belongs to that lane; or, with ``nccl_ub``, as long
as a step in module order needs, before anything runs, and for good (``expect``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

# Ranges start at multiples of so many bytes, as those of torch's caching allocator on CUDA.
ALIGNMENT = 512
# An arena is at most so many times as long as the most bytes that were filled at once.
SLACK = 1.5


def aligned(num_bytes: int) -> int:
    """``num_bytes``, rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Range(NamedTuple):
    """Bytes from ``start`` to ``stop`` that ``owner`` has; ``piece``: they lie in the arena."""

    start: int
    stop: int
    owner: Hashable
    piece: torch.UntypedStorage | None


class Arena:
    """The memory of one role's storages. See the module docstring.

    Args:
        allocate: gives so many bytes, as a 1-D tensor of uint8.
        book: is called with the bytes by which the arena grows.

    Attributes:
        memory: The memory of the arena; None until a step has ended.
        load: most bytes that were filled at once, each storage rounded up to the alignment.
    """

    def __init__(self, allocate: Callable[[int], Tensor], book: Callable[[int], None]) -> None:
        self.memory: Tensor | None = None
        self.load = 0
        self._allocate = allocate
        self._book = book
        self._is_fixed = False
        self._num_bytes = 0
        self._taken: list[_Range] = []  # by start
        self._num_taken = 0  # bytes
        self._end = 0  # of the highest range that was handed out
        self._is_due = False
        self._pieces: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._units: list[list[int]] = []

    def begin_unit(self) -> None:
        """Storages that are added from here on are those of the next unit."""
        self._units.append([])

    def add(self, num_bytes: int) -> None:
        """One more storage, which :meth:`expect` has to count."""
        if self._units:
            self._units[-1].append(num_bytes)

    def expect(self, moments: Sequence[Sequence[int]]) -> None:
        """Allocate the arena before any step, for good.

        Args:
            moments: units whose storages are filled at one time, in the order in which they are
                filled, numbered as they were begun.
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
        """Give ``storage``, which is empty, bytes of the arena; returns whether they fit."""
        if self._is_due and all(taken.piece is None for taken in self._taken):
            self._grow()
        piece = self._reserve(storage._cdata, num_bytes)
        if piece is None:
            return False
        storage._swap_data_ptr_(piece)  # type: ignore[attr-defined]
        return True

    def drain(self, storage: torch.UntypedStorage) -> bool:
        """Take the memory of the arena away from ``storage``; returns whether it had any."""
        piece = self._release(storage._cdata)
        if piece is None:
            return False
        storage._swap_data_ptr_(piece)  # type: ignore[attr-defined]
        return True

    def end_step(self) -> None:
        """A backward is over: from the next fill on the arena is as long as it needed."""
        self._is_due = not self._is_fixed and self._length() > self._num_bytes

    def _length(self) -> int:
        return min(self._end, aligned(int(SLACK * self.load)))

    def _reserve(self, owner: Hashable, num_bytes: int) -> torch.UntypedStorage | None:
        """Hand out the first free range; returns its piece if it lies in the arena."""
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
        """Take a range back; returns its piece if it lies in the arena."""
        for place, taken in enumerate(self._taken):
            if taken.owner == owner:
                del self._taken[place]
                self._num_taken -= taken.stop - taken.start
                return taken.piece
        return None

    def _piece(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """A storage over just these bytes, which keeps the memory behind them alive."""
        piece = self._pieces.get((start, num_bytes))
        if piece is None:
            assert self.memory is not None
            part: Tensor = from_dlpack(to_dlpack(self.memory[start : start + num_bytes]))
            piece = self._pieces[start, num_bytes] = part.untyped_storage()
        return piece

    def _grow(self) -> None:
        self._is_due = False
        # The old memory goes first.
        self.memory = None
        self._pieces.clear()
        self._book(-self._num_bytes)
        self._num_bytes = self._length()
        self.memory = self._allocate(self._num_bytes)
        self._book(self._num_bytes)
