"""Optimizer steps that run beside the next forward.

[Note: Steps beside forward]
With ``Offload.overlap_forward`` an optimizer's chunks are stepped on a lane of their own, behind
the backward, and ``optimizer.step()`` returns with the step *pending*: compute has not waited for
it. A :class:`PendingStep` is that of one buffer. Compute waits for it before it uses what the step
reads or writes:

- gathers of the buffer are submitted behind it, and compute waits for it with the gather;
- functions of FlatDTensors, their slices, main weights and gradients of the engine, state dicts and
  the next backward wait for all pending steps.

Memory that is freed meanwhile, that of gradients, is freed when compute has waited. Parameters,
which the step writes, are the optimizer's, and the host waits for its last copies when it is
deleted.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from fsdp_engine.comm.lanes import DeviceLane, Lane, Ticket
from fsdp_engine.memory.allocator import TransientStorage

# Not empty: some steps may be pending.
PENDING: list[weakref.ref[PendingStep]] = []


class PendingStep:
    """A step of one buffer's parameters that compute has not waited for, if there is one.

    Args:
        compute: the engine's lane.
    """

    def __init__(self, compute: Lane) -> None:
        self._compute = compute
        self._caller: Lane = compute
        self._tickets: list[Ticket] = []  # one, or none
        self._freed: list[tuple[str, TransientStorage]] = []
        self._held: list[Any] = []

    @property
    def tickets(self) -> Sequence[Ticket]:
        """Those that work on the parameters comes after."""
        return tuple(self._tickets)

    def begin(self, ticket: Ticket) -> None:
        """A step is submitted; ``ticket``: its end. Later ones are on the same lane.

        The current stream is that of the code that steps.
        """
        if not self._tickets:
            PENDING.append(weakref.ref(self))
        self._tickets[:] = [ticket]
        if isinstance(self._compute, DeviceLane):
            self._caller = self._compute.of_caller()

    def finish(self) -> None:
        """Compute waits for the step."""
        if not self._tickets:
            return
        self._compute.wait(*self._tickets)
        # The current stream may be another than that of the code that has stepped.
        self._caller.wait(*self._tickets)
        self._tickets.clear()
        self._held.clear()
        freed, self._freed = self._freed, []
        for label, storage in freed:
            self.free(label, storage)

    def hold(self, *objects: Any) -> None:
        """Keep ``objects`` until compute has waited, since the step reads their memory."""
        if self._tickets:
            self._held += objects

    def free(self, label: str, storage: TransientStorage) -> None:
        """Free memory that the step reads, when compute has waited."""
        if self._tickets:
            self._freed.append((label, storage))
        else:
            self._compute.manage(label, storage.drain, storage)


def finish_pending_steps() -> None:
    """Compute waits for all pending steps."""
    for each in [*PENDING]:
        if (pending := each()) is not None:
            pending.finish()
    PENDING.clear()
