"""Waits for a bucket's weights when the first module that holds some of them is called.

A bucket's parameters lie in modules of which none is a unit. Its weights are brought up to date at
the start of the root's forward, and are put into the modules when the first of them is called.
That needs modules that are called: the first forward shows which are, and a bucket of which one is
not (somebody reads its weight without calling it) is waited for when the root's forward begins, as
is one that holds parameters of the root's own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_engine.planning.installing import holders
from fsdp_engine.runtime.hooks import not_compiled
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


def hook_bucket(scheduler: Scheduler, part: Unit) -> None:
    """Hook the modules that hold parameters of ``part``, if anything is ever to be waited for."""
    if not part.needs_refresh:
        return
    modules = holders(part.buffers)
    part.uncalled = {id(module) for module in modules}
    for module in modules:
        # What the root holds itself, its forward may read from the start: never "called".
        if module is not part.module:
            module.register_forward_pre_hook(_waiter(scheduler, part), prepend=True)


def _waiter(scheduler: Scheduler, part: Unit) -> Any:
    @not_compiled
    def before(module: nn.Module, args: Any) -> None:
        if part.uncalled:
            part.uncalled.discard(id(module))
        scheduler.use_part(part)

    return before
