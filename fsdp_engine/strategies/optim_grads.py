"""Level 2, ``optim_grads``: optimizer state and gradients are sharded (ZeRO-2).

A rank of ``n`` holds all parameters and ``1/n`` of gradients and optimizer state:
``P(p + (g + m + s)/n)`` bytes, and temporarily one unit's full gradients.

Gradients are reduce-scattered in every microbatch, ``(n-1)/n`` elements, so that no rank keeps full
ones; parameters are all-gathered once per step.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class OptimGrads(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(factor, 0.0, 0.0, factor)


OPTIM_GRADS = OptimGrads("optim_grads", 2)
