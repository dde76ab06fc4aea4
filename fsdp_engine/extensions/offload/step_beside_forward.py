"""Optimizer steps that run beside the next forward.

[Note: Steps beside forward]
With ``Offload.overlap_forward`` an optimizer's chunks are stepped on a lane of their own, behind
the backward, and ``optimizer.step()`` returns with the step *pending*: compute has not waited for
it. A :class:`StepBesideForward` is that of one buffer. :class:`PendingStep` says what waits for it.

Memory that is freed meanwhile, that of gradients, is freed when compute has waited. Parameters,
which the step writes, are the optimizer's, and the host waits for its last copies when it is
deleted.
"""

from __future__ import annotations

import weakref
from typing import Any

from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.lanes import Lane, Ticket
from fsdp_engine.comm.pending_steps import PENDING, PendingStep
from fsdp_engine.memory.allocator import TransientStorage


class StepBesideForward(PendingStep):
    """See the module docstring.

    Args:
        compute: the engine's lane.
    """

    def __init__(self, compute: Lane) -> None:
        super().__init__(compute)
        self._caller: Lane = compute
        self._freed: list[tuple[str, TransientStorage]] = []
        self._held: list[Any] = []

    def begin(self, ticket: Ticket) -> None:
        """A step is submitted; ``ticket``: its end. Later ones are on the same lane.

        The current stream is that of the code that steps.
        """
        if not self.tickets:
            PENDING.append(weakref.ref(self))
        self.tickets = (ticket,)  # one, or none
        if isinstance(self._compute, DeviceLane):
            self._caller = self._compute.of_caller()

    def finish(self) -> None:
        """See :class:`PendingStep`."""
        if not self.tickets:
            return
        self._compute.wait(*self.tickets)
        # The current stream may be another than that of the code that has stepped.
        self._caller.wait(*self.tickets)
        self.tickets = ()
        self._held.clear()
        freed, self._freed = self._freed, []
        for label, storage in freed:
            self.free(label, storage)

    def hold(self, *objects: Any) -> None:
        """See :class:`PendingStep`."""
        if self.tickets:
            self._held += objects

    def free(self, label: str, storage: TransientStorage) -> None:
        """See :class:`PendingStep`."""
        if self.tickets:
            self._freed.append((label, storage))
        else:
            super().free(label, storage)
