"""A communicator that adds the summands of ranks by a tree: see ``fixed_order_sums.py``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.extensions.fixed_order_sums.tree_sum import TreeSum
from fsdp_engine.memory import allocator


class StepTrees:
    """The trees of the current step, one for each reduction.

    Args:
        leaves: Number of leaves of each tree.
        count: Number of leaves that a summand of a rank consists of.
    """

    def __init__(self, leaves: int, count: int) -> None:
        self._leaves = leaves
        self._count = count
        self._trees: dict[int, TreeSum] = {}

    def add(self, tag: int, summand: Tensor) -> None:
        """Add the next summand of the reduction with this tag."""
        self._trees.setdefault(tag, TreeSum(self._leaves)).add(summand, self._count)

    def take_mean(self, tag: int) -> Tensor | None:
        """Returns the mean over the leaves of a reduction, and begins its next tree. None: leaves
        are missing."""
        if not self._trees[tag].is_complete:
            return None
        return self._trees.pop(tag).take().div_(self._leaves)

    def is_taken(self, tag: int) -> bool:
        """Returns whether the last tree of a reduction is complete and taken."""
        return tag not in self._trees

    def check_empty(self) -> None:
        """Check that all trees are complete and taken."""
        assert not self._trees

    def drop(self) -> None:
        """Forget all summands."""
        self._trees.clear()


class FixedOrderCommunicator(Communicator):
    """A communicator whose reductions send each rank's summands to the rank that needs the sum.

    Args:
        group: The ranks of the axis.
        device: The device of the tensors.
        trees: The trees to which a reduction adds the summands. The result is the mean over their
            leaves, or zeros until all leaves were added. None: each reduction has a separate tree
            of its summands, whose sum is the result.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, trees: StepTrees | None) -> None:
        super().__init__(group, device)
        self._trees = trees

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        *,
        reduce_dtype: torch.dtype | None = None,
        average: bool = False,
        divisor: float = 1.0,
        accumulate: bool = False,
        tag: int = 0,
    ) -> Steps:
        """See :class:`Communicator`. ``average`` has no effect, since the mean is over leaves.

        Raises:
            RuntimeError: ``accumulate`` is set: the gradients of several backwards would be added.
        """
        del average
        assert reduce_dtype in (None, full.dtype)
        assert divisor == 1.0
        if accumulate:
            raise RuntimeError(
                "backward: expected one backward of each leaf with FixedOrderSums; found others "
                "within it, whose gradients are added"
            )
        own = self.part(full)
        sizes = [own.numel()] * self.size
        sent_sizes = [self.part(full, rank).numel() for rank in range(self.size)]
        received = allocator.empty(sum(sizes), full.dtype, full.device)
        yield from self.exchange(received, full, sizes, sent_sizes, tag)
        parts = list(received.split(sizes))
        parts[self.rank] = own
        if self._trees is None:
            tree = TreeSum(self.size)
            for part in parts:
                tree.add(part)
            out.copy_(tree.take())
            return
        for part in parts:
            self._trees.add(tag, part)
        mean = self._trees.take_mean(tag)
        if mean is None:
            out.zero_()
        else:
            out.copy_(mean)

    def all_reduce(self, tensor: Tensor, *, average: bool = False, tag: int = 0) -> Steps:
        """See :class:`Communicator`. Gathers a sum only once its tree is complete."""
        yield from self.reduce_scatter(tensor, self.part(tensor), average=average, tag=tag)
        if self._trees is None or self._trees.is_taken(tag):
            yield from self.all_gather(tensor, None, tag + 1)
