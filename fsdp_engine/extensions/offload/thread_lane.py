"""Lanes of an accelerator whose operations wait for files.

Such a lane is a stream and a thread, which submits the operations and waits for files within them.
Waiting for a ticket blocks the host until the thread has submitted the operation.
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
    """An operation on a :class:`ThreadLane`.

    Attributes:
        label: its operation and unit.
        is_known: the host has waited for the thread, and so knows of an error.
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
        """Global ranks that take part; none: all."""
        return self._lane.ranks

    @property
    def has_ended(self) -> bool:
        """Whether the thread has submitted it, and the host knows of an error."""
        return self.is_known or (self._future.done() and self._future.exception() is None)

    def submitted(self) -> DeviceTicket:
        """Wait until the thread has submitted the operation; returns the ticket of its stream.

        Raises:
            RuntimeError, ValueError: it failed.
        """
        if (error := self._future.exception()) is not None:
            raise error.with_traceback(None)
        return self._future.result()

    def finish(self) -> DeviceTicket:
        """The same for the host, which then knows whether it failed."""
        ACTIVITY.waits = self
        try:
            return self.submitted()
        finally:
            ACTIVITY.waits = None
            self.is_known = True


class ThreadLane(DeviceLane):
    """A lane on an accelerator whose operations wait on the host for something else: a thread
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
        self._at_work: int | None = None  # identity of the thread

    def submit(  # type: ignore[override]
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> ThreadTicket:
        """See :class:`Lane`; the host does not wait."""
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
        """See :class:`Lane`; the thread waits until those of other threads are submitted."""
        super().wait(
            *(each.submitted() if isinstance(each, ThreadTicket) else each for each in tickets)
        )

    def drain(self) -> list[Exception]:
        """See :class:`Lane`. Within an operation (garbage is collected in any thread) only those
        before it."""
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
