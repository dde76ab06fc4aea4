"""Splits a row of tensors into buckets. Pure integers.

A bucket closes with the tensor that reaches its size, so buckets are at least as large, and none is
cut. Worked example, sizes 5, 5, 8, 2 and 4: with ``size=10`` the buckets are (5, 5), (8, 2), (4);
with ``num_buckets=2``, of 24 elements, (5, 5, 8) and (2, 4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def split_by_size(sizes: Sequence[int], size: int) -> list[range]:
    """Positions of each bucket; all but the last hold ``size`` elements or more."""
    buckets: list[range] = []
    start = held = 0
    for position, numel in enumerate(sizes):
        held += numel
        if held >= size:
            buckets.append(range(start, position + 1))
            start, held = position + 1, 0
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets


def split_by_count(sizes: Sequence[int], num_buckets: int) -> list[range]:
    """Positions of each of ``num_buckets`` buckets, or fewer where tensors are too few or large.

    A bucket closes with the tensor that reaches an equal share of the rest.
    """
    buckets: list[range] = []
    start = held = 0
    left = sum(sizes)
    for position, numel in enumerate(sizes):
        held += numel
        shares = num_buckets - len(buckets)
        if shares > 1 and held * shares >= left:
            buckets.append(range(start, position + 1))
            start, left, held = position + 1, left - held, 0
    if start < len(sizes):
        buckets.append(range(start, len(sizes)))
    return buckets


def bucket_multiple(num_ranks: int, *, padded: bool) -> int:
    """What a bucket's elements are a multiple of.

    The least common multiple of the ranks and of 128, so that parts are equal and every rank's
    transfers are aligned; ``padded``: 2^16 for each rank, which NCCL's rings carry fastest
    (Megatron-Core's rules).
    """
    return num_ranks * 2**16 if padded else math.lcm(num_ranks, 128)
