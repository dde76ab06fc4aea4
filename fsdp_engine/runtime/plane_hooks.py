"""Brings forward's plane back where a part of a unit is computed again within its backward.

Where a buffer's codec has two planes ([Note: Planes] in ``codecs/base.py``), a unit in backward
holds the second. A checkpoint around the unit runs its forward again, which its own hooks see. One
around a part of it does not: so the modules that hold such parameters tell by themselves when they
are called.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_engine.planning.installing import holders
from fsdp_engine.runtime.hooks import not_compiled
from fsdp_engine.runtime.scheduler import Scheduler, in_backward
from fsdp_engine.runtime.unit import Unit


def hook_planes(scheduler: Scheduler, unit: Unit) -> None:
    """Hook the modules that hold parameters of ``unit``, if it gathers planes by use."""
    if not unit.has_planes:
        return
    for module in holders(unit.buffers):
        module.register_forward_pre_hook(_watcher(scheduler, unit), prepend=True)


def _watcher(scheduler: Scheduler, unit: Unit) -> Any:
    @not_compiled
    def before(module: nn.Module, args: Any) -> None:
        if in_backward():
            scheduler.recompute(unit)

    return before
