"""A process group for libraries that reduce to the maximum over one group."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from fsdp_engine.comm.collectives import all_reduce_


class MaxGroup(dist.ProcessGroup):
    """A group for libraries that take one process group and reduce to the maximum over it. It
    reduces over several groups, one after another. Without groups it sends nothing."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self._groups = tuple(groups)

    def allreduce(  # type: ignore[override]
        self, tensors: Sequence[Tensor], options: dist.AllreduceOptions
    ) -> None:
        """Reduce each tensor to its maximum, in place. ``dist.all_reduce`` calls this method. The
        result is complete on return, on the current stream."""
        maximum = dist.ReduceOp(dist.ReduceOp.MAX)
        assert options.reduceOp == maximum, f"a maximum, not {options.reduceOp}"
        for tensor in tensors:
            for group in self._groups:
                all_reduce_(tensor, group, "max")
