"""Optimizer steps that compute has not waited for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from fsdp_engine.comm.lanes import Lane, Ticket
from fsdp_engine.memory.allocator import TransientStorage

# Steps that may be pending.
PENDING: list[weakref.ref[PendingStep]] = []


class PendingStep:
    """An optimizer step of one buffer that compute has not waited for.

    This class is a seam (see ``docs/design.md``). With this class, steps run on the compute lane,
    and none is pending. A subclass can run them elsewhere.

    Compute waits for a pending step before it accesses a tensor of the step. Gathers of the buffer
    are submitted after the step, so compute waits for both together. These wait for all pending
    steps: functions of FlatDTensors, accesses to their slices, accesses to the engine's main
    weights and gradients, state dicts, and the next backward.

    Args:
        compute: The compute lane of the engine.

    Attributes:
        tickets: Tickets of the step. Operations on the parameters have to wait for them. Empty if
            no step is pending.
    """

    tickets: Sequence[Ticket] = ()

    def __init__(self, compute: Lane) -> None:
        self._compute = compute

    def finish(self) -> None:
        """Make compute wait for the step."""

    def hold(self, *objects: Any) -> None:
        """Keep ``objects``, whose memory the step reads, until compute has waited for the step."""

    def free(self, label: str, storage: TransientStorage) -> None:
        """Free ``storage``, which the step reads, once compute has waited for the step."""
        self._compute.manage(label, storage.free, storage)


def finish_pending_steps() -> None:
    """Make compute wait for all pending steps."""
    for each in [*PENDING]:
        if (pending := each()) is not None:
            pending.finish()
    PENDING.clear()
