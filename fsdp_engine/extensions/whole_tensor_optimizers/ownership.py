"""Choice of the rank that steps each parameter, for optimizers that need full tensors.

[Note: Choice of owners]
Each parameter gets one owner among the ranks that share it. The busiest rank bounds the time of a
step, and the rank with the most state bounds memory, so both are balanced. Parameters are assigned
in descending order of their share of all work or of all elements, whichever is larger. Each is
assigned to a rank that holds its middle element, if this gives the rank at most the mean share.
Otherwise it is assigned to the rank whose larger share is the smallest so far (longest processing
time first, R. L. Graham, "Bounds on multiprocessing timing anomalies", 1969: at most 4/3 of the
optimum).
Afterwards single parameters of the busiest rank are moved or swapped if that lowers its share.

With few ranks many parameters are completely on one rank, which can step them without
communication. For other parameters the choice of the owner saves little. So a second attempt first
assigns the parameters that have the most elements on one rank. It is used if its largest share
exceeds that of the first attempt by at most ``_TOLERANCE`` and fewer elements are communicated.

The result depends only on shapes, so all ranks compute the same. No largest share can be below
:func:`least_share`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

# Maximum number of parameters of a rank, and of ranks, that one attempt to improve compares, and
# maximum number of attempts.
_MOST_COMPARED = 64
_MOST_ATTEMPTS = 4096
# Accepted increase of the largest share, relative to it, if fewer elements are communicated.
_TOLERANCE = 0.01


class Item(NamedTuple):
    """A parameter, or several that are stepped at once, to assign to an owner.

    Attributes:
        work: Work of its step, in any unit.
        numel: Number of elements.
        near: Ranks that hold its middle element.
        numel_near: Number of its elements that each of these ranks holds.
    """

    work: float
    numel: int
    near: Sequence[int] = ()
    numel_near: int = 0


def shorter_side(shape: Sequence[int]) -> int:
    """Returns the shorter side of a tensor as a matrix whose rows are the first dim."""
    rows = shape[0] if shape else 1
    return min(rows, math.prod(shape[1:]))


def step_work(shape: Sequence[int], *, multiplies: bool) -> float:
    """Returns the work of a step.

    Args:
        shape: Shape of the parameter.
        multiplies: Whether matrices of its size are multiplied or decomposed. If so, the work is
            ``rows * columns * min(rows, columns)``, that of a decomposition or a product with the
            Gram matrix (Newton-Schulz iterations of Muon, K. Jordan et al. 2024). Otherwise it is
            the number of elements.
    """
    return float(math.prod(shape) * (shorter_side(shape) if multiplies else 1))


def least_share(work: Sequence[float], num_ranks: int) -> float:
    """Returns a lower bound of the busiest rank's work. It is the largest of these bounds: the
    mean, and, for each ``k``, the sum of the ``k + 1`` smallest of the ``k * num_ranks + 1``
    largest items, of which some rank has at least ``k + 1``."""
    most = sorted(work, reverse=True)
    counts = range(-(-len(most) // num_ranks))
    crowds = (sum(most[k * num_ranks - k : k * num_ranks + 1]) for k in counts)
    return max(sum(work) / num_ranks, *crowds)


class _Shares:
    """Each rank's shares of all work and of all elements, and its items."""

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
        """The largest share of any rank."""
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
        """Returns the larger share of a rank with one item added, or removed, or both."""
        work, elements = self.work[rank], self.elements[rank]
        for number, sign in ((added, 1.0), (removed, -1.0)):
            if number is not None:
                work += sign * self.of_item[number][0]
                elements += sign * self.of_item[number][1]
        return max(work, elements)


def assign_owners(items: Sequence[Item], num_ranks: int) -> list[int]:
    """Choose the owner of each item. See [Note: Choice of owners].

    Args:
        items: The items, in the same order on all ranks.
        num_ranks: Number of ranks among which owners are chosen.

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
    """Returns the number of elements of ``items`` that owners hold without communication."""
    pairs = zip(items, owners, strict=True)
    return sum(item.numel_near for item, owner in pairs if owner in item.near)


def _assign(items: Sequence[Item], order: Sequence[int], num_ranks: int) -> _Shares:
    """Choose owners for items in the given order."""
    shares = _Shares(items, num_ranks)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for number in order:
        while heap[0][0] != shares.larger(heap[0][1]):  # The share in the heap is outdated.
            heapq.heapreplace(heap, (shares.larger(heap[0][1]), heap[0][1]))
        near = min(items[number].near, key=shares.larger, default=heap[0][1])
        fits = shares.after(near, number, None) <= 1 / num_ranks
        shares.add(near if fits else heap[0][1], number)
    for _ in range(min(_MOST_ATTEMPTS, 2 * len(items))):
        if not _improve(shares):
            break
    return shares


def _improve(shares: _Shares) -> bool:
    """Lower the largest share by one move or one swap with another rank; returns whether it did."""
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
    """Returns the sum of each rank's items as one item."""
    found = [Item(0.0, 0)] * num_ranks
    for item, owner in zip(items, owners, strict=True):
        before = found[owner]
        found[owner] = Item(before.work + item.work, before.numel + item.numel)
    return found


def in_chunks(work: Sequence[float], num_chunks: int) -> list[int]:
    """Divide one rank's items, in their order, into chunks of about equal work.

    Returns:
        The chunk of each item. Items of one chunk are consecutive.
    """
    total, done, chunks = sum(work) or 1.0, 0.0, []
    for each in work:
        middle = (done + each / 2) / total
        chunks.append(min(int(middle * num_chunks), num_chunks - 1))
        done += each
    return chunks
