"""The sum of the summands of a step by one binary tree, on any number of ranks.

Summands are added in their order. Partial sums of equal numbers of summands are added at once, as
the digits of a binary counter carry, so that at most ``log2(n) + 1`` of them exist::

    summands 0 1 2 3 4 5     ((0 + 1) + (2 + 3)) + (4 + 5)

A partial sum of 2, 4, 8, ... summands that begins at a multiple of this number is a node of the
tree. It can be added as one summand, for example when another rank has computed it.
"""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """The partial sums of one tree.

    Args:
        num_summands: Number of summands of the tree.
    """

    def __init__(self, num_summands: int) -> None:
        self._num_missing = num_summands
        self._partial: list[tuple[int, Tensor]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all summands were added."""
        return not self._num_missing

    def add(self, summand: Tensor, count: int = 1) -> None:
        """Add the next summand, or the sum of the next ``count`` summands.

        Args:
            summand: A tensor in the dtype of the sum. It is not kept and not changed.
            count: A power of two, the same in all calls.
        """
        assert count <= self._num_missing
        self._num_missing -= count
        total, is_own = summand, False
        while self._partial and self._partial[-1][0] == count:
            total, is_own = self._partial.pop()[1].add_(total), True
            count *= 2
        self._partial.append((count, total if is_own else total.clone()))

    def take(self) -> Tensor:
        """Returns the sum of all summands. Call it once, since it drops the partial sums.

        A zero has a positive sign, whatever the signs of its summands.
        """
        assert self.is_complete
        total = self._partial.pop()[1]
        while self._partial:
            total = self._partial.pop()[1].add_(total)
        return total.add_(0.0)
