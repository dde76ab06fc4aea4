"""Level 3, ``optim_grads_params``: all roles are sharded (ZeRO-3, FSDP).

A rank of ``n`` holds ``1/n`` of all roles, ``P(m + g + s)/n`` bytes, and temporarily the full
parameters of the unit in use and of prefetched units, and one unit's full gradients.

Every microbatch gathers parameters once for forward and once for backward (the unit that backward
needs first is not resharded in between), and reduce-scatters gradients: at most ``3 (n-1)/n``
elements, 1.5 times as many as level 0.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class OptimGradsParams(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        factor = (size - 1) / size
        return Traffic(0.0, 2 * factor, 0.0, factor)


OPTIM_GRADS_PARAMS = OptimGradsParams("optim_grads_params", 3)
