"""Optimizer steps that run concurrently with the next forward.

[Note: Steps beside forward]
With ``Offload.overlap_forward``, an optimizer's chunks are stepped on a separate lane after the
backward, and ``optimizer.step()`` returns with the step *pending*: compute has not waited for it. A
:class:`StepBesideForward` is the pending step of one buffer. :class:`PendingStep` documents which
operations wait for it.

While a step is pending, memory of gradients is not freed; it is freed once compute has waited. The
step writes parameters, which the optimizer keeps alive. When the optimizer is deleted, the host
waits for its last copies.
"""

from __future__ import annotations

import weakref
from typing import Any

from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.comm.lanes import Lane, Ticket
from fsdp_engine.comm.pending_steps import PENDING, PendingStep
from fsdp_engine.memory.allocator import TransientStorage


class StepBesideForward(PendingStep):
    """The pending step of one buffer. See the module docstring.

    Args:
        compute: The compute lane of the engine.
    """

    def __init__(self, compute: Lane) -> None:
        super().__init__(compute)
        self._caller: Lane = compute
        self._freed: list[tuple[str, TransientStorage]] = []
        self._held: list[Any] = []

    def begin(self, ticket: Ticket) -> None:
        """Record a submitted step that ends with ``ticket``. Later steps use the same lane.

        The current stream must be that of the code that calls ``optimizer.step()``.
        """
        if not self.tickets:
            PENDING.append(weakref.ref(self))
        self.tickets = (ticket,)  # at most one, since later steps are on the same lane
        if isinstance(self._compute, DeviceLane):
            self._caller = self._compute.of_caller()

    def finish(self) -> None:
        """See :class:`PendingStep`."""
        if not self.tickets:
            return
        self._compute.wait(*self.tickets)
        # The current stream may differ from that of the code that called the step.
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
