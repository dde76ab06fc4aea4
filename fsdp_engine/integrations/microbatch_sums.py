"""Sums over microbatches in an order that does not depend on which replica trains them.

Floating-point addition is not associative, so the order must be fixed. Microbatches are summed
along a binary tree over their numbers, whose nodes are aligned blocks. With 7 microbatches:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)

A replica trains a range of numbers, and sums the nodes that are within the range: at most 2 log2(n)
nodes for n microbatches. The nodes of all replicas are then summed in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_engine.memory import allocator

# Number of elements of a buffer that are exchanged at once.
_CHUNK_NUMEL = 1 << 22


def share_of(replica: int, num_replicas: int, num_microbatches: int) -> range:
    """Returns the numbers of the microbatches that a replica trains."""
    return range(
        replica * num_microbatches // num_replicas,
        (replica + 1) * num_microbatches // num_replicas,
    )


@dataclass
class _Node:
    """The sum of the microbatches ``start`` to ``stop - 1``, or only its position (no tensors)."""

    start: int
    stop: int
    tensors: Sequence[Tensor] = ()


class MicrobatchSums:
    """The sums of tensors of consecutive microbatches, as nodes of the tree.

    Args:
        num_microbatches: The number of microbatches of all replicas.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._nodes: list[_Node] = []

    @property
    def sums(self) -> list[Sequence[Tensor]]:
        """The tensors of each node, in the order of nodes."""
        return [node.tensors for node in self._nodes]

    def add(self, start: int, stop: int, tensors: Sequence[Tensor] = ()) -> None:
        """Add the next node.

        Args:
            start: The first microbatch of the node, which follows the last one that was added.
            stop: The microbatch after the last one of the node.
            tensors: The sums over the microbatches of the node. This object owns and changes them.
        """
        self._nodes.append(_Node(start, stop, tensors))
        while len(self._nodes) > 1 and self._are_siblings(*self._nodes[-2:]):
            right = self._nodes.pop()
            left = self._nodes[-1]
            left.stop = right.stop
            for ours, theirs in zip(left.tensors, right.tensors, strict=True):
                ours += theirs

    def _are_siblings(self, left: _Node, right: _Node) -> bool:
        size = left.stop - left.start
        is_whole = right.stop - right.start == size or right.stop == self._num_microbatches
        return is_whole and left.start % (2 * size) == 0

    def places(self) -> list[tuple[int, int]]:
        """Returns ``start`` and ``stop`` of each node."""
        return [(node.start, node.stop) for node in self._nodes]


def nodes_of(numbers: Iterable[int], num_microbatches: int) -> list[tuple[int, int]]:
    """Returns ``start`` and ``stop`` of the nodes of the tree that together contain the consecutive
    microbatches ``numbers``."""
    sums = MicrobatchSums(num_microbatches)
    for number in numbers:
        sums.add(number, number + 1)
    return sums.places()


def sum_over_replicas(
    group: dist.ProcessGroup,
    replica: int,
    num_replicas: int,
    sums: MicrobatchSums,
    results: Sequence[Tensor],
    num_microbatches: int,
) -> None:
    """Sum the nodes of all replicas along the tree, into ``results`` (1-D). Collective over
    ``group``.

    Each replica receives one part of all nodes, sums it and sends the sum to all replicas. With R
    replicas, a replica that has n nodes sends (n + 1) (R - 1) / R times the elements. An all-reduce
    sends 2 (R - 1) / R times the elements.
    """
    places = [
        nodes_of(share_of(each, num_replicas, num_microbatches), num_microbatches)
        for each in range(num_replicas)
    ]
    for number, result in enumerate(results):
        mine = [node[number] for node in sums.sums]
        for low in range(0, len(result), _CHUNK_NUMEL):
            chunk = result[low : low + _CHUNK_NUMEL]
            bounds = [each * len(chunk) // num_replicas for each in range(num_replicas + 1)]
            sizes = [stop - start for start, stop in pairwise(bounds)]
            parts = [
                node[low + start : low + stop] for start, stop in pairwise(bounds) for node in mine
            ]
            sent = torch.cat(parts) if parts else chunk[:0]
            part = sizes[replica]
            counts = [len(each) for each in places]
            received = allocator.empty(sum(counts) * part, chunk.dtype, chunk.device)
            _exchange(
                group,
                received,
                sent,
                [count * part for count in counts],
                [len(mine) * size for size in sizes],
            )
            whole = MicrobatchSums(num_microbatches)
            nodes = [node for each in places for node in each]
            for index, (start, stop) in enumerate(nodes):
                whole.add(start, stop, [received[index * part : (index + 1) * part]])
            (total,) = whole.sums
            _exchange(group, chunk, total[0].repeat(num_replicas), sizes, [part] * num_replicas)


def _exchange(
    group: dist.ProcessGroup,
    received: Tensor,
    sent: Tensor,
    received_sizes: list[int],
    sent_sizes: list[int],
) -> None:
    options = dist.AllToAllOptions()
    group.alltoall_base(received, sent, received_sizes, sent_sizes, options).wait()
