"""The offsets of tensors in a flat buffer, and the range that each rank holds. Pure integers.

A :class:`Layout` places tensors in a buffer of ``numel`` elements, which is sharded into
``inner_size * outer_size`` equal shards:

    |  a  |g|    b    |   c   | tail |        g: padding, because starts are aligned
    |     inner 0     |     inner 1     |     depth 1: one shard for each inner rank
    | out 0  | out 1  | out 0  | out 1  |     depth 2: inner shards, sharded over outer ranks

Ranges nest ([Note: Depth] in ``strategies/pair.py``). If a shard boundary is inside a tensor,
neighbouring ranks hold pieces of the tensor. Layouts need no device and no process group, so a
layout for 4,096 ranks can be tested in one process.

Worked example: two tensors of shape (10, 7) and (50,), two inner ranks, one outer rank. Starts are
multiples of 64: the first tensor has elements [0, 70), the second [128, 178). Shards are equal and
a multiple of 64: 178 elements need 2 x 128 = 256. Rank 0 holds [0, 128), all of the first tensor;
rank 1 holds the second tensor. Padding: [70, 128) and [178, 256).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

# Tensors start, and shards end, on multiples of this many elements. 64 one-byte elements are a
# cache line, and every shard is then 16-byte aligned for any dtype and any number of ranks.
ALIGNMENT = 64
# Optimizers quantise state in blocks of 256 consecutive elements of tensors of at least 4,096. No
# shard boundary is inside such a block, counted from the tensor's start ([Note: Blocks] in
# placement.py).
BLOCK = 256
MIN_BLOCK_NUMEL = 4096


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TensorSlot:
    """The place of a tensor in a flat buffer.

    Attributes:
        name: Name of the tensor.
        shape: Its shape.
        offset: Index of its first element in the buffer.
        granule: Number of consecutive elements, counted from the tensor's start, that no shard
            boundary may separate.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    granule: int = 1

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Coordinate:
    """The index of a rank along each of the two axes."""

    outer: int
    inner: int


class RangesOfRanks(NamedTuple):
    """The elements of a tensor that each rank holds, in the order of ranks within a buffer.

    For two tensors of one shape, these tuples are equal if and only if each rank holds the same
    range of both tensors.

    Attributes:
        first_rank: Index of the first rank that holds elements.
        first: Number of elements that ``first_rank`` holds.
        next: Number of elements of each following rank. If there are several, the last one may
            hold fewer. 0: no rank follows.
    """

    first_rank: int
    first: int
    next: int


@dataclass(frozen=True)
class Layout:
    """Tensors in a buffer of ``numel`` elements, with ``inner_size`` x ``outer_size`` equal shards.

    An axis along which no role is sharded has size 1 here, whatever its size in the mesh.

    Raises:
        ValueError: Tensors overlap, are out of order, unaligned or out of bounds; ``numel`` is not
            divisible into aligned shards; or a shard boundary is inside a granule.
    """

    slots: tuple[TensorSlot, ...]
    numel: int
    inner_size: int = 1
    outer_size: int = 1

    def __post_init__(self) -> None:
        if self.inner_size < 1 or self.outer_size < 1:
            raise ValueError(
                f"axis sizes: expected at least 1; found {self.inner_size} (inner), "
                f"{self.outer_size} (outer)"
            )
        if self.numel % (self.num_shards * ALIGNMENT):
            raise ValueError(
                f"numel: expected a multiple of {self.num_shards} shards x {ALIGNMENT}; "
                f"found {self.numel}"
            )
        end = 0
        for slot in self.slots:
            if slot.offset % ALIGNMENT:
                raise ValueError(
                    f"{slot.name}: expected an offset on a multiple of {ALIGNMENT}; "
                    f"found {slot.offset}"
                )
            if slot.offset < end:
                raise ValueError(
                    f"{slot.name}: expected to start at {end} or later; found {slot.offset}"
                )
            if slot.granule > 1 and slot.numel:
                self._check_granule(slot)
            end = slot.stop
        if end > self.numel:
            raise ValueError(f"numel: expected at least {end}; found {self.numel}")

    def _check_granule(self, slot: TensorSlot) -> None:
        size = self.shard_numel
        first = slot.offset // size + 1
        last = (slot.stop - 1) // size
        # Boundaries are at first * size, (first + 1) * size, ...: all are multiples of the granule
        # if the first boundary and the shard size are.
        broken = first <= last and (
            (first * size - slot.offset) % slot.granule or (last > first and size % slot.granule)
        )
        if broken:
            raise ValueError(
                f"{slot.name}: expected shard boundaries on multiples of its granule "
                f"{slot.granule}, counted from its offset {slot.offset}; found boundaries on "
                f"multiples of {size}"
            )

    @property
    def num_shards(self) -> int:
        return self.inner_size * self.outer_size

    @property
    def shard_numel(self) -> int:
        """Number of elements in a shard at depth 2, the smallest one."""
        return self.numel // self.num_shards

    @property
    def num_tensor_elements(self) -> int:
        """Number of elements that belong to a tensor."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Number of elements that belong to no tensor, including those after the last tensor."""
        return self.numel - self.num_tensor_elements

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Ranges ``[start, stop)`` of padding between tensors and after the last one."""
        found, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                found.append((end, slot.offset))
            end = slot.stop
        if self.numel > end:
            found.append((end, self.numel))
        return tuple(found)

    def range(self, depth: int, at: Coordinate) -> tuple[int, int]:
        """Returns the range ``[start, stop)`` of the rank ``at`` at ``depth`` (0, 1 or 2)."""
        if depth == 0:
            return 0, self.numel
        inner = self.numel // self.inner_size
        start = (at.inner % self.inner_size) * inner
        if depth == 1:
            return start, start + inner
        size = inner // self.outer_size
        start += (at.outer % self.outer_size) * size
        return start, start + size

    def boundary_multiple(self, index: int) -> int:
        """Returns the greatest common divisor of the shard boundaries inside tensor ``index``.

        Boundaries are counted in elements from the tensor's start. 0: no boundary is inside it.
        """
        slot, size = self.slots[index], self.shard_numel
        if not slot.numel:
            return 0
        first, last = slot.offset // size + 1, (slot.stop - 1) // size
        if first > last:
            return 0
        return math.gcd(first * size - slot.offset, size if last > first else 0)

    def ranges_of_ranks(self, index: int, depth: int) -> RangesOfRanks:
        """Returns the ranges of all ranks of tensor ``index`` at ``depth``."""
        slot = self.slots[index]
        _, size = self.range(depth, Coordinate(0, 0))
        first_rank, before = divmod(slot.offset, size) if slot.numel else (0, 0)
        first = min(size - before, slot.numel)
        return RangesOfRanks(first_rank, first, min(size, slot.numel - first))

    def tensor_range(self, index: int, depth: int, at: Coordinate) -> tuple[int, int]:
        """Returns the elements ``[start, stop)`` of tensor ``index`` within ``range(depth, at)``.

        They are counted in row-major order from the tensor's start. ``(k, k)`` if there are none.
        """
        slot = self.slots[index]
        start, stop = self.range(depth, at)
        low = min(max(start - slot.offset, 0), slot.numel)
        high = min(max(stop - slot.offset, 0), slot.numel)
        return low, max(low, high)
