"""Lanes: ordered queues of work, and meters of the time that compute waits for them.

[Note: Lanes]
There are five lanes: compute (the user's model), a gather and a reduce lane for the inner axis, and
a pair for the outer axis. Work on one lane runs in the order of submission; between lanes only
tickets order it. On CUDA a lane is a stream and a ticket an event; the host never waits. On CPU
compute is the host itself, a lane is a FIFO of asynchronous works, and waiting for a ticket drives
its operation to the end. Of several tickets of one stream a lane waits for the newest only, and for
none of its own.

Accelerators have a sixth lane, which encodes main weights for gathers, so that a cast does not wait
for the all-gather of the previous unit. On CPU the host casts when it issues the gather.

An operation is a generator (``collectives.py``) that yields the works that must be done before it
continues. On CUDA it runs through at submission, because its stream waits. On CPU it starts at
submission if its predecessors are done, otherwise with the next submission or wait on its lane.

Submissions name the tensors that they read and write. These lanes ignore the names; lanes of tests
record them and prove that every two conflicting accesses are ordered.

Lanes and operations have one name each in profiles, in ``engine.measure()``, in errors, and in the
timeline of a simulation.

[Note: Waits of compute]
Lanes have *meters*: none in ordinary training. Within ``engine.measure()`` there is one, to which
lanes report each wait of compute.

On CPU compute is the host, which waits for works of a lane. The seconds are attributed to the
operation that has issued the works. On CUDA the host does not wait at submission. Events with
timing are recorded before and after the wait on compute's stream, between which the stream only
waits. (If the device is ahead of the host, they differ by the host's time between the two calls,
some microseconds.) They are read when they have been reached, or when the measurement is read, so
that training does not wait for them. The awaited operation and its predecessors have two such
events, too. As in a simulation, a wait is attributed to the longest of them: a wait for the cast of
a gather is a wait for the gather.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fsdp_engine.strategies import Axis

# Events are read, as far as they are reached, when there are so many waits with them.
_MOST_PENDING = 1024
_MILLI = 1e-3


@dataclass(frozen=True)
class TimedWork:
    """One operation on a device: its lane, its label, and events with times around it."""

    lane: str
    label: str
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        """How long it took; its end must be reached."""
        return float(self.begin.elapsed_time(self.end)) * _MILLI


class Meter(Protocol):
    """Records waits of compute."""

    def waited(self, lane: str, label: str, seconds: float) -> None:
        """The host has waited for works of an operation."""
        ...

    def waits(self, begin: Any, end: Any, works: Sequence[TimedWork]) -> None:
        """Between two events compute's stream waits for the first of ``works``, which came right
        after the others."""
        ...


@dataclass
class Waits:
    """Waits of one kind: how many, and their seconds."""

    count: int = 0
    seconds: float = 0.0


class WaitMeter:
    """Adds up waits. See [Note: Waits of compute].

    Args:
        phase: returns the present phase of the program.

    Attributes:
        found: waits by (lane, label, phase), as far as they are known.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self.found: dict[tuple[str, str, str], Waits] = {}
        self._phase = phase
        self._pending: deque[tuple[Any, Any, Sequence[TimedWork], str]] = deque()

    def waited(self, lane: str, label: str, seconds: float) -> None:
        """See :class:`Meter`."""
        self._add(lane, label, self._phase(), seconds)

    def waits(self, begin: Any, end: Any, works: Sequence[TimedWork]) -> None:
        """See :class:`Meter`."""
        self._pending.append((begin, end, works, self._phase()))
        if len(self._pending) >= _MOST_PENDING:
            self.read(wait=False)

    def read(self, *, wait: bool) -> None:
        """Turn events into seconds.

        Args:
            wait: for the last of them. False: only events that have been reached are read.
        """
        pending = self._pending
        if wait and pending:
            pending[-1][1].synchronize()
        while pending and pending[0][1].query():
            begin, end, works, phase = pending.popleft()
            longest = max(works, key=lambda work: work.seconds)
            seconds = max(float(begin.elapsed_time(end)) * _MILLI, 0.0)
            self._add(longest.lane, longest.label, phase, seconds)

    def _add(self, lane: str, label: str, phase: str, seconds: float) -> None:
        waits = self.found.setdefault((lane, label, phase), Waits())
        waits.count += 1
        waits.seconds += seconds


Steps = Iterator[Sequence[Any]]
Operation = Callable[[], Steps]

COMPUTE = "compute"
# In the order of the fields of Lanes.
LANES = (COMPUTE, "inner gather", "inner reduce", "outer gather", "outer reduce")
COPY_IN = "copy in"

# "reduce-scatter of blocks.1 over the inner axis", "encode blocks.1 (buffer 0)".
_LABEL = re.compile(r"^[\w-]+ (?:of )?(.+?)(?: \(buffer \d+\))?(?: over the \w+ axis)?$")


def unit_of(label: str) -> str:
    """The unit that the label of an operation names."""
    found = _LABEL.match(label)
    return found.group(1) if found else label


def name_of_wait(lane: str, unit: str) -> str:
    """The name of a wait in tables: "inner gather of blocks.1"."""
    return f"{lane} of {unit}"


class Ticket(Protocol):
    """A point in a lane's work that other lanes can wait for."""

    @property
    def done(self) -> bool:
        """Whether the host knows it to be reached."""
        ...


class Lane(Protocol):
    """An ordered queue of work. See [Note: Lanes].

    Attributes:
        runs_ahead: whatever the host does.
        meters: record waits of compute: see [Note: Waits of compute] in ``lane.py``.
    """

    runs_ahead: bool
    meters: tuple[Meter, ...]

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Ticket] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> Ticket:
        """Queue ``operation`` behind this lane's work and behind the tickets in ``after``."""
        ...

    def record(self) -> Ticket:
        """A ticket for everything submitted so far."""
        ...

    def wait(self, *tickets: Ticket) -> None:
        """Whatever this lane does later comes after ``tickets``; those of one lane are in the order
        in which it was given their work."""
        ...

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Work outside the engine's view (the model's) touches these from here on."""
        ...

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """Allocate or free ``storage``'s memory at this point of the lane."""
        ...

    def drain(self) -> Sequence[Exception]:
        """End everything submitted; what failed is returned, not raised."""
        ...


@dataclass(frozen=True)
class Lanes:
    """The lanes of an engine.

    Attributes:
        copy_in: encodes weights before they are gathered; None: the lane of their gather does.
    """

    compute: Lane
    inner_gather: Lane
    inner_reduce: Lane
    outer_gather: Lane
    outer_reduce: Lane
    copy_in: Lane | None = None

    @property
    def all(self) -> tuple[Lane, ...]:
        """Compute, and the others."""
        others = (self.inner_gather, self.inner_reduce, self.outer_gather, self.outer_reduce)
        return (self.compute, *others, *(() if self.copy_in is None else (self.copy_in,)))

    @property
    def encode(self) -> Lane:
        """The lane for encodings after which nothing is gathered in the same operation."""
        return self.inner_gather if self.copy_in is None else self.copy_in

    def drain(self) -> list[Exception]:
        """End everything on every lane; what failed is returned, not raised."""
        compute, *others = self.all
        return [error for lane in (*others, compute) for error in lane.drain()]

    def gather(self, axis: Axis) -> Lane:
        """The lane for gathers along ``axis``."""
        return self.inner_gather if axis is Axis.INNER else self.outer_gather

    def reduce(self, axis: Axis) -> Lane:
        """The lane for reductions along ``axis``."""
        return self.inner_reduce if axis is Axis.INNER else self.outer_reduce


class Chain:
    """Submissions in a row, each after the one before: put together once, run often."""

    def __init__(self) -> None:
        self._links: list[tuple[Lane, str, Operation, Sequence[Tensor], Sequence[Tensor]]] = []

    def add(
        self,
        lane: Lane,
        label: str,
        operation: Operation,
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """A further link; see :meth:`Lane.submit`."""
        self._links.append((lane, label, operation, reads, writes))

    def run(self, after: Sequence[Ticket]) -> Ticket:
        """Submit all links, the first behind ``after``; returns the last one's ticket."""
        ticket: Ticket | None = None
        for lane, label, operation, reads, writes in self._links:
            ticket = lane.submit(label, operation, after=after, reads=reads, writes=writes)
            after = (ticket,)
        assert ticket is not None, "an empty chain"
        return ticket

    def __bool__(self) -> bool:
        return bool(self._links)
