"""Which rank steps which parameter, if an optimizer needs whole tensors. Pure numbers.

[Note: Choice of owners]
Each parameter gets one owner among the ranks that share it. The busiest rank bounds the time of a
step, and the rank with the most state bounds memory. So both are balanced: parameters are taken in
the order of their share of all work or of all elements, whichever is larger, and each goes to a
rank that holds its middle, as long as that has less than the mean with it, and otherwise to the
rank whose larger share is the smallest so far (longest processing time first, R. L. Graham, "Bounds
on multiprocessing timing anomalies", 1969: at most 4/3 of the best). Afterwards single parameters
of the busiest rank are moved, or swapped, where that lowers its share.

With few ranks many parameters lie on one rank as a whole, and those that are cut can go to any. So
a second attempt takes first those of which most lies on one rank. It is kept if its largest share
is not above the other's by more than ``_TOLERANCE``, and less travels.

The result depends on shapes alone, so ranks need not agree on it. No share can be below
:func:`least_share`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

# Parameters of one rank that are compared with those of others, in each attempt to improve.
_MOST_COMPARED = 64
_MOST_ATTEMPTS = 4096
# Of the largest share, for messages that are shorter.
_TOLERANCE = 0.01


class Item(NamedTuple):
    """A parameter to be owned.

    Attributes:
        work: of its step, in any unit.
        numel: its elements.
        near: ranks that would receive the least of it.
        numel_near: elements that each of them holds.
    """

    work: float
    numel: int
    near: Sequence[int] = ()
    numel_near: int = 0


def shorter_side(shape: Sequence[int]) -> int:
    """Of a tensor as a matrix, whose rows are the first dim."""
    rows = shape[0] if shape else 1
    return min(rows, math.prod(shape[1:]))


def step_work(shape: Sequence[int], *, multiplies: bool) -> float:
    """Work of a step.

    Args:
        shape: of the parameter.
        multiplies: whether matrices of its size are multiplied or decomposed: ``rows * columns *
            min(rows, columns)``, that of a product with the Gram matrix (Newton-Schulz iterations
            of Muon, K. Jordan et al. 2024), and of decompositions. Else its elements.
    """
    return float(math.prod(shape) * (shorter_side(shape) if multiplies else 1))


def least_share(work: Sequence[float], num_ranks: int) -> float:
    """The work that the busiest rank has at least: the mean, or, since one rank has ``k + 1`` of
    the ``k * num_ranks + 1`` largest items, the ``k + 1`` smallest of these, for any ``k``."""
    most = sorted(work, reverse=True)
    counts = range(-(-len(most) // num_ranks))
    crowds = (sum(most[k * num_ranks - k : k * num_ranks + 1]) for k in counts)
    return max(sum(work) / num_ranks, *crowds)


class _Shares:
    """Each rank's share of work and elements, and its items."""

    def __init__(self, items: Sequence[Item], num_ranks: int) -> None:
        work = sum(item.work for item in items) or 1.0
        numel = sum(item.numel for item in items) or 1
        self.of_item = [(item.work / work, item.numel / numel) for item in items]
        self.work = [0.0] * num_ranks
        self.elements = [0.0] * num_ranks
        self.items: list[list[int]] = [[] for _ in range(num_ranks)]

    @property
    def owners(self) -> list[int]:
        """The rank of each item."""
        rank_of = {number: rank for rank, numbers in enumerate(self.items) for number in numbers}
        return [rank_of[number] for number in range(len(self.of_item))]

    @property
    def largest(self) -> float:
        """Of all ranks."""
        return max(map(self.larger, range(len(self.items))))

    def larger(self, rank: int) -> float:
        return max(self.work[rank], self.elements[rank])

    def add(self, rank: int, number: int) -> None:
        self.items[rank].append(number)
        self._change(rank, number, 1.0)

    def remove(self, rank: int, number: int) -> None:
        self.items[rank].remove(number)
        self._change(rank, number, -1.0)

    def _change(self, rank: int, number: int, sign: float) -> None:
        work, elements = self.of_item[number]
        self.work[rank] += sign * work
        self.elements[rank] += sign * elements

    def after(self, rank: int, added: int | None, removed: int | None) -> float:
        """The larger share of a rank if it had one item more, or one less."""
        work, elements = self.work[rank], self.elements[rank]
        for number, sign in ((added, 1.0), (removed, -1.0)):
            if number is not None:
                work += sign * self.of_item[number][0]
                elements += sign * self.of_item[number][1]
        return max(work, elements)


def assign_owners(items: Sequence[Item], num_ranks: int) -> list[int]:
    """Choose the owner of each item. See [Note: Choice of owners].

    Args:
        items: parameters, in one order on all ranks.
        num_ranks: among which owners are chosen.

    Returns:
        The rank of each item.
    """
    shares = _Shares(items, num_ranks).of_item
    by_size = sorted(range(len(items)), key=lambda number: (-max(shares[number]), number))
    found = _assign(items, by_size, num_ranks)
    if any(item.numel_near for item in items):
        by_place = sorted(by_size, key=lambda number: -items[number].numel_near)
        other = _assign(items, by_place, num_ranks)
        if other.largest <= found.largest * (1 + _TOLERANCE) and numel_held(
            items, other.owners
        ) > numel_held(items, found.owners):
            found = other
    return found.owners


def numel_held(items: Sequence[Item], owners: Sequence[int]) -> int:
    """Elements that lie with their owners already."""
    pairs = zip(items, owners, strict=True)
    return sum(item.numel_near for item, owner in pairs if owner in item.near)


def _assign(items: Sequence[Item], order: Sequence[int], num_ranks: int) -> _Shares:
    """Choose owners for items in this order."""
    shares = _Shares(items, num_ranks)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for number in order:
        while heap[0][0] != shares.larger(heap[0][1]):  # it has got something meanwhile
            heapq.heapreplace(heap, (shares.larger(heap[0][1]), heap[0][1]))
        near = min(items[number].near, key=shares.larger, default=heap[0][1])
        fits = shares.after(near, number, None) <= 1 / num_ranks
        shares.add(near if fits else heap[0][1], number)
    for _ in range(min(_MOST_ATTEMPTS, 2 * len(items))):
        if not _improve(shares):
            break
    return shares


def _improve(shares: _Shares) -> bool:
    """Lower the largest share by one move or one swap with another rank, if that is possible."""
    ranks = range(len(shares.items))
    busiest = max(ranks, key=lambda rank: (shares.larger(rank), -rank))
    limit = shares.larger(busiest) * (1 - 1e-9)
    others = sorted((rank for rank in ranks if rank != busiest), key=shares.larger)
    for other in others[:_MOST_COMPARED]:
        best: tuple[float, int, int | None] | None = None
        for mine in shares.items[busiest][:_MOST_COMPARED]:
            for theirs in (None, *shares.items[other][:_MOST_COMPARED]):
                result = max(shares.after(busiest, theirs, mine), shares.after(other, mine, theirs))
                if result < limit and (best is None or result < best[0]):
                    best = result, mine, theirs
        if best is not None:
            _, mine, returned = best
            shares.remove(busiest, mine)
            shares.add(other, mine)
            if returned is not None:
                shares.remove(other, returned)
                shares.add(busiest, returned)
            return True
    return False


def shares_of(items: Sequence[Item], owners: Sequence[int], num_ranks: int) -> list[Item]:
    """What each rank owns, as one item."""
    found = [Item(0.0, 0)] * num_ranks
    for item, owner in zip(items, owners, strict=True):
        before = found[owner]
        found[owner] = Item(before.work + item.work, before.numel + item.numel)
    return found


def in_chunks(work: Sequence[float], num_chunks: int) -> list[int]:
    """Divide one rank's items, in their order, into chunks of about equal work.

    Returns:
        The chunk of each item; items of one chunk are consecutive.
    """
    total, done, chunks = sum(work) or 1.0, 0.0, []
    for each in work:
        middle = (done + each / 2) / total
        chunks.append(min(int(middle * num_chunks), num_chunks - 1))
        done += each
    return chunks
