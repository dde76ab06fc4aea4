"""Which storages of a step can lie at one address, and where each of them lies. Pure integers.

[Note: Planned addresses]
Transient storages are filled and drained in nearly the same order in every step. So the memory that
they need can be planned from a record of one: each storage gets one address for life, in an arena
that is little longer than what was ever filled at once. A register allocator that scans lifetimes
does the same. But a storage has several lifetimes in a step (its unit's forward, and its backward),
steps of several microbatches end otherwise than they begin, and staging may outlast its step. What
all of that comes to is *who was filled while whom else was*. This is what is recorded, one bit for
each pair, and two storages may share bytes if they were never filled together.

Storages are numbered, and sets of them are integers: bit ``i`` stands for storage ``i``. A fill
costs two operations on such integers, however long the record is.

Worked example. Three equal blocks ``a b c`` are gathered one ahead, in forward and in backward:

    fill a, fill b, drain a, fill c, drain b | fill b, drain c, fill a, drain b, drain a

    together   a: b     b: a c     c: b
    addresses  a: 0     b: 1       c: 0      of an arena of two blocks

That each storage has one address, and not one for each of its lifetimes, makes where it lies no
matter of when: a step in another order finds all its storages at their addresses as long as no two
of one address meet, and whoever meets another gets ordinary memory. The price is paid where units
meet ever different others within one step: then the arena would have to be longer than what is
filled at once by more than ``SLACK``, and those that do not fit get no address.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Storages start at multiples of so many bytes, as torch's caching allocator has it on CUDA.
ALIGNMENT = 512
# An arena is at most so many times as long as what was filled at once.
SLACK = 1.5


def aligned(num_bytes: int) -> int:
    """``num_bytes``, rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def members(numbers: int) -> Iterator[int]:
    """The numbers in a set: ``0b1101`` gives 0, 2, 3."""
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest


@dataclass
class Overlaps:
    """Which storages were filled while which others were.

    Attributes:
        together: by storage, those that were there when it was filled; not the other way round.
        order: those that were filled, by their first fill (the keys of a dictionary).
        load: the most bytes that were filled at once.
    """

    together: list[int] = field(default_factory=list)
    order: dict[int, None] = field(default_factory=dict)
    load: int = 0

    @classmethod
    def of_moments(cls, moments: Sequence[Sequence[int]], sizes: Sequence[int]) -> Overlaps:
        """The record of a step that is known beforehand, by what is filled at its moments."""
        record = cls([0] * len(sizes))
        for moment in moments:
            there = sum(1 << number for number in set(moment))
            record.order.update(dict.fromkeys(moment))
            record.load = max(record.load, sum(sizes[number] for number in set(moment)))
            for number in dict.fromkeys(moment):
                record.together[number] |= there
        return record

    def both_ways(self) -> list[int]:
        """``together`` as a relation: ``a`` with ``b`` where ``b`` is with ``a``."""
        full = list(self.together)
        for number, others in enumerate(self.together):
            for other in members(others):
                full[other] |= 1 << number
        return [others & ~(1 << number) for number, others in enumerate(full)]

    def joined(self, other: Overlaps) -> Overlaps:
        """What holds for either."""
        pairs = itertools.zip_longest(self.together, other.together, fillvalue=0)
        together = [mine | theirs for mine, theirs in pairs]
        return Overlaps(together, {**self.order, **other.order}, max(self.load, other.load))

    def is_within(self, other: Overlaps) -> bool:
        """Whether it says nothing that ``other`` does not say."""
        known = other.both_ways()
        return self.order.keys() <= other.order.keys() and not any(
            self.together[number] & ~known[number] for number in self.order
        )


class Recorder:
    """Takes the record of what is filled and drained.

    Attributes:
        sizes: by storage, in bytes, aligned.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._filled = 0
        self._load = 0
        self._record = Overlaps()

    def add(self, num_bytes: int) -> int:
        """One more storage; returns its number."""
        self.sizes.append(aligned(num_bytes))
        self._record.together.append(0)
        return len(self.sizes) - 1

    def fill(self, number: int) -> None:
        """A storage, which has no memory, gets some."""
        record = self._record
        record.together[number] |= self._filled
        record.order[number] = None
        self._filled |= 1 << number
        self._load += self.sizes[number]
        if self._load > record.load:
            record.load = self._load

    def drain(self, number: int) -> None:
        """A storage, which has memory, loses it."""
        self._filled &= ~(1 << number)
        self._load -= self.sizes[number]

    def take(self) -> Overlaps:
        """The record so far; another one begins."""
        record, self._record = self._record, Overlaps([0] * len(self.sizes))
        return record


@dataclass(frozen=True)
class AddressPlan:
    """Where storages lie.

    Attributes:
        offsets: by storage, in bytes; None: it has no address.
        rivals: by storage, the others that have bytes in common with it.
        num_bytes: of the arena.
        is_complete: every storage that was used has an address.
    """

    offsets: tuple[int | None, ...]
    rivals: tuple[int, ...]
    num_bytes: int
    is_complete: bool


def plan_addresses(sizes: Sequence[int], record: Overlaps, limit: int | None = None) -> AddressPlan:
    """Addresses for all storages of a record.

    Storages are placed one after the other, each at the lowest address that is free of those it
    was filled together with: the largest first, or in the order of use, whichever makes the shorter
    arena.

    Args:
        sizes: by storage, in bytes, all of them aligned.
        record: of a step.
        limit: the most bytes that the arena may have. None: ``SLACK`` times the record's load.
    """
    if limit is None:
        limit = aligned(int(SLACK * record.load))
    together = record.both_ways()
    by_use = list(record.order)
    by_size = sorted(by_use, key=lambda number: -sizes[number])
    placed = [_place(order, sizes, together, limit) for order in (by_size, by_use)]
    offsets = min(placed, key=lambda found: (-len(found), _stop(found, sizes)))
    return AddressPlan(
        tuple(offsets.get(number) for number in range(len(sizes))),
        _overlaps(offsets, sizes),
        _stop(offsets, sizes),
        len(offsets) == len(by_use),
    )


def _place(
    order: Sequence[int], sizes: Sequence[int], together: Sequence[int], limit: int
) -> dict[int, int]:
    """First fit: an offset for each storage that has room."""
    offsets: dict[int, int] = {}
    placed = 0
    for number in order:
        size, start = sizes[number], 0
        taken = sorted(
            (offsets[other], sizes[other]) for other in members(together[number] & placed)
        )
        for offset, length in taken:
            if start + size <= offset:
                break
            start = max(start, offset + length)
        if start + size <= limit:
            offsets[number] = start
            placed |= 1 << number
    return offsets


def _stop(offsets: dict[int, int], sizes: Sequence[int]) -> int:
    return max((offset + sizes[number] for number, offset in offsets.items()), default=0)


def _overlaps(offsets: dict[int, int], sizes: Sequence[int]) -> tuple[int, ...]:
    """By storage, the others that have bytes in common with it: those that start before it stops,
    but for those that stop before it starts."""
    by_start = sorted(offsets, key=lambda number: offsets[number])
    by_stop = sorted(offsets, key=lambda number: offsets[number] + sizes[number])
    starts = [offsets[number] for number in by_start]
    stops = [offsets[number] + sizes[number] for number in by_stop]
    started = list(itertools.accumulate((1 << number for number in by_start), initial=0))
    stopped = list(itertools.accumulate((1 << number for number in by_stop), initial=0))
    rivals = [0] * len(sizes)
    for number, offset in offsets.items():
        before_its_stop = started[bisect.bisect_left(starts, offset + sizes[number])]
        before_its_start = stopped[bisect.bisect_right(stops, offset)]
        rivals[number] = before_its_stop & ~before_its_start & ~(1 << number)
    return tuple(rivals)
