"""Lanes, ordered queues of work on accelerators and on CPU, and meters of waits for them.

Streams, events and profiler labels are in this file, in ``device_lane.py`` and in ``copy_lanes.py``
alone. ``host_lane.py`` has the lanes of a CPU.

[Note: Lanes]
There are five lanes: compute (the user's model), a gather and a reduce lane for the inner axis, and
a pair for the outer axis. Work on one lane runs in the order of submission; between lanes only
tickets order it. On CUDA a lane is a stream and a ticket an event; the host never waits. On CPU
compute is the host itself, a lane is a FIFO of asynchronous works, and waiting for a ticket drives
its operation to the end. Of several tickets of one stream a lane waits for the newest only, and for
none of its own.

Accelerators have a sixth lane, which encodes main weights for gathers, so that a cast does not wait
for the all-gather of the previous unit. On CPU the host casts when it issues the gather. Copies
from and to other places have lanes of their own (``copy_lanes.py``).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator, module_of
from fsdp_engine.strategies import Axis

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
        meters: record waits of compute: see [Note: Waits of compute] in ``lanes.py``.
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


class ComputeLane(Lane, Protocol):
    """A lane on which code can run that knows no lanes."""

    def entered(self) -> AbstractContextManager[None]:
        """Within it, work of the caller runs on this lane."""
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
        """The lane on which codecs encode weights that the same operation does not gather."""
        return self.inner_gather if self.copy_in is None else self.copy_in

    def drain(self) -> list[Exception]:
        """End everything on every lane; what failed is returned, not raised."""
        compute, *others = self.all
        return [error for lane in (*others, compute) for error in lane.drain()]

    def drain_gathers(self) -> None:
        """End all gathers.

        Raises:
            RuntimeError, ValueError: one failed.
        """
        for lane in dict.fromkeys((self.encode, self.inner_gather, self.outer_gather)):
            for error in lane.drain():
                raise error

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


_NOTHING = nullcontext()


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
    their reductions; or the stream on which a block computes.

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


is_profiled: Any = torch.autograd._profiler_enabled


def labelled(label: str) -> Any:
    """A profiler range while a profiler runs; nothing otherwise, because a range costs time."""
    if is_profiled():
        return torch.profiler.record_function(f"fsdp_engine: {label}")
    return nullcontext()


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
