"""Accelerator lanes whose operations wait for files.

Such a lane has a stream and a thread. The thread submits the operations to the stream and waits for
files within them. Waiting for a ticket blocks the host until the thread has submitted the
operation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.comm.activity import ACTIVITY
from fsdp_engine.comm.device_lane import DeviceLane, DeviceTicket, PendingTicket
from fsdp_engine.comm.lanes import Operation, Ticket


class ThreadTicket(PendingTicket):
    """Ticket of an operation on a :class:`ThreadLane`.

    Attributes:
        label: Name of the operation and its unit.
        is_known: Whether the host has waited for the thread, so that an error would be known.
    """

    __slots__ = ("_future", "_lane", "is_known", "label")
    done = False

    def __init__(self, lane: ThreadLane, label: str, future: Future[DeviceTicket]) -> None:
        self._lane = lane
        self._future = future
        self.label = label
        self.is_known = False

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks that take part. Empty: all ranks."""
        return self._lane.ranks

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to wait for: the thread has submitted the operation without an
        error, or the host has already waited for it."""
        return self.is_known or (self._future.done() and self._future.exception() is None)

    def submitted(self) -> DeviceTicket:
        """Wait until the thread has submitted the operation; returns the ticket of its stream.

        Raises:
            RuntimeError, ValueError: The operation failed.
        """
        if (error := self._future.exception()) is not None:
            raise error.with_traceback(None)
        return self._future.result()

    def finish(self) -> DeviceTicket:
        """Wait like :meth:`submitted`, and record the wait in ``ACTIVITY``. Afterwards the host
        knows any error."""
        ACTIVITY.waits = self
        try:
            return self.submitted()
        finally:
            ACTIVITY.waits = None
            self.is_known = True


class ThreadLane(DeviceLane):
    """A lane of an accelerator whose operations wait for files or other work of the host. A thread
    submits them to its stream. See [Note: Lanes]."""

    def __init__(
        self,
        device: torch.device,
        stream: Any,
        ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        super().__init__(device, stream, ranks, name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._unfinished: deque[ThreadTicket] = deque()
        self._at_work: int | None = None  # id of the lane's thread, after the first operation

    def submit(  # type: ignore[override]
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> ThreadTicket:
        """See :class:`Lane`. The host does not wait.

        Raises:
            RuntimeError: The current stream is being captured into a graph.
        """
        if self._is_capturing():
            raise RuntimeError(
                f"{label}: expected no capture of a CUDA graph, since a thread submits this copy; "
                "found one. Do not capture steps of a model with fe.Offload"
            )
        while self._unfinished and self._unfinished[0].has_ended:
            self._unfinished.popleft()
        future = self._thread.submit(self._run, label, operation, after)
        ticket = ThreadTicket(self, label, future)
        self._unfinished.append(ticket)
        return ticket

    def _run(self, label: str, operation: Operation, after: Sequence[Ticket]) -> DeviceTicket:
        self._at_work = threading.get_ident()
        return super().submit(label, operation, after=after)

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`. The calling thread waits until other threads have submitted the
        operations of their tickets."""
        super().wait(
            *(each.submitted() if isinstance(each, ThreadTicket) else each for each in tickets)
        )

    def drain(self) -> list[Exception]:
        """See :class:`Lane`. An operation of this lane may call it, since garbage is collected in
        any thread. It then waits only for the earlier operations."""
        errors: list[Exception] = []
        if threading.get_ident() != self._at_work:
            while self._unfinished:
                ticket = self._unfinished.popleft()
                try:
                    if not ticket.is_known:
                        ticket.finish()
                except (RuntimeError, ValueError) as error:
                    errors.append(error)
        return [*errors, *super().drain()]
