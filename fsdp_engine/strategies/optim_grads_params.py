"""Level 3, ``optim_grads_params``: everything is cut (ZeRO-3, FSDP).

A rank of ``n`` holds ``1/n`` of everything, ``P(m + g + s)/n`` bytes, and for a moment the full
parameters of the unit in use, of the units gathered ahead, and one unit's full gradients.

Every microbatch gathers parameters once for forward and once for backward (the unit that
backward needs first stays full in between), and reduce-scatters gradients: at most
``3 (n-1)/n`` elements, half as much again as level 0.
"""

from __future__ import annotations

from fsdp_engine.strategies.level import Level, Traffic


class OptimGradsParams(Level):
    """See the module docstring."""

    def traffic(self, size: int) -> Traffic:
        part = (size - 1) / size
        return Traffic(0.0, 2 * part, 0.0, part)


OPTIM_GRADS_PARAMS = OptimGradsParams("optim_grads_params", 3)
