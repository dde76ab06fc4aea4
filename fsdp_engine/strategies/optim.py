"""Level 1, ``optim``: optimizer state is cut (ZeRO-1, the "distributed optimizer").

A rank of ``n`` holds all parameters and gradients, and ``1/n`` of the optimizer state and of a
separate main copy, if there is one: ``P(p + g + (m + s)/n)`` bytes. Where main weights have the
compute dtype they are a view of the compute weights and cost nothing.

Once per step gradients are reduce-scattered and parameters all-gathered: ``(n-1)/n`` elements
each, as much as level 0's all-reduce.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class Optim(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        part = (size - 1) / size
        return Traffic(part, 0.0, part, 0.0)


OPTIM = Optim("optim", 1)
