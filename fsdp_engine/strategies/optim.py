"""Level 1, ``optim``: optimizer state is sharded (ZeRO-1, the "distributed optimizer").

A rank of ``n`` holds all parameters and gradients, and ``1/n`` of the optimizer state and of a
separate main copy, if there is one: ``P(p + g + (m + s)/n)`` bytes. If main weights have the
compute dtype, they are a view of the compute weights and take no memory.

Once per step gradients are reduce-scattered and parameters all-gathered: ``(n-1)/n`` elements
each, as much as level 0's all-reduce.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class Optim(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, factor, 0.0)


OPTIM = Optim("optim", 1)
