"""Optimizer steps that compute has not waited for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from fsdp_engine.comm.lanes import Lane, Ticket
from fsdp_engine.memory.allocator import TransientStorage

# Not empty: some steps may be pending.
PENDING: list[weakref.ref[PendingStep]] = []


class PendingStep:
    """A step of one buffer's parameters that compute has not waited for, if there is one. A seam:
    here steps are operations of compute, so there is none.

    Compute waits for it before it uses what the step reads or writes: gathers of the buffer are
    submitted behind it, and compute waits for it with the gather; functions of FlatDTensors, their
    slices, main weights and gradients of the engine, state dicts and the next backward wait for all
    pending steps.

    Args:
        compute: the engine's lane.

    Attributes:
        tickets: The tickets of the step, which operations on the parameters have to follow; empty
            where no step is pending.
    """

    tickets: Sequence[Ticket] = ()

    def __init__(self, compute: Lane) -> None:
        self._compute = compute

    def finish(self) -> None:
        """Compute waits for the step."""

    def hold(self, *objects: Any) -> None:
        """Keep ``objects`` until compute has waited, since the step reads their memory."""

    def free(self, label: str, storage: TransientStorage) -> None:
        """Free memory that the step reads, when compute has waited."""
        self._compute.manage(label, storage.drain, storage)


def finish_pending_steps() -> None:
    """Compute waits for all pending steps."""
    for each in [*PENDING]:
        if (pending := each()) is not None:
            pending.finish()
    PENDING.clear()
