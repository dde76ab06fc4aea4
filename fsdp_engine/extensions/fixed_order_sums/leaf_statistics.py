"""Running statistics of batch normalization, whose updates do not depend on the number of ranks.

Each leaf begins with the statistics that the step began with, and updates them. At the end of the
step the running means and variances are set to their mean over the leaves, and counters of batches
to the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.extensions.fixed_order_sums.tree_sum import TreeSum
from fsdp_engine.memory import allocator

_MEANS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"


class LeafStatistics:
    """The statistics of one step.

    Args:
        model: The model.
        leaves: Number of leaves of the step.
    """

    def __init__(self, model: nn.Module, leaves: int) -> None:
        self._model = model
        self._means = list(_buffers_of(model, *_MEANS))
        self._counters = list(_buffers_of(model, _COUNTER))
        buffers = [*self._means, *self._counters]
        self._known = set(map(id, buffers))
        self._before = [each.clone() for each in buffers]
        self._others: dict[str, tuple[Tensor, int]] = {}
        self._rows: Tensor | None = None
        numel = sum(each.numel() for each in buffers)
        if numel:
            rows = allocator.zeros(leaves * numel, torch.float64, buffers[0].device)
            self._rows = rows.view(leaves, numel)

    def begin_leaf(self) -> None:
        """Set the statistics with which the step began, and note all other buffers."""
        self.restore()
        self._others = {
            name: (buffer, buffer._version)
            for name, buffer in self._model.named_buffers()
            if id(buffer) not in self._known and not buffer.is_inference()
        }

    def restore(self) -> None:
        """Set the statistics with which the step began."""
        self._set(self._before)

    def keep(self, leaf: int) -> None:
        """Keep the statistics that a leaf has updated.

        Raises:
            RuntimeError: The leaf has changed another buffer; names it.
        """
        for name, buffer in self._model.named_buffers():
            known, version = self._others.get(name, (buffer, None))
            if known is not buffer or version not in (None, buffer._version):
                raise RuntimeError(
                    f"{name}: expected a buffer that forward does not change, with FixedOrderSums, "
                    "since ranks run different leaves; found a changed one. Only statistics of "
                    "batch normalization (running_mean, running_var) are averaged over leaves"
                )
        if self._rows is not None:
            buffers = (*self._means, *self._counters)
            self._rows[leaf] = torch.cat([each.reshape(-1).double() for each in buffers])

    def set_mean(self, group: ProcessGroup | None) -> None:
        """Set the statistics of the step. Collective, if there are any.

        Args:
            group: All ranks. None: there is a single one.
        """
        if self._rows is None:
            return
        # Each row is zero on all ranks but one, so the sums over ranks are exact.
        rows = all_reduce_(self._rows, group, what="running statistics")
        sizes = [each.numel() for each in (*self._means, *self._counters)]
        num_means = sum(sizes[: len(self._means)])
        tree = TreeSum(len(rows))
        for row in rows:
            tree.add(row[:num_means])
        largest = rows[:, num_means:].amax(0)
        self._set(torch.cat([tree.take().div_(len(rows)), largest]).split(sizes))

    def _set(self, values: tuple[Tensor, ...] | list[Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip((*self._means, *self._counters), values, strict=True):
                buffer.copy_(value.view(buffer.shape))


def _buffers_of(model: nn.Module, *names: str) -> Iterator[Tensor]:
    for module in model.modules():
        for name in names:
            if isinstance(buffer := module._buffers.get(name), Tensor):
                yield buffer
