"""Records the calls of a simulated clock, and replays them on another clock.

[Note: Tapes]
The step of a pipeline rank is simulated without the other ranks: their messages arrive immediately.
A :class:`RecordingClock` records each call that changes it (operations, submissions, waits,
messages between stages) with its arguments. No code of a step depends on the time, so the calls
would be the same if messages arrived later. A :class:`Replay` makes the calls on a new clock, and
pauses when compute waits for a message whose end is not known yet. Times are then exact: a wait for
another stage does not delay collectives that run at the same time, nor the host of a device.

Operations of lanes are generators. The calls of an operation are recorded in a separate list, with
one part for each time that the clock resumes the generator. In a replay, a generator over this list
replaces the operation.

A tape refers to tickets, lanes and messages by numbers, since a replay has other objects for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar

from torch import Tensor

from fsdp_engine.kernel_interface import lanes
from fsdp_engine.planner.simulation.clock import (
    Clock,
    Mark,
    SimulatedLane,
    SimulatedTicket,
)
from fsdp_engine.planner.simulation.machine import Machine
from fsdp_engine.planner.simulation.stage_messages import Message

_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """One call on a tape.

    Attributes:
        phase: The phase of the program; see :attr:`Clock.phase`.
        module: Name of the module whose operation runs.
        call: Makes the call on a replay. None: the entry is a wait for ``message``.
        message: Number of the message to wait for.
    """

    phase: str
    module: str
    call: Callable[[Replay], object] | None
    message: int = -1


@dataclass
class Part:
    """The calls of an operation between two of its communications.

    Attributes:
        entries: The calls.
        is_last: Whether the operation ended after these calls.
    """

    entries: list[Entry] = field(default_factory=list)
    is_last: bool = False


class RecordingClock(Clock):
    """A clock that records its calls; see [Note: Tapes].

    Attributes:
        entries: The calls since the clock's construction.
        messages: The messages that the rank has posted.
        num_samples: Number of calls of :meth:`sample_number`.
    """

    def __init__(self, machine: Machine, num_ranks: int = 1) -> None:
        self.entries: list[Entry] = []
        self.messages: list[Message] = []
        self.num_samples = 0
        self._into = self.entries
        self._is_within = False  # whether a recorded call is running
        self._num_tickets = 0
        super().__init__(machine, num_ranks)

    def make_lane(self, name: str) -> SimulatedLane:
        """See :class:`Clock`."""
        lane = _RecordingLane(self, name, len(self.every_lane))
        self.every_lane.append(lane)
        return lane

    def finish(self) -> float:
        """See :class:`Clock`."""
        return self.recorded(
            lambda to: to.finishes.append(to.clock.finish()), lambda: Clock.finish(self)
        )

    def mark(self) -> Mark:
        """See :class:`Clock`. Replays also make the mark."""
        self._append(lambda to: to.marks.append(to.clock.mark()))
        return Clock.mark(self)

    def send_for_model(self, *args: Any, **given: Any) -> SimulatedTicket:
        """See :class:`Clock`."""
        number = self.new_number()
        ticket = self.recorded(
            lambda to: to.keep(number, to.clock.send_for_model(*args, **given)),
            lambda: Clock.send_for_model(self, *args, **given),
        )
        ticket.number = number
        return ticket

    def wait_for_model(self, ticket: SimulatedTicket) -> None:
        """See :class:`Clock`."""
        number = ticket.number
        self.recorded(
            lambda to: to.clock.wait_for_model(to.tickets[number]),
            lambda: Clock.wait_for_model(self, ticket),
        )

    def post(self, messages: Sequence[Message]) -> list[int]:
        """Post messages to and from other stages, when compute reaches them. Returns their
        numbers."""
        numbers = []
        for message in messages:
            self.call()
            number = len(self.messages)
            self.messages.append(message)
            self._append(partial(Replay.post, number=number))
            numbers.append(number)
        return numbers

    def wait_for_message(self, number: int) -> None:
        """Make compute wait for a message."""
        assert self._into is self.entries, "operations of lanes wait for no messages"
        self.entries.append(Entry(self.phase, "", None, number))

    def sample_number(self) -> int:
        """Returns an index for the current time, for the record of memory. A replay stores the time
        of each index in ``samples``."""
        self._append(lambda to: to.samples.append(to.clock.now))
        self.num_samples += 1
        return self.num_samples - 1

    def recorded(self, call: Callable[[Replay], object], run: Callable[[], _T]) -> _T:
        """Record ``call``, unless a recorded call is running, and return the result of
        ``run``."""
        if self._is_within:
            return run()
        self._append(call)
        self._is_within = True
        try:
            return run()
        finally:
            self._is_within = False

    def recorded_operation(self, operation: lanes.Operation, parts: list[Part]) -> lanes.Operation:
        """Returns the operation with its calls recorded into ``parts``."""

        def started() -> lanes.Steps:
            parts.append(Part())
            with self._recording_into(parts[-1].entries):
                steps = operation()
            while True:
                with self._recording_into(parts[-1].entries):
                    works = next(steps, None)
                if works is None:
                    parts[-1].is_last = True
                    return
                yield works
                parts.append(Part())

        return started

    def new_number(self) -> int:
        """Returns the number for a new ticket."""
        self._num_tickets += 1
        return self._num_tickets - 1

    @contextmanager
    def _recording_into(self, entries: list[Entry]) -> Iterator[None]:
        outside = self._into, self._is_within
        self._into, self._is_within = entries, False
        try:
            yield
        finally:
            self._into, self._is_within = outside

    def _append(self, call: Callable[[Replay], object]) -> None:
        self._into.append(Entry(self.phase, self.module(), call))


def _recorded(name: str) -> Callable[..., Any]:
    """Returns a method of :class:`RecordingClock` that records its call."""
    plain = getattr(Clock, name)

    @wraps(plain)
    def method(clock: RecordingClock, *args: Any, **given: Any) -> Any:
        return clock.recorded(
            lambda to: plain(to.clock, *args, **given), lambda: plain(clock, *args, **given)
        )

    return method


for _name in (
    *("make_other_lanes", "restart", "call", "compute", "spend"),
    *("compute_on_host", "send", "copy"),
):
    setattr(RecordingClock, _name, _recorded(_name))


class _RecordingLane(SimulatedLane):
    """A lane that records its calls."""

    _clock: RecordingClock

    def __init__(self, clock: RecordingClock, name: str, number: int) -> None:
        super().__init__(clock, name)
        self._number = number

    def submit(
        self,
        label: str,
        operation: lanes.Operation,
        *,
        after: Sequence[Any] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> SimulatedTicket:
        """See :class:`SimulatedLane`."""
        del reads, writes
        clock, lane, parts = self._clock, self._number, list[Part]()
        number, numbers = clock.new_number(), [ticket.number for ticket in after]
        ticket = clock.recorded(
            lambda to: to.submit(lane, label, parts, numbers, number),
            lambda: SimulatedLane.submit(
                self, label, clock.recorded_operation(operation, parts), after=after
            ),
        )
        ticket.number = number
        return ticket

    def record(self) -> SimulatedTicket:
        """See :class:`SimulatedLane`."""
        lane, number = self._number, self._clock.new_number()
        ticket = self._clock.recorded(
            lambda to: to.keep(number, to.lane(lane).record()),
            lambda: SimulatedLane.record(self),
        )
        ticket.number = number
        return ticket

    def wait(self, *tickets: Any) -> None:
        """See :class:`SimulatedLane`."""
        lane, numbers = self._number, [ticket.number for ticket in tickets]
        self._clock.recorded(
            lambda to: to.lane(lane).wait(*(to.tickets[each] for each in numbers)),
            lambda: SimulatedLane.wait(self, *tickets),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See :class:`SimulatedLane`."""
        clock, lane = self._clock, self._number
        with SimulatedLane.entered(self):
            clock.recorded(lambda to: to.clock.entered.append(to.lane(lane)), lambda: None)
            yield
        clock.recorded(lambda to: to.clock.entered.pop(), lambda: None)

    def drain(self) -> list[RuntimeError]:
        """See :class:`SimulatedLane`."""
        lane = self._number
        return self._clock.recorded(
            lambda to: to.lane(lane).drain(), lambda: SimulatedLane.drain(self)
        )


class Replay:
    """Makes the calls of a tape on a new clock.

    Args:
        tape: The tape.
        num_ranks: Number of ranks of the job.
        posted: Called with each message that compute posts, and the time.
        machine: The machine of the new clock. None: the machine of the tape.

    Attributes:
        clock: The new clock.
        marks: See :meth:`RecordingClock.mark`.
        tickets: Tickets by number.
        finishes: Times that the calls of ``Clock.finish`` returned.
        samples: Times by number; see :meth:`RecordingClock.sample_number`.
        waits_for: The message that compute waits for. None: the tape has ended.
    """

    def __init__(
        self,
        tape: RecordingClock,
        num_ranks: int,
        posted: Callable[[Message, float], None],
        machine: Machine | None = None,
    ) -> None:
        self.clock = Clock(machine or tape.machine, num_ranks)
        self.marks: list[Mark] = []
        self.tickets: dict[int, SimulatedTicket] = {}
        self.finishes: list[float] = []
        self.samples: list[float] = []
        self.waits_for: Message | None = None
        self._messages = tape.messages
        self._posted = posted
        self._module = ""
        self._rest = iter(tape.entries)
        self.clock.module = lambda: self._module

    def run(self) -> None:
        """Continue until a wait for a message whose end is unknown, or to the end of the tape."""
        if self.waits_for is not None:
            self._arrived(self.waits_for)
            self.waits_for = None
        for entry in self._rest:
            if entry.call is not None:
                self._make(entry)
                continue
            self.clock.phase = entry.phase
            message = self._messages[entry.message]
            if not message.is_complete:
                self.waits_for = message
                return
            self._arrived(message)

    def lane(self, number: int) -> SimulatedLane:
        """Returns the lane with this number."""
        return self.clock.every_lane[number]

    def keep(self, number: int, ticket: SimulatedTicket) -> None:
        """Store a ticket by its number."""
        self.tickets[number] = ticket

    def submit(
        self, lane: int, label: str, parts: Sequence[Part], after: Sequence[int], number: int
    ) -> None:
        """Submit a recorded operation."""
        tickets = [self.tickets[each] for each in after]
        operation = lambda: self._steps(parts)  # noqa: E731
        self.tickets[number] = self.lane(lane).submit(label, operation, after=tickets)

    def post(self, number: int) -> None:
        """Post a message at the time at which compute reaches it."""
        self._posted(self._messages[number], self.clock.reached_by_compute())

    def _steps(self, parts: Sequence[Part]) -> lanes.Steps:
        for part in parts:
            for entry in part.entries:
                self._make(entry)
            if not part.is_last:
                yield ()

    def _make(self, entry: Entry) -> None:
        self.clock.phase, self._module = entry.phase, entry.module
        if entry.call is not None:
            entry.call(self)

    def _arrived(self, message: Message) -> None:
        start, end = message.interval
        self.clock.wait_until(message.label, message.lane, start, end)
