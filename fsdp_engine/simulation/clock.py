"""Simulated time: lanes that advance, and what compute waits for.

[Note: Two clocks]
On a machine whose host runs ahead there are two clocks. The *host's* goes on with every call. The
*device's* is that of its lanes: work on a lane begins when the host has issued it, what was before
it on the lane is done, and the tickets that it comes after are reached. Waiting for a ticket costs
nothing by itself: it holds up the next operation on the lane. So what is *exposed* is seen there:
the time between the moment when compute could have begun, had it not to wait for communication
(issued, and the lane free), and the moment when it did.

On a machine where the host computes, both clocks are one. Then lanes are FIFOs like those of
``HostLane``: an operation begins at its submission if what it comes after is done, else with the
next submission or wait on its lane, and waiting for it blocks. What it does when its messages have
come (sums, casts) the host does when somebody has waited for it, and the scratch that it has taken
stays until then. So nothing about memory depends on how long messages take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.devices.lane import COMPUTE, COPY_IN, LANES, Lanes, Operation, Steps, unit_of
from fsdp_engine.devices.meter import Meter
from fsdp_engine.simulation.machine import Machine

HOST = "host"


@dataclass(frozen=True)
class Span:
    """One operation on one lane, from when to when."""

    lane: str
    label: str
    phase: str
    start: float
    end: float


@dataclass(frozen=True)
class Exposed:
    """Compute had nothing to do but to wait.

    Attributes:
        unit: whose communication it waited for.
        phase: "forward", "backward" or "step".
        lane: which that was on.
        seconds: how long.
        start: since when, as of spans.
    """

    unit: str
    phase: str
    lane: str
    seconds: float
    start: float


@dataclass(frozen=True)
class Moment:
    """When an operation is done, and what that is due to: the longest of it and of those right
    before it that it had to come after, since waiting for a cast of what was sent is waiting for
    the message.

    Attributes:
        time: seconds since the simulation began.
        label, lane: of the longest.
        seconds: how long that took.
    """

    time: float
    label: str
    lane: str
    seconds: float = 0.0


class SimulatedTicket:
    """A moment of a lane's work; where the host computes, known once the work has begun."""

    __slots__ = ("_clock", "_lane", "_start", "_steps", "done", "moment")

    def __init__(
        self, lane: SimulatedLane, clock: Clock, moment: Moment, start: Callable[[], Moment] | None
    ) -> None:
        self._lane = lane
        self._clock = clock
        self._start = start
        self._steps: Steps | None = None  # what is to be done when its messages are
        self.moment = moment
        # Whether the host knows it to be reached. Like a HostTicket's: waiting tells, or that there
        # was nothing to wait for.
        self.done = False

    @property
    def time(self) -> float:
        """When it is reached."""
        return self.moment.time

    def begin(self) -> None:
        """Begin what has waited at its lane."""
        if self._start is not None:
            start, self._start = self._start, None
            self.moment = start()
            self._steps = self._clock.take_rest()
            self.done = self._steps is None

    def finish(self) -> None:
        """The host has waited for it, and does the rest."""
        self.done = True
        if self._steps is not None:
            steps, self._steps = self._steps, None
            self._clock.run_rest(self._lane, steps)

    def begin_in_turn(self) -> None:
        """Begin everything on its lane up to it."""
        self._lane.begin_through(self)


class SimulatedLane:
    """A lane that advances in simulated time; see :class:`~fsdp_engine.devices.lanes.Lane`.

    Attributes:
        free: when everything submitted so far will be done.
        runs_ahead, meters: see :class:`~fsdp_engine.devices.lanes.Lane`.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self.name = name
        self.free = 0.0
        self.runs_ahead = clock.machine.host_runs_ahead
        self.meters: tuple[Meter, ...] = ()  # the clock's own list of what is exposed says more
        self._waiting: deque[SimulatedTicket] = deque()

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Any] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> SimulatedTicket:
        """See :class:`~fsdp_engine.devices.lanes.Lane`."""
        del reads, writes
        clock = self._clock
        clock.call()
        if clock.machine.host_runs_ahead:
            return SimulatedTicket(self, clock, clock.run(self, label, operation, after), None)
        while self._waiting:
            self._waiting.popleft().begin()

        def start() -> Moment:
            for ticket in after:
                clock.block(ticket)
            return clock.run(self, label, operation, after)

        ticket = SimulatedTicket(self, clock, Moment(0.0, label, self.name), start)
        if all(each.done for each in after):
            ticket.begin()
        else:
            self._waiting.append(ticket)
        return ticket

    def begin_through(self, ticket: SimulatedTicket) -> None:
        """Begin everything up to and including ``ticket``."""
        while ticket in self._waiting:
            self._waiting.popleft().begin()

    def record(self) -> SimulatedTicket:
        """See :class:`~fsdp_engine.devices.lanes.Lane`."""
        moment = Moment(self._clock.reached(self), self.name, self.name)
        ticket = SimulatedTicket(self, self._clock, moment, None)
        ticket.done = not self.runs_ahead  # what the host has submitted it waits for by itself
        return ticket

    def wait(self, *tickets: Any) -> None:
        """See :class:`~fsdp_engine.devices.lanes.Lane`."""
        for ticket in tickets:
            self._clock.wait(self, ticket)

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`~fsdp_engine.devices.lanes.Lane`."""

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`~fsdp_engine.devices.lanes.Lane`; memory comes and goes on the host's clock,
        as a caching allocator sees it."""
        del label, storage
        action()
        self._clock.memory_changed()

    def drain(self) -> list[RuntimeError]:
        """See :class:`~fsdp_engine.devices.lanes.Lane`."""
        while self._waiting:
            self._waiting.popleft().begin()
        return []


@dataclass
class _Work:
    """An operation that is carried out: seconds so far of its messages, of what it computes, and of
    what it takes from compute."""

    lane: SimulatedLane
    sending: float = 0.0
    computed: float = 0.0
    stolen: float = 0.0


class Clock:
    """The time of one rank, and what happened in it. See [Note: Two clocks].

    Attributes:
        host: the host's time.
        phase: what the program does: "build", "forward", "backward" or "step".
        spans: what was done, in the order in which it was issued.
        exposed: where compute waited for communication.
        sent_bytes: of messages on lanes, by axis.
        memory_changed: is called when the engine's memory came or went.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.host = 0.0
        self.phase = "build"
        self.spans: list[Span] = []
        self.exposed: list[Exposed] = []
        self.sent_bytes: dict[str, float] = {}
        self.memory_changed: Callable[[], None] = lambda: None
        # Those of a device, or of a CPU: see [Note: Lanes] in ``devices/lane.py``.
        names = (*LANES, COPY_IN) if machine.host_runs_ahead else LANES
        self.lanes = {name: SimulatedLane(self, name) for name in names}
        self._compute = self.lanes[COMPUTE]
        # What compute's next operation comes after, and the phase in which somebody said so.
        self._awaited: SimulatedTicket | None = None
        self._awaited_in = ""
        # The operation that runs on another lane right now, and what the last one left to be done.
        self._work: _Work | None = None
        self._rest: Steps | None = None

    def make_lanes(self, device: torch.device) -> Lanes:
        """The lanes of an engine."""
        del device
        return Lanes(*self.lanes.values())

    @property
    def lane_at_work(self) -> str | None:
        """The lane whose operation is carried out right now; None: compute's."""
        return None if self._work is None else self._work.lane.name

    def call(self) -> None:
        """The host calls something."""
        self.host += self.machine.host_seconds
        if not self.machine.host_runs_ahead:
            self._compute.free = self.host

    def compute(self, label: str, seconds: float) -> None:
        """An operation of ``seconds`` on the lane that is at work."""
        self.call()
        if self._work is not None:
            self._work.computed += seconds
            return
        start = self._settle()
        self._compute.free = start + seconds
        if not self.machine.host_runs_ahead:
            self.host = self._compute.free
        if seconds:
            self.spans.append(Span(COMPUTE, label, self.phase, start, self._compute.free))

    def send(self, num_bytes: float, seconds: float, of_compute: float = 0.0) -> None:
        """A message of ``seconds`` on the lane that is at work. Outside lanes messages are small,
        go beside everything else, and nobody waits for them.

        Args:
            num_bytes: that this rank sends.
            of_compute: what it takes from compute, where one processor does both.
        """
        self.call()
        if self._work is not None:
            self._work.sending += seconds
            self._work.stolen += of_compute
            axis = axis_of(self._work.lane.name)
            self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes

    def run(
        self, lane: SimulatedLane, label: str, operation: Operation, after: Sequence[Any]
    ) -> Moment:
        """Carry out an operation on ``lane``; returns when it is done. Where the host computes
        itself, up to its first messages: see :meth:`take_rest`."""
        start = max(self.host, lane.free, *(ticket.time for ticket in after))
        steps = operation()
        with self._at_work(lane) as work:
            if self.machine.host_runs_ahead:
                while _issue(steps):
                    pass
            elif _issue(steps):
                self._rest = steps
        computed, stolen = work.computed, work.stolen
        seconds = work.sending + computed
        if not self.machine.host_runs_ahead:
            # The host computes its part itself; only messages go on by themselves.
            self._host_computes(computed)
            start, seconds = max(start, self.host), seconds - computed
        lane.free = max(start + seconds, self.host) if seconds else start
        if seconds:
            self.spans.append(Span(lane.name, label, self.phase, start, lane.free))
        if stolen:
            self._take_from_compute(stolen)
        last = max((ticket.moment for ticket in after), key=lambda each: each.time, default=None)
        if last is not None and last.time >= start and last.seconds > seconds:
            return Moment(lane.free, last.label, last.lane, last.seconds)
        return Moment(lane.free, label, lane.name, seconds)

    def take_rest(self) -> Steps | None:
        """What the operation that ran last does when its messages have come, if it waits for any;
        what it has taken for itself it holds until then."""
        steps, self._rest = self._rest, None
        return steps

    def run_rest(self, lane: SimulatedLane, steps: Steps) -> None:
        """The host goes on with an operation on ``lane``, and waits for what else it sends."""
        goes_on = True
        while goes_on:
            with self._at_work(lane) as work:
                goes_on = _issue(steps)
            self._host_computes(work.computed)
            lane.free = max(lane.free, self.host) + work.sending
            self._host_computes(lane.free - self.host if work.sending else 0.0)

    def _host_computes(self, seconds: float) -> None:
        self.host += seconds
        self._compute.free = self.host

    def wait(self, lane: SimulatedLane, ticket: SimulatedTicket) -> None:
        """What ``lane`` does later comes after ``ticket``."""
        ticket.begin_in_turn()
        if not self.machine.host_runs_ahead:
            self.block(ticket)
        elif lane is not self._compute:
            lane.free = max(lane.free, ticket.time)
        elif self._awaited is None or ticket.time > self._awaited.time:
            self._awaited, self._awaited_in = ticket, self.phase

    def block(self, ticket: SimulatedTicket) -> None:
        """Where the host computes: it waits for ``ticket``."""
        ticket.begin_in_turn()
        self._note_exposed(ticket, self.host, self.phase)
        self.host = self._compute.free = max(self.host, ticket.time)
        ticket.finish()

    def reached(self, lane: SimulatedLane) -> float:
        """When everything submitted to ``lane`` so far will be done."""
        if lane is self._compute and self._awaited is not None:
            return max(lane.free, self.host, self._awaited.time)
        return max(lane.free, self.host)

    def finish(self) -> float:
        """Everything compute was given, or has to wait for, is done; returns when."""
        self._compute.free = self._settle()
        return self._compute.free

    def _settle(self) -> float:
        """When compute begins what it is given now."""
        ready = max(self.host, self._compute.free)
        ticket, self._awaited = self._awaited, None
        if ticket is None:
            return ready
        self._note_exposed(ticket, ready, self._awaited_in)
        return max(ready, ticket.time)

    def _take_from_compute(self, seconds: float) -> None:
        start = max(self.host, self._compute.free)
        self._compute.free = start + seconds
        if not self.machine.host_runs_ahead:
            self.host = self._compute.free
        self.spans.append(Span(COMPUTE, "moving bytes", self.phase, start, start + seconds))

    def _note_exposed(self, ticket: SimulatedTicket, ready: float, phase: str) -> None:
        due = ticket.moment
        if due.time > ready and due.lane != COMPUTE:
            name = unit_of(due.label)
            self.exposed.append(Exposed(name, phase, due.lane, due.time - ready, ready))

    @contextmanager
    def _at_work(self, lane: SimulatedLane) -> Iterator[_Work]:
        outside, self._work = self._work, _Work(lane)
        try:
            yield self._work
        finally:
            self._work = outside


def _issue(steps: Steps) -> bool:
    """Take the next step of an operation; whether it waits for something then."""
    works = next(steps, None)
    for work in works or ():
        work.wait()
    return works is not None


def axis_of(lane: str) -> str:
    """The axis whose messages ``lane`` carries, "inner" or "outer"; of encodings the inner one."""
    return "inner" if lane == COPY_IN else lane.split()[0]
