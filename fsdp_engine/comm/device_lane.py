"""Lanes of an accelerator, which are streams: see [Note: Lanes] in ``lanes.py``.

[Note: Captured graphs]
While the caller's stream is captured into a graph, operations of all lanes belong to the graph: a
stream joins the capture before its first operation or allocation in it, by a wait for the caller's
stream. Within a capture, lanes do not wait for tickets from before it, because a capture begins
with a synchronisation of the device; after a capture, they do not wait for its tickets. Work of a
graph runs when the graph is replayed, on the stream of the caller, and no lane has a ticket for it.
After a capture, each operation outside of a graph therefore waits for the caller's stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.accelerator import capture_check, module_of
from fsdp_engine.comm.activity import ACTIVITY
from fsdp_engine.comm.lanes import (
    Meter,
    Operation,
    Ticket,
    TimedWork,
    is_capturing,
    labelled,
)


class PendingTicket:
    """A ticket of work that the host has not yet submitted to a stream."""

    __slots__ = ()

    def finish(self) -> DeviceTicket:
        """Wait until the work is submitted, and return the ticket of its stream."""
        raise NotImplementedError


class DeviceTicket:
    """A ticket that is an event on a stream.

    Attributes:
        event: The event.
        stream: The stream on which the event was recorded.
        is_captured: Whether the event belongs to a graph: see [Note: Captured graphs].
        works: The operation that ends with the event, and its predecessors. Empty without meters.
    """

    __slots__ = ("event", "is_captured", "stream", "works")
    done = False

    def __init__(self, event: torch.Event, stream: torch.Stream, is_captured: bool) -> None:
        self.event = event
        self.stream = stream
        self.is_captured = is_captured
        self.works: tuple[TimedWork, ...] = ()


class DeviceLane:
    """A lane of an accelerator, which is a stream.

    Args:
        device: The accelerator.
        stream: The stream. None: the stream that is current at each call.
        ranks: Global ranks that take part, for messages. Empty: all.
        name: The name of the lane, such as one of ``LANES``.

    Attributes:
        recent: Labels and events of the latest submissions. A :class:`.Monitor` may replace it.
    """

    runs_ahead = True

    def __init__(
        self,
        device: torch.device,
        stream: torch.Stream | None,
        ranks: Sequence[int] = (),
        name: str = "",
    ) -> None:
        self._device = device
        self._module = module_of(device)
        self._stream = stream
        self.ranks = ranks
        self.name = name
        self.meters: tuple[Meter, ...] = ()
        self.recent: deque[tuple[str, Any]] = deque(maxlen=0)
        self._awaited: DeviceTicket | None = None  # the ticket of the last wait
        self._is_capturing = capture_check(device)
        self._was_captured = False

    def _target(self) -> Any:
        return self._stream or self._module.current_stream(self._device)

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> DeviceTicket:
        """See :class:`Lane`. The host does not wait."""
        del reads, writes
        stream = self._target()
        is_captured = self._enter()
        self.wait(*after)
        begin = self._timed_event(stream) if self.meters and not is_captured else None
        with self._module.stream(stream), labelled(label):
            for work in chain.from_iterable(operation()):
                work.wait()  # makes the current stream wait, not the host
        ticket = self._record(is_captured)
        if begin is not None:
            before = [work for each in after for work in getattr(each, "works", ())]
            ticket.works = (TimedWork(self.name, label, begin, ticket.event), *before)
        ACTIVITY.last = label
        if not is_captured:  # an event of a graph cannot be queried
            self.recent.append((label, ticket.event))
        return ticket

    def is_captured(self) -> bool:
        """Whether a graph is captured on this stream: see :func:`is_capturing`."""
        return is_capturing(self._device, [self._stream])

    def _enter(self) -> bool:
        """Join a capture of the caller's stream. Returns whether there is one.

        See [Note: Captured graphs].
        """
        captures = self._is_capturing()
        if self._stream is not None and (captures or self._was_captured):
            with self._module.stream(self._stream):
                follows = captures and self._is_capturing()
            if not follows:
                self._stream.wait_stream(self._module.current_stream(self._device))
            self._was_captured = True
        return captures

    def record(self) -> DeviceTicket:
        """See :class:`Lane`."""
        return self._record(self._enter())

    def _record(self, is_captured: bool) -> DeviceTicket:
        stream = self._target()
        if self.meters and not is_captured:  # an event of a graph has no time
            return DeviceTicket(self._timed_event(stream), stream, is_captured)
        event = self._module.Event()
        event.record(stream)
        return DeviceTicket(event, stream, is_captured)

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`. The stream waits, not the host.

        Of several tickets of one stream, the stream waits for the newest only. It does not wait for
        its own tickets, or again for the ticket of the last wait. While waits of compute are
        measured, compute's stream waits for each ticket.
        """
        stream, captures = self._target(), self._is_capturing()
        each_is_timed = self._stream is None and bool(self.meters) and not captures
        newest: dict[Any, DeviceTicket] = {}
        begins: dict[DeviceTicket, torch.Event] = {}
        for ticket in tickets:
            if isinstance(ticket, PendingTicket):
                begin = self._timed_event(stream) if each_is_timed else None
                ticket = ticket.finish()
                if begin is not None:  # the host's wait is part of compute's wait
                    begins[ticket] = begin
            if isinstance(ticket, DeviceTicket) and ticket.is_captured == captures:
                newest[ticket if each_is_timed else ticket.stream] = ticket
        for awaited in newest.values():
            if each_is_timed and awaited.works:
                begin = begins.get(awaited) or self._timed_event(stream)
                stream.wait_event(awaited.event)
                end = self._timed_event(stream)
                for meter in self.meters:
                    meter.waits(begin, end, awaited.works)
            elif awaited.stream != stream and (
                self._stream is None or awaited is not self._awaited
            ):
                stream.wait_event(awaited.event)
                self._awaited = awaited

    def _timed_event(self, stream: torch.Stream) -> torch.Event:
        event: torch.Event = self._module.Event(enable_timing=True)
        event.record(stream)
        return event

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`Lane`."""

    def entered(self) -> AbstractContextManager[None]:
        """See :class:`ComputeLane`. This lane's stream is current within the context."""
        context: AbstractContextManager[None] = self._module.stream(self._target())
        return context

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`Lane`. The caching allocator binds the memory to this lane's stream."""
        if self._stream is None:  # the lane's stream is the current one
            action()
            return
        self._enter()
        with self._module.stream(self._stream):
            action()

    def of_caller(self) -> DeviceLane:
        """Returns a lane bound to this lane's stream, or to the current one if it has none."""
        return DeviceLane(self._device, self._target(), self.ranks, self.name)

    def drain(self) -> list[Exception]:
        """See :class:`Lane`."""
        try:
            self._target().synchronize()
        except RuntimeError as error:
            return [error]
        return []
