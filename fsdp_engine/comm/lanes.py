"""The engine's only streams, events and profiler labels: lanes on accelerators and on CPU.

See [Note: Lanes] in ``lane.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.comm import stall_monitor
from fsdp_engine.comm.lane import (
    COPY_IN,
    LANES,
    Lanes,
    Meter,
    Operation,
    Steps,
    Ticket,
    TimedWork,
    name_of_wait,
    unit_of,
)
from fsdp_engine.comm.stall_monitor import ACTIVITY

# Of a lane on a device, how many submissions are kept to tell which of them is stuck.
_MOST_RECENT = 256

_NOTHING = nullcontext()

# Who makes lanes in place of make_lanes: see lanes_made_by.
_MAKERS: list[Callable[[torch.device], Any]] = []


def make_lanes(device: torch.device, ranks: Sequence[int] = ()) -> Lanes:
    """Lanes for ``device``: streams on an accelerator, FIFOs of asynchronous works elsewhere.

    Args:
        device: where the work is done.
        ranks: global ranks that take part, for messages; none: all.
    """
    if _MAKERS:
        made: Lanes = _MAKERS[-1](device)
        return made
    if is_accelerator(device):
        # High priority: a gather that starts late stalls the model, compute that yields does not.
        compute, *others = (*LANES, COPY_IN)
        streams = [module_of(device).Stream(device=device, priority=-1) for _ in others]
        lanes = [
            DeviceLane(device, stream, ranks, name)
            for stream, name in zip(streams, others, strict=True)
        ]
        stall_monitor.DEVICE_LANES.update(lanes)
        return Lanes(DeviceLane(device, None, name=compute), *lanes)
    return Lanes(*(HostLane(ranks, name) for name in LANES))


@contextmanager
def lanes_made_by(maker: Callable[[torch.device], Lanes]) -> Iterator[None]:
    """Within it, engines get the lanes that ``maker`` makes: those of a simulation."""
    _MAKERS.append(maker)
    try:
        yield
    finally:
        _MAKERS.pop()


class SideStream:
    """A stream of its own, which waits for nothing that compute and the lanes have to do: for
    messages that the host waits for. On CPU there is none, and its methods do nothing.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_of(device) if is_accelerator(device) else None
        self._stream: Any = None
        if self._module is not None:
            self._stream = self._module.Stream(device=device, priority=-1)

    def entered(self) -> AbstractContextManager[None]:
        """Within it, it is the current stream."""
        return _NOTHING if self._module is None else self._module.stream(self._stream)

    def wait_for_compute(self) -> None:
        """It waits for what the model's own stream was given so far. Not to be called within
        :meth:`entered`."""
        if self._module is not None:
            event = self._module.Event()
            event.record(self._module.current_stream(self._device))
            self._stream.wait_event(event)


class GradientStream:
    """The stream on which the gradients of a backward are written, and on which compute waits for
    their reductions.

    Autograd runs each node on the stream of its forward, and the end of a backward on the caller's.
    Staging is allocated and freed on one stream, the one that was current as the backward began.

    Args:
        device: where. On CPU there are no streams, and nothing is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_of(device) if is_accelerator(device) else None
        self._stream: Any = None

    @property
    def exists(self) -> bool:
        """Whether the device has streams."""
        return self._module is not None

    def is_new(self) -> bool:
        """Whether the current stream is another than that of the last backward."""
        if self._module is None:
            return False
        return self._stream is None or self._stream != self._current()  # None != a stream is False

    def begin(self) -> None:
        """A backward begins, or its forward."""
        if self._module is not None:
            self._stream = self._current()

    def entered(self) -> AbstractContextManager[None]:
        """Within it, it is the current stream. Where another was, either waits for the other."""
        if self._module is None or self._stream is None:
            return _NOTHING
        current = self._current()
        return _NOTHING if current == self._stream else self._between(current)

    def _current(self) -> Any:
        assert self._module is not None
        return self._module.current_stream(self._device)

    @contextmanager
    def _between(self, current: Any) -> Iterator[None]:
        assert self._module is not None
        self._stream.wait_stream(current)
        try:
            with self._module.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


def compute_waits_for(event: torch.Event) -> None:
    """What the model's own stream is given from here on comes after ``event``, and so does what
    lanes are given behind it."""
    event.wait()


def finish_compute(device: torch.device) -> None:
    """The host waits for what the model's own stream on ``device`` was given so far."""
    if is_accelerator(device):
        module_of(device).current_stream(device).synchronize()


def device_seconds(device: torch.device, action: Callable[[], object]) -> float:
    """How long an accelerator works on what ``action`` gives it; the host waits for that."""
    module = module_of(device)
    begin, end = (module.Event(enable_timing=True) for _ in range(2))
    stream = module.current_stream(device)
    begin.record(stream)
    action()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


_is_profiled: Any = torch.autograd._profiler_enabled


def _labelled(label: str) -> Any:
    """A profiler range while a profiler runs; nothing otherwise, because a range costs time."""
    if _is_profiled():
        return torch.profiler.record_function(f"fsdp_engine: {label}")
    return nullcontext()


class HostTicket:
    """An operation on a :class:`HostLane`, and whether it is done."""

    __slots__ = ("_after", "_failure", "_label", "_lane", "_operation", "_steps", "_works", "done")

    def __init__(
        self, lane: HostLane, label: str, operation: Operation, after: Sequence[Ticket]
    ) -> None:
        self._lane = lane
        self._label = label
        self._operation: Operation | None = operation
        self._after = after
        self._steps: Steps | None = None
        self._works: Sequence[Any] = ()
        self._failure: str | None = None
        self.done = False

    @property
    def label(self) -> str:
        """Its operation and unit."""
        return self._label

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks that take part; none: all."""
        return self._lane.ranks

    @property
    def is_started(self) -> bool:
        """Whether its communication has been issued."""
        return self._operation is None

    def start(self) -> None:
        """Issue its communication, once everything it comes after is done."""
        if self._operation is None:
            return
        for ticket in self._after:
            assert isinstance(ticket, HostTicket)
            ticket.finish()
        operation, self._operation = self._operation, None
        self._after = ()
        self._steps = operation()
        self._advance()

    def finish(self) -> None:
        """Drive the operation to its end.

        Raises:
            RuntimeError: its communication failed, now or before; names the operation.
            ValueError: this rank and others would not do the same.
        """
        if self._operation is not None:
            self._lane.start_through(self)
        while not self.done:
            self._advance()

    def _advance(self) -> None:
        """Wait for the pending works, then take the next step."""
        if self._failure is not None:
            # A generator that raised is over, which must not pass for success.
            raise RuntimeError(self._failure)
        assert self._steps is not None
        profiled = _is_profiled()
        try:
            if self._works:
                ACTIVITY.waits = self
                if profiled or self._lane.meters:
                    self._wait_seen()
                else:
                    for work in self._works:
                        work.wait()
                ACTIVITY.waits = None
            if profiled:
                with torch.profiler.record_function(f"fsdp_engine: {self._label}"):
                    works = next(self._steps, None)
            else:  # a range costs time without a profiler, too
                works = next(self._steps, None)
        except ValueError as error:
            self._failure = str(error)
            raise
        except RuntimeError as error:
            failure = stall_monitor.failure(self._label, self.ranks, error)
            self._failure = str(failure)
            ACTIVITY.waits = None
            raise failure from error
        self._works = works or ()
        if works is None:
            self.done = True
            self._steps = None
            ACTIVITY.done = self._label

    def _wait_seen(self) -> None:
        """Wait for the pending works, with a profiler or a meter."""
        lane = self._lane
        begin = time.perf_counter()
        with _labelled(f"compute waits for {name_of_wait(lane.name, unit_of(self._label))}"):
            for work in self._works:
                work.wait()
        seconds = time.perf_counter() - begin
        for meter in lane.meters:
            meter.waited(lane.name, self._label, seconds)


_DONE = SimpleNamespace(done=True)  # the ticket of work that the host has already done


class HostLane:
    """A lane on CPU: a FIFO of operations. See [Note: Lanes].

    Args:
        ranks: global ranks that take part, for messages; none: all.
        name: one of ``LANES``.
    """

    runs_ahead = False

    def __init__(self, ranks: Sequence[int] = (), name: str = "") -> None:
        self.ranks = ranks
        self.name = name
        self.meters: tuple[Meter, ...] = ()
        self._waiting: deque[HostTicket] = deque()
        self._unfinished: deque[HostTicket] = deque()

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> HostTicket:
        """See :class:`Lane`."""
        del reads, writes
        # Operations that still wait here come after work on another lane. Blocking for it now, one
        # submission later, keeps the lane moving without a thread that polls.
        while self._waiting:
            self._waiting.popleft().start()
        unfinished = self._unfinished
        while unfinished and unfinished[0].done:
            unfinished.popleft()
        ACTIVITY.last = label
        held_up_by = [each for each in after if not each.done]
        ticket = HostTicket(self, label, operation, held_up_by)
        unfinished.append(ticket)
        if held_up_by:
            self._waiting.append(ticket)
        else:
            ticket.start()
        return ticket

    def start_through(self, ticket: HostTicket) -> None:
        """Start everything up to and including ``ticket``."""
        while self._waiting and not ticket.is_started:
            self._waiting.popleft().start()
        ticket.start()

    def record(self) -> Ticket:
        """See :class:`Lane`; what the host has submitted, the host waits for by itself."""
        return _DONE

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`; the host blocks."""
        for ticket in tickets:
            if not ticket.done:
                assert isinstance(ticket, HostTicket)
                ticket.finish()

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`Lane`."""

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`Lane`."""
        action()

    def drain(self) -> list[Exception]:
        """See :class:`Lane`."""
        errors: list[Exception] = []
        while self._unfinished:
            try:
                self._unfinished.popleft().finish()
            except (RuntimeError, ValueError) as error:
                errors.append(error)
        self._waiting.clear()
        return errors


def is_capturing(device: torch.device, streams: Sequence[torch.Stream | None]) -> bool:
    """Returns whether one of ``streams``, or the stream on which torch captures unless it is given
    another, is being captured into a graph. While one is, an event that any thread queries makes
    the capture fail."""
    module = module_of(device)
    asks = getattr(module, "is_current_stream_capturing", None)
    if asks is None:
        return False
    usual = getattr(getattr(module, "graph", None), "default_capture_stream", None)
    for stream in (*streams, usual):
        with module.stream(stream):
            if asks():
                return True
    return False


class DeviceTicket:
    """An event on a stream.

    Attributes:
        stream: the stream.
        works: while meters are present, the operation that ends with it, and those before it.
    """

    __slots__ = ("event", "stream", "works")
    done = False

    def __init__(self, event: torch.Event, stream: torch.Stream) -> None:
        self.event = event
        self.stream = stream
        self.works: tuple[TimedWork, ...] = ()


class DeviceLane:
    """A lane on an accelerator: a stream.

    Args:
        device: where.
        stream: None: the stream that is current at each call.
        ranks: global ranks that take part, for messages; none: all.
        name: one of ``LANES``.
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
        self._recent: deque[tuple[str, Any]] = deque(maxlen=_MOST_RECENT)
        self._newest: tuple[str, Any] | None = None  # when last looked
        self._newest_since = 0.0
        self._awaited: DeviceTicket | None = None  # last
        self._is_capturing = getattr(self._module, "is_current_stream_capturing", None)

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
        """See :class:`Lane`; the host does not wait."""
        del reads, writes
        stream = self._target()
        self.wait(*after)
        begin = self._timed_event(stream) if self.meters else None
        with self._module.stream(stream), _labelled(label):
            for work in chain.from_iterable(operation()):
                work.wait()  # makes the current stream wait, not the host
            is_captured = self._is_capturing is not None and self._is_capturing()
        ticket = self.record()
        if begin is not None:
            before = [work for each in after for work in getattr(each, "works", ())]
            ticket.works = (TimedWork(self.name, label, begin, ticket.event), *before)
        ACTIVITY.last = label
        if not is_captured:  # an event of a graph cannot be queried
            self._recent.append((label, ticket.event))
        return ticket

    def stuck(self, now: float, patience: float) -> str | None:
        """See :class:`~.stall_monitor.DEVICE_LANES`.

        A device that is stuck stops the host soon. So no event is queried as long as work is
        submitted, and none while a graph is captured.
        """
        newest = self._recent[-1] if self._recent else None
        if newest is not self._newest:
            self._newest, self._newest_since = newest, now
        elif newest is not None and now - self._newest_since > patience:
            if is_capturing(self._device, [self._stream]):
                return None
            self._newest_since = float("inf")
            unreached = [label for label, event in list(self._recent) if not event.query()]
            return unreached[0] if unreached else None
        return None

    def record(self) -> DeviceTicket:
        """See :class:`Lane`."""
        stream = self._target()
        if self.meters:
            return DeviceTicket(self._timed_event(stream), stream)
        event = self._module.Event()
        event.record(stream)
        return DeviceTicket(event, stream)

    def wait(self, *tickets: Ticket) -> None:
        """See :class:`Lane`; the stream waits, not the host. Of several tickets of one stream it
        waits for the newest, for none of its own, and for one only once, unless waits are
        measured."""
        stream = self._target()
        each_is_timed = self._stream is None and bool(self.meters)
        newest: dict[Any, DeviceTicket] = {}
        for ticket in tickets:
            if isinstance(ticket, DeviceTicket):
                newest[ticket if each_is_timed else ticket.stream] = ticket
        for awaited in newest.values():
            if each_is_timed and awaited.works:
                begin = self._timed_event(stream)
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

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`Lane`; the caching allocator ties the memory to this lane's stream."""
        with self._module.stream(self._target()):
            action()

    def drain(self) -> list[Exception]:
        """See :class:`Lane`."""
        try:
            self._target().synchronize()
        except RuntimeError as error:
            return [error]
        return []
