"""Lanes, which are ordered queues of work on accelerators and on CPU, and meters of waits.

Only this file, ``device_lane.py`` and ``copy_lanes.py`` use streams, events and profiler labels.
``host_lane.py`` has the lanes of a CPU.

[Note: Lanes]
There are five lanes: compute (the user's model), a gather and a reduce lane for the inner axis, and
such a pair for the outer axis. Work on one lane runs in the order of submission. Between lanes only
tickets order work. On CUDA a lane is a stream and a ticket an event; the host never waits. On CPU
compute is the host itself, a lane is a FIFO of asynchronous works, and waiting for a ticket drives
its operation to the end. On CUDA, a lane waits for only the newest of several tickets of one
stream, and does not wait for its own tickets.

Accelerators have a sixth lane, which encodes main weights for gathers, so that a cast does not wait
for the all-gather of the previous unit. On CPU the host casts when it issues the gather. Copies
between the device and other memory have additional lanes (``copy_lanes.py``).

An operation is a generator (``collectives.py``) that yields the works that must be done before it
continues. On CUDA it runs to its end at submission, because its stream waits. On CPU it starts at
submission if its predecessors are done, otherwise at the next submission or wait on its lane.

Submissions name the tensors that they read and write. The lanes of this package ignore these
tensors. Lanes in tests record them, and check that every two conflicting accesses are ordered.

Each lane and each operation has the same name in profiles, in ``engine.measure()``, in errors, and
in the timeline of a simulation.

[Note: Waits of compute]
Lanes report each wait of compute to their *meters*. There is one meter within
``engine.measure()``, and none otherwise.

On CPU compute is the host, which waits for works of a lane. The seconds are attributed to the
operation that has issued the works. On CUDA the host does not wait at submission. Instead, events
with timing are recorded on compute's stream before and after its wait; between them the stream only
waits. (If the device has caught up with the host, their times also differ by the host's time
between the two calls, some microseconds.) The events are read after the device has reached them,
or when the measurement is read, so that training does not wait for them. The awaited operation and
its predecessors have two such events, too. As in a simulation, a wait is attributed to the longest
of these operations: a wait for the cast of a gather counts as a wait for the gather.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_engine.accelerator import capture_check, is_accelerator, module_of
from fsdp_engine.strategies import Axis

_MILLI = 1e-3


@dataclass(frozen=True)
class TimedWork:
    """One operation on a device: its lane, its label, and events with timing around it."""

    lane: str
    label: str
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        """Seconds between the two events. The device must have reached ``end``."""
        return float(self.begin.elapsed_time(self.end)) * _MILLI


class Meter(Protocol):
    """Records waits of compute."""

    def waited(self, lane: str, label: str, seconds: float) -> None:
        """Record that the host has waited ``seconds`` for works of operation ``label``."""
        ...

    def waits(self, begin: Any, end: Any, works: Sequence[TimedWork]) -> None:
        """Record a wait of compute's stream between two events.

        ``works`` has the awaited operation, followed by its predecessors.
        """
        ...


Steps = Iterator[Sequence[Any]]
Operation = Callable[[], Steps]

COMPUTE = "compute"
# Names of lanes, in the order of the fields of Lanes.
LANES = (COMPUTE, "inner gather", "inner reduce", "outer gather", "outer reduce")
COPY_IN = "copy in"

# Matches "reduce-scatter of blocks.1", "all-reduce of blocks.1 over the outer axis" and "encode
# blocks.1 (buffer 0)".
_LABEL = re.compile(r"^[\w-]+ (?:of )?(.+?)(?: \(buffer \d+\))?(?: over the \w+ axis)?$")


def unit_of(label: str) -> str:
    """Returns the name of the unit in the label of an operation."""
    found = _LABEL.match(label)
    return found.group(1) if found else label


def name_of_wait(lane: str, unit: str) -> str:
    """Returns the name of a wait in tables, such as "inner gather of blocks.1"."""
    return f"{lane} of {unit}"


class Ticket(Protocol):
    """A point in a lane's work that other lanes can wait for."""

    @property
    def done(self) -> bool:
        """Whether the host has observed that the work before this point is done."""
        ...


class Lane(Protocol):
    """An ordered queue of work. See [Note: Lanes].

    Attributes:
        runs_ahead: Whether submitted work runs without further calls of the host.
        meters: Objects that record waits of compute: see [Note: Waits of compute].
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
        """Submit an operation that runs after this lane's earlier work and after some tickets.

        Args:
            label: Name of the operation.
            operation: The function that makes its generator.
            after: Tickets that the operation waits for.
            reads: Tensors that the operation reads.
            writes: Tensors that the operation writes.
        """
        ...

    def record(self) -> Ticket:
        """Returns a ticket for all work submitted so far."""
        ...

    def wait(self, *tickets: Ticket) -> None:
        """Make later work of this lane wait for ``tickets``.

        Tickets of the same lane must be in the order of submission.
        """
        ...

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Declare that the model's later work, which is not submitted, accesses these tensors."""
        ...

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """Run ``action``, which allocates or frees the memory of ``storage``, in lane order."""
        ...

    def drain(self) -> Sequence[Exception]:
        """Wait for all submitted work. Returns errors instead of raising them."""
        ...


class ComputeLane(Lane, Protocol):
    """A lane on which the caller's code can run without :meth:`submit`."""

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context within which work of the caller runs on this lane."""
        ...


@dataclass(frozen=True)
class Lanes:
    """The lanes of an engine.

    Attributes:
        compute: The model's lane.
        inner_gather, inner_reduce, outer_gather, outer_reduce: The lanes for collectives.
        copy_in: The lane that encodes weights for gathers. None: the lane of the gather does.
    """

    compute: Lane
    inner_gather: Lane
    inner_reduce: Lane
    outer_gather: Lane
    outer_reduce: Lane
    copy_in: Lane | None = None

    @property
    def all(self) -> tuple[Lane, ...]:
        """All lanes, compute first."""
        others = (self.inner_gather, self.inner_reduce, self.outer_gather, self.outer_reduce)
        return (self.compute, *others, *(() if self.copy_in is None else (self.copy_in,)))

    @property
    def encode(self) -> Lane:
        """The lane on which codecs encode weights in an operation of their own, before the
        gather."""
        return self.inner_gather if self.copy_in is None else self.copy_in

    def drain(self) -> list[Exception]:
        """Wait for all work of all lanes. Returns errors instead of raising them."""
        compute, *others = self.all
        return [error for lane in (*others, compute) for error in lane.drain()]

    def drain_gathers(self) -> None:
        """Wait for all gathers.

        Raises:
            RuntimeError, ValueError: A gather has failed.
        """
        for lane in dict.fromkeys((self.encode, self.inner_gather, self.outer_gather)):
            for error in lane.drain():
                raise error

    def gather(self, axis: Axis) -> Lane:
        """Returns the lane for gathers along ``axis``."""
        return self.inner_gather if axis is Axis.INNER else self.outer_gather

    def reduce(self, axis: Axis) -> Lane:
        """Returns the lane for reductions along ``axis``."""
        return self.inner_reduce if axis is Axis.INNER else self.outer_reduce


class Chain:
    """A sequence of submissions, each after the previous one. It is built once and run often."""

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
        """Append a submission. The arguments are those of :meth:`Lane.submit`."""
        self._links.append((lane, label, operation, reads, writes))

    def run(self, after: Sequence[Ticket]) -> Ticket:
        """Submit all operations, the first one after ``after``. Returns the ticket of the last."""
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
    """A stream that does not wait for compute and lanes, for messages that the host waits for.

    Args:
        device: The device. On a CPU there is no stream, and methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_of(device) if is_accelerator(device) else None
        self._stream: Any = None
        if self._module is not None:
            self._stream = self._module.Stream(device=device, priority=-1)

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context within which this is the current stream."""
        return _NOTHING if self._module is None else self._module.stream(self._stream)

    def wait_for_compute(self) -> None:
        """Make this stream wait for the work submitted so far to the model's stream.

        Must not be called within :meth:`entered`.
        """
        if self._module is not None:
            event = self._module.Event()
            event.record(self._module.current_stream(self._device))
            self._stream.wait_event(event)


class GradientStream:
    """The stream on which a backward writes gradients and waits for their reductions.

    Autograd runs each node on the stream of its forward, and the end of backward on the stream of
    the caller. Staging buffers are allocated and freed on a single stream, the current one at the
    start of backward. An extension also uses this class for the stream on which a block computes.

    Args:
        device: The device. On a CPU there are no streams, and methods do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = module_of(device) if is_accelerator(device) else None
        self._stream: Any = None
        self._is_capturing = capture_check(device)
        self._captures = self._has_graphs = False

    def has_graphs(self) -> bool:
        """Returns whether the current stream is captured into a graph, or was in an earlier call.

        The host cannot observe that the replay of a graph changes weights.
        """
        self._has_graphs = self._has_graphs or self._is_capturing()
        return self._has_graphs

    def begins_capture(self) -> bool:
        """Returns whether the current stream is captured into a graph and was not in the last
        call."""
        before, self._captures = self._captures, self._is_capturing()
        return self._captures and not before

    @property
    def exists(self) -> bool:
        """Whether the device has streams."""
        return self._module is not None

    def is_new(self) -> bool:
        """Returns whether the current stream differs from that of the last :meth:`begin`."""
        if self._module is None:
            return False
        # The first test is needed because `None != stream` is False.
        return self._stream is None or self._stream != self._current()

    def begin(self) -> None:
        """Record the current stream, at the start of a backward or of a forward."""
        if self._module is not None:
            self._stream = self._current()

    def entered(self) -> AbstractContextManager[None]:
        """Returns a context within which the recorded stream is the current one.

        If another stream was current, the recorded stream first waits for that one. At the end,
        that one waits for the recorded stream.
        """
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
    """Returns a profiler range, or an empty context if no profiler runs: a range costs time."""
    if is_profiled():
        return torch.profiler.record_function(f"fsdp_engine: {label}")
    return nullcontext()


def is_capturing(device: torch.device, streams: Sequence[torch.Stream | None]) -> bool:
    """Returns whether a stream is being captured into a graph.

    This is checked for ``streams`` and for torch's default capture stream. During a capture, a
    query of an event by any thread makes the capture fail.
    """
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
