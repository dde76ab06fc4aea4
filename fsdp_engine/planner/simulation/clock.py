"""The simulated clock: lanes that advance in time, and exposed communication.

[Note: Two clocks]
On a machine whose host runs ahead there are two clocks. The *host's* clock advances with every
call. The *device's* clock is the clock of its lanes: an operation on a lane starts when the host
has issued it, and previous operations on the lane and those that it depends on are complete. A
*ticket* is the end of an operation. Waiting for it takes no time by itself, but delays the next
operation on the lane. Casts and sums on other lanes are kernels of the same device and need the
memory and processors of compute, so they delay compute by their time. (On an H200 the time of a
step of compiled blocks is the sum of the times of all kernels of all streams, within 1 %; on an
H100 it is 4 % less.) *Exposed* time is measured on the device's clock: from the time at which
compute could have started without the wait (issued, and the lane idle) to the time at which it
starts.

On a machine where the host computes, both clocks are the same. Lanes are then FIFOs like those of
``HostLane``: an operation starts at its submission if its dependencies are complete, otherwise at
the next submission or wait on its lane, and waiting for it blocks the host. The host runs the part
of an operation after its communication (sums, casts) when it waits for the operation; scratch
memory is held until then. Memory therefore does not depend on the duration of communication.

Copies of offloaded state and activations run on lanes of their own; copies of main weights for
gathers run on the lane that encodes them. All share the link to the host or to the disk
(``copies.py``). If the host of a device computes on offloaded state, the computation uses the
bandwidth of host memory, advances the host's clock, and has a row in the timeline ("host work").

Optimizer steps that overlap with forward run on a lane of their own, at the rate that they would
have alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_engine.kernel_interface import allocator, lanes
from fsdp_engine.planner.simulation.copies import Copy, CopyQueues, Direction
from fsdp_engine.planner.simulation.machine import Machine

# Lane of the model's own collectives, for example of tensor parallelism.
MODEL_LANE = "tensor parallel"
# Lane of the collectives of ring attention.
CONTEXT_LANE = "context parallel"

# Row of the timeline for computation on the host of a device.
HOST_WORK = "host work"


class OwnCode(NamedTuple):
    """Host time of the engine's own Python code around each call of a lane (hooks of modules,
    tickets, memory), in multiples of the time of an operation."""

    submission: int
    wait: int
    management: int


# Measured on steps of small blocks at all levels (``benchmarks/engine_host_time.py``), less the
# time of their operations. On a device, whose lanes have events and streams, a unit takes the time
# of about 35 operations at no_shard and of 65 to 100 at optim_grads_params, where it has 3
# submissions, 3 waits, and 8 allocations and releases. On a CPU it takes less.
_ON_DEVICES, _ON_HOSTS = OwnCode(15, 6, 4), OwnCode(6, 5, 1)


@dataclass(frozen=True)
class Span:
    """The time interval of one operation on a lane.

    Attributes:
        lane: The name of the lane.
        label: The label of the operation.
        phase: The phase of the program: "forward", "backward" or "step".
        start, end: Start and end in seconds.
        module: Name of the module that the operation belongs to; "" if there is none.
    """

    lane: str
    label: str
    phase: str
    start: float
    end: float
    module: str = ""


@dataclass(frozen=True)
class Exposed:
    """A wait of compute for communication, for another stage of a pipeline, or for copies of
    offloaded state or activations.

    Attributes:
        unit: The unit whose communication compute waited for; for activations, the block.
        phase: The phase of the program: "forward", "backward" or "step".
        lane: The lane of the communication or copy.
        seconds: Duration of the wait.
        start: Start of the wait, on the time axis of spans.
    """

    unit: str
    phase: str
    lane: str
    seconds: float
    start: float


@dataclass(frozen=True)
class Moment:
    """The end time of an operation, and the operation that determines it: the longest one among the
    operation itself and its direct dependencies. (Waiting for the cast of a gathered tensor is
    attributed to the gather.)

    Attributes:
        known: Seconds since the start of the simulation, without the time of ``copy``.
        label, lane: The label and lane of the longest operation.
        seconds: The duration of the longest operation.
        copy: A copy in the operation. Later copies may move its end.
        after_copy: Seconds from the end of the copy to the end of the operation.
    """

    known: float
    label: str
    lane: str
    seconds: float = 0.0
    copy: Copy | None = None
    after_copy: float = 0.0

    @property
    def time(self) -> float:
        """Seconds since the start of the simulation."""
        if self.copy is None:
            return self.known
        return max(self.known, self.copy.end + self.after_copy)


class SimulatedTicket:
    """The end of an operation on a lane. If the host computes, the time is known only after the
    operation has started."""

    __slots__ = ("_clock", "_lane", "_start", "_steps", "done", "moment", "number")

    def __init__(
        self, lane: SimulatedLane, clock: Clock, moment: Moment, start: Callable[[], Moment] | None
    ) -> None:
        self._lane = lane
        self._clock = clock
        self._start = start
        self._steps: lanes.Steps | None = None  # the part after the communication
        self.moment = moment
        self.number = -1  # index on a tape
        # As in HostTicket: whether the operation has no communication, or the host has waited for
        # it.
        self.done = False

    @property
    def time(self) -> float:
        """The time at which the operation ends."""
        return self.moment.time

    def begin(self) -> None:
        """Start the operation if it has not started."""
        if self._start is not None:
            start, self._start = self._start, None
            self.moment = start()
            self._steps = self._clock.take_rest()
            self.done = self._steps is None

    def finish(self) -> None:
        """Run the part of the operation after its communication, for which the host has waited."""
        self.done = True
        if self._steps is not None:
            steps, self._steps = self._steps, None
            self._clock.run_rest(self._lane, steps)

    def begin_in_turn(self) -> None:
        """Start all operations on the ticket's lane up to and including this one."""
        self._lane.begin_through(self)


class SimulatedLane:
    """A lane that advances in simulated time; see :class:`~fsdp_engine.comm.lanes.Lane`.

    Attributes:
        end: The end of the last operation.
        runs_ahead, meters: See :class:`~fsdp_engine.comm.lanes.Lane`.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self.name = name
        self.end = Moment(0.0, name, name)
        self.runs_ahead = clock.machine.host_runs_ahead
        self.meters: tuple[lanes.Meter, ...] = ()  # empty: the clock records exposed communication
        self._waiting: deque[SimulatedTicket] = deque()

    @property
    def free(self) -> float:
        """The time at which all submitted operations are complete."""
        return self.end.time

    @free.setter
    def free(self, time: float) -> None:
        self.end = Moment(time, self.name, self.name)

    def submit(
        self,
        label: str,
        operation: lanes.Operation,
        *,
        after: Sequence[Any] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> SimulatedTicket:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        del reads, writes
        clock = self._clock
        clock.call(clock.own_code.submission)
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
        """Start all operations up to and including the one of ``ticket``."""
        while ticket in self._waiting:
            self._waiting.popleft().begin()

    def record(self) -> SimulatedTicket:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        moment = Moment(self._clock.reached(self), self.name, self.name)
        ticket = SimulatedTicket(self, self._clock, moment, None)
        ticket.done = not self.runs_ahead  # if the host computes, it has already run the operation
        return ticket

    def wait(self, *tickets: Any) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        self._clock.call(self._clock.own_code.wait)
        for ticket in tickets:
            self._clock.wait(self, ticket)

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """See :class:`~fsdp_engine.comm.lanes.ComputeLane`."""
        self._clock.entered.append(self)
        try:
            yield
        finally:
            self._clock.entered.pop()

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`. Memory is allocated and freed on the host's
        clock, as in a caching allocator."""
        del label, storage
        self._clock.call(self._clock.own_code.management)
        action()
        self._clock.memory_changed()

    def drain(self) -> list[RuntimeError]:
        """See :class:`~fsdp_engine.comm.lanes.Lane`. The host waits if it runs ahead."""
        while self._waiting:
            self._waiting.popleft().begin()
        if self.runs_ahead:
            self._clock.block_host(self)
        return []


@dataclass(frozen=True)
class StepPart:
    """The time, traffic and flops that a part of a step, such as a microbatch, adds to it.

    Attributes:
        seconds, compute_seconds, exposed_by_lane, sent_bytes, copied_bytes, model_flops,
            seconds_at_peak: See :class:`~.simulate.Simulation`.
    """

    seconds: float = 0.0
    compute_seconds: float = 0.0
    exposed_by_lane: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, float] = field(default_factory=dict)
    copied_bytes: dict[str, float] = field(default_factory=dict)
    model_flops: float = 0.0
    seconds_at_peak: float = 0.0


@dataclass(frozen=True)
class Mark:
    """A moment of the program, and the records of the step up to it.

    Attributes:
        part: The step up to the moment, without the times of lanes. Its ``seconds`` are the time at
            which compute reaches the moment.
        host: The time at which the host reaches the moment.
        num_spans, num_exposed: Lengths of the records.
    """

    part: StepPart
    host: float
    num_spans: int
    num_exposed: int


@dataclass
class _Work:
    """The operation that runs on a lane.

    Attributes:
        lane: The lane.
        sending, computed: Seconds of communication and of computation so far.
        stolen: Seconds by which communication delays compute so far.
        hosted: The time at which the last computation on a device's host ended; 0: there was none.
        copies: Copies of offloaded state or activations: place, direction, bytes, and the seconds
            of the operation before the copy.
    """

    lane: SimulatedLane
    sending: float = 0.0
    computed: float = 0.0
    stolen: float = 0.0
    hosted: float = 0.0
    copies: list[tuple[str, Direction, float, float]] = field(default_factory=list)


class Clock:
    """The simulated time of one rank, with a record of operations. See [Note: Two clocks].

    Args:
        machine: The machine.
        num_ranks: Number of ranks of the job.

    Attributes:
        machine, num_ranks: The arguments.
        own_code: The host time of the engine's own code on this machine.
        host: The time of the host's clock.
        phase: The phase of the program: "build", "forward", "backward" or "step".
        spans: Operations in the order of their submission.
        exposed: Waits of compute for communication.
        sent_bytes: Bytes sent on lanes, by axis.
        copied_bytes: Bytes copied on lanes, by lane.
        model_flops, seconds_at_peak: The FLOPs of products, without recomputation, and the seconds
            that they take at the machine's peak.
        entered: Lanes that run operations instead of compute, the innermost last.
        every_lane: Lanes in the order in which they were made.
        memory_changed: A function that the clock calls when the engine has allocated or freed
            memory.
        module: Returns the name of the module whose operation runs.
    """

    def __init__(self, machine: Machine, num_ranks: int = 1) -> None:
        self.machine = machine
        self.num_ranks = num_ranks
        self.host = 0.0
        self.phase = "build"
        self.spans: list[Span] = []
        self.exposed: list[Exposed] = []
        self.sent_bytes: dict[str, float] = {}
        self.copied_bytes: dict[str, float] = {}
        self.model_flops = self.seconds_at_peak = 0.0
        self.entered: list[SimulatedLane] = []
        self.memory_changed: Callable[[], None] = lambda: None
        self.module: Callable[[], str] = lambda: ""
        # A device and a CPU have different lanes: see [Note: Lanes] in ``comm/lanes.py``.
        names = (*lanes.LANES, lanes.COPY_IN) if machine.host_runs_ahead else lanes.LANES
        self.own_code = _ON_DEVICES if machine.host_runs_ahead else _ON_HOSTS
        self.every_lane: list[SimulatedLane] = []
        self.lanes = {name: self.make_lane(name) for name in names}
        self._queues: dict[str, CopyQueues] = {}
        self._copies: list[tuple[int, Copy]] = []  # copies, with the indices of their spans
        self._compute = self.lanes[lanes.COMPUTE]
        self._of_model = {name: self.make_lane(name) for name in (MODEL_LANE, CONTEXT_LANE)}
        # The dependency of compute's next operation, and the phase in which it was added.
        self._awaited: SimulatedTicket | None = None
        self._awaited_in = ""
        # The latest message of another stage that the next operation depends on.
        self._arrival: Moment | None = None
        self._arrived_in = ""
        # The operation that runs on another lane, and the rest of the last operation.
        self._work: _Work | None = None
        self._rest: lanes.Steps | None = None

    def make_lanes(self, device: torch.device) -> lanes.Lanes:
        """Returns the lanes of an engine."""
        del device
        return lanes.Lanes(*self.lanes.values())

    def make_other_lanes(self, names: Sequence[str]) -> Sequence[SimulatedLane]:
        """Returns new lanes in addition to an engine's lanes."""
        return [self.make_lane(name) for name in names]

    def make_lane(self, name: str) -> SimulatedLane:
        """Returns a new lane."""
        self.every_lane.append(SimulatedLane(self, name))
        return self.every_lane[-1]

    def restart(self) -> None:
        """Clear the record of operations."""
        self.spans.clear()
        self.exposed.clear()
        self.sent_bytes.clear()
        self.copied_bytes.clear()
        self.model_flops = self.seconds_at_peak = 0.0
        self._copies.clear()

    def mark(self) -> Mark:
        """Returns a mark of the current moment."""
        part = StepPart(
            self.now,
            sent_bytes=dict(self.sent_bytes),
            copied_bytes=dict(self.copied_bytes),
            model_flops=self.model_flops,
            seconds_at_peak=self.seconds_at_peak,
        )
        return Mark(part, self.host, len(self.spans), len(self.exposed))

    @property
    def now(self) -> float:
        """The time at which compute runs an operation that the program issues now."""
        return max(self.host, self._compute.free)

    @property
    def lane_at_work(self) -> str | None:
        """The lane whose operation runs; None: the compute lane."""
        return None if self._work is None else self._work.lane.name

    def call(self, count: int = 1) -> None:
        """Advance the host's clock by the time of ``count`` operations."""
        self.host += count * self.machine.host_seconds
        if not self.machine.host_runs_ahead:
            self._compute.free = self.host

    def compute(self, label: str, seconds: float) -> None:
        """Run an operation of ``seconds`` on the current lane."""
        self.call()
        if self._work is not None:
            self._work.computed += seconds
            return
        if self.entered:
            lane = self.entered[-1]
            start = self.reached(lane)
            lane.free = start + seconds
            if seconds:
                self.spans.append(Span(lane.name, label, self.phase, start, lane.free))
            return
        start = self._next_start()
        self._compute.free = start + seconds
        if not self.machine.host_runs_ahead:
            self.host = self._compute.free
        if seconds:
            end = self._compute.free
            self.spans.append(Span(lanes.COMPUTE, label, self.phase, start, end, self.module()))

    def spend(self, label: str, part: StepPart, host_seconds: float) -> None:
        """Run a part of a step whose times are known.

        Args:
            label: The label of the part.
            part: The times of the part on the device.
            host_seconds: The seconds that the host of a device needs to issue the part.
        """
        host, start = self.host, self._next_start()
        end = start + part.compute_seconds
        self.spans.append(Span(lanes.COMPUTE, label, self.phase, start, end, self.module()))
        for lane, wait in part.exposed_by_lane.items():
            self.exposed.append(Exposed(label, self.phase, lane, wait, end))
            end += wait
        self._compute.free = start + part.seconds
        self.host = self._compute.free
        if self.machine.host_runs_ahead:
            self.host = host + host_seconds

    def compute_on_host(self, label: str, num_bytes: float) -> None:
        """Let the host of a device read and write ``num_bytes`` of its memory. This happens
        immediately, and slows down copies that run at the same time."""
        self.call()
        start = self.host
        self.host = self._queues_of(allocator.HOST).add(Direction.WORK, start, num_bytes).end
        if self._work is not None:
            self._work.hosted = self.host
        if self.host > start:
            self.spans.append(Span(HOST_WORK, label, self.phase, start, self.host))

    def send(self, num_bytes: float, seconds: float, of_compute: float = 0.0) -> None:
        """Run communication of ``seconds`` on the current lane. Communication outside of lanes is
        small, and only its host time is counted.

        Args:
            num_bytes: Bytes that this rank sends.
            seconds: Duration of the communication.
            of_compute: The delay of compute, if one processor computes and communicates.
        """
        self.call()
        if self._work is not None:
            self._work.sending += seconds
            self._work.stolen += of_compute
            axis = axis_of(self._work.lane.name)
            self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes

    def send_for_model(
        self,
        name: str,
        num_bytes: float,
        seconds: float,
        of_compute: float = 0.0,
        lane_name: str = MODEL_LANE,
    ) -> SimulatedTicket:
        """Start a collective of the model on a lane of its own, when compute reaches it.

        Args:
            name: The name of the operation.
            num_bytes, seconds, of_compute: See :meth:`send`.
            lane_name: The name of the lane.

        Returns:
            The end of the collective, for :meth:`wait_for_model`.
        """
        self.call()
        lane, label = self._of_model[lane_name], f"{name} of {self.module() or 'the model'}"
        self._compute.free = self._next_start()
        start = max(self._compute.free, lane.free)
        moment = lane.end = Moment(start + seconds, label, lane.name, seconds)
        self.spans.append(Span(lane.name, label, self.phase, start, lane.free, self.module()))
        axis = axis_of(lane.name)
        self.sent_bytes[axis] = self.sent_bytes.get(axis, 0.0) + num_bytes
        if of_compute:
            self._take_from_compute(of_compute)
        return SimulatedTicket(lane, self, moment, None)

    def wait_for_model(self, ticket: SimulatedTicket) -> None:
        """Make compute wait for a collective of the model."""
        self.wait(self._compute, ticket)

    def wait_until(self, label: str, lane: str, start: float, end: float) -> None:
        """Make compute wait for a message of another stage, which has a row of its own in the
        timeline. If compute also waits for a collective, which may start after the message, the
        exposed time of the collective begins at the end of the message."""
        moment = Moment(end, label, lane, end - start)
        if end > start:
            self.spans.append(Span(lane, label, self.phase, start, end))
        if not self.machine.host_runs_ahead:
            self._note_exposed(moment, self.host, self.phase)
            self.host = self._compute.free = max(self.host, end)
        elif self._arrival is None or end > self._arrival.time:
            self._arrival, self._arrived_in = moment, self.phase

    def copy(self, place: str, direction: Direction, num_bytes: float) -> None:
        """Copy between the device and another place on the current lane. Outside of lanes, copy on
        the compute lane.

        Args:
            place: The other place, "host" or "disk".
            direction: The direction, from the device's point of view.
            num_bytes: Number of bytes to copy.
        """
        queues = self._queues_of(place)
        into = direction is Direction.INTO
        staging = self.machine.staging_seconds(place, num_bytes, self.num_ranks, to_device=into)
        if self._work is None:
            link = queues.link
            rate = link.into if into else link.out
            self.compute("copy", staging + link.latency + num_bytes / rate)
            return
        self.call()
        name = self._work.lane.name
        self._work.sending += 0.0 if into else staging  # the first piece is staged before the copy
        # If the host computes, its computation has ended when the copy begins.
        before = self._work.sending
        before += self._work.computed if self.machine.host_runs_ahead else 0.0
        self._work.copies.append((place, direction, num_bytes, before))
        self._work.sending += staging if into else 0.0  # the last piece is staged after the copy
        self.copied_bytes[name] = self.copied_bytes.get(name, 0.0) + num_bytes

    def _queues_of(self, place: str) -> CopyQueues:
        if place not in self._queues:
            machine, num_ranks = self.machine, self.num_ranks
            has_rate = place == allocator.HOST and machine.host_memory_bandwidth is not None
            rate = machine.host_rate(num_ranks) if has_rate else math.inf
            self._queues[place] = CopyQueues(machine.link_to_state(place, num_ranks), rate)
        return self._queues[place]

    def run(
        self, lane: SimulatedLane, label: str, operation: lanes.Operation, after: Sequence[Any]
    ) -> Moment:
        """Run an operation on ``lane`` and return its end. If the host computes, run it up to its
        first communication; see :meth:`take_rest`."""
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
            # The host runs the computation itself; only communication is asynchronous.
            self._host_computes(computed)
            start, seconds = max(start, self.host), seconds - computed
        else:
            stolen += computed
        start = max(start, work.hosted)
        if work.copies:
            end = self._run_copies(lane, label, start, seconds, work.copies)
        else:
            end = self._run_work(lane, label, start, seconds, after)
        if stolen:
            self._take_from_compute(stolen)
        return end

    def _run_work(
        self,
        lane: SimulatedLane,
        label: str,
        start: float,
        seconds: float,
        after: Sequence[SimulatedTicket],
    ) -> Moment:
        """Run the ``seconds`` of an operation that depends on ``after``. Returns its end."""
        lane.free = max(start + seconds, self.host) if seconds else start
        if seconds:
            self.spans.append(Span(lane.name, label, self.phase, start, lane.free))
        last = max((ticket.moment for ticket in after), key=lambda each: each.time, default=None)
        if last is not None and last.time >= start and last.seconds > seconds:
            return Moment(lane.free, last.label, last.lane, last.seconds)
        return Moment(lane.free, label, lane.name, seconds)

    def _run_copies(
        self,
        lane: SimulatedLane,
        label: str,
        start: float,
        seconds: float,
        copies: Sequence[tuple[str, Direction, float, float]],
    ) -> Moment:
        """Run the copies of an operation between its ``seconds`` of other work. Returns its end."""
        ready, done = max(start, self.host), 0.0
        for queues in self._queues.values():
            queues.forget(self.host)
        for place, direction, num_bytes, before in copies:
            copy = self._queues[place].add(direction, ready + before - done, num_bytes)
            ready, done = copy.end, before
            self._copies.append((len(self.spans), copy))
            self.spans.append(Span(lane.name, label, self.phase, copy.start, copy.end))
        rest = seconds - done
        if rest:
            self.spans.append(Span(lane.name, label, self.phase, copy.end, copy.end + rest))
        lane.end = Moment(0.0, label, lane.name, copy.end + rest - copy.start, copy, rest)
        return lane.end

    def take_rest(self) -> lanes.Steps | None:
        """Returns the rest of the last operation, after its communication, or None. Its scratch
        memory is held until the rest has run."""
        steps, self._rest = self._rest, None
        return steps

    def run_rest(self, lane: SimulatedLane, steps: lanes.Steps) -> None:
        """Run the rest of an operation of ``lane`` on the host. If the rest communicates, also wait
        for this communication."""
        has_more = True
        while has_more:
            with self._at_work(lane) as work:
                has_more = _issue(steps)
            self._host_computes(work.computed)
            lane.free = max(lane.free, self.host) + work.sending
            self._host_computes(lane.free - self.host if work.sending else 0.0)

    def _host_computes(self, seconds: float) -> None:
        self.host += seconds
        self._compute.free = self.host

    def wait(self, lane: SimulatedLane, ticket: SimulatedTicket) -> None:
        """Make later operations on ``lane`` depend on ``ticket``."""
        ticket.begin_in_turn()
        if not self.machine.host_runs_ahead:
            self.block(ticket)
        elif lane is not self._compute:
            lane.free = max(lane.free, ticket.time)
        elif self._awaited is None or ticket.time > self._awaited.time:
            self._awaited, self._awaited_in = ticket, self.phase

    def block(self, ticket: SimulatedTicket) -> None:
        """Make the host wait for ``ticket``, on a machine where the host computes."""
        ticket.begin_in_turn()
        self._note_exposed(ticket.moment, self.host, self.phase)
        self.host = self._compute.free = max(self.host, ticket.time)
        ticket.finish()

    def block_host(self, lane: SimulatedLane) -> None:
        """Make the host of a device wait for all operations submitted to ``lane``. Compute waits as
        well, since the host issues no work meanwhile."""
        self._note_exposed(lane.end, max(self.host, self._compute.free), self.phase)
        self.host = self.reached(lane)

    def reached_by_compute(self) -> float:
        """Returns the time at which compute has run all issued operations."""
        return self.reached(self._compute)

    def reached(self, lane: SimulatedLane) -> float:
        """Returns the time at which all operations submitted to ``lane`` are complete."""
        if lane is self._compute:
            dues = [each.time for each in (self._awaited, self._arrival) if each is not None]
            return max(lane.free, self.host, *dues)
        return max(lane.free, self.host)

    def finish(self) -> float:
        """Wait for all operations and dependencies of compute, and return the time."""
        self._compute.free = self._next_start()
        for number, copy in self._copies:
            self.spans[number] = replace(self.spans[number], start=copy.start, end=copy.end)
        return self._compute.free

    def _next_start(self) -> float:
        """Returns the start time of compute's next operation, and records its exposed waits."""
        ready = max(self.host, self._compute.free)
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            self._note_exposed(arrival, ready, self._arrived_in)
            ready = max(ready, arrival.time)
        ticket, self._awaited = self._awaited, None
        if ticket is None:
            return ready
        self._note_exposed(ticket.moment, ready, self._awaited_in)
        return max(ready, ticket.time)

    def _take_from_compute(self, seconds: float) -> None:
        start = max(self.host, self._compute.free)
        self._compute.free = start + seconds
        if not self.machine.host_runs_ahead:
            self.host = self._compute.free
        self.spans.append(Span(lanes.COMPUTE, "moving data", self.phase, start, start + seconds))

    def _note_exposed(self, due: Moment, ready: float, phase: str) -> None:
        if due.time > ready and due.lane != lanes.COMPUTE:
            name = lanes.unit_of(due.label)
            self.exposed.append(Exposed(name, phase, due.lane, due.time - ready, ready))

    @contextmanager
    def _at_work(self, lane: SimulatedLane) -> Iterator[_Work]:
        outside, self._work = self._work, _Work(lane)
        try:
            yield self._work
        finally:
            self._work = outside


def _issue(steps: lanes.Steps) -> bool:
    """Run the next step of an operation. Returns whether it ended with communication."""
    works = next(steps, None)
    for work in works or ():
        work.wait()
    return works is not None


def axis_of(lane: str) -> str:
    """Returns the axis of the communication on ``lane``, such as "inner" or "tensor", or the kind
    of its copies, "state" or "activations". The lane that encodes weights for gathers counts as
    "inner"."""
    return "inner" if lane == lanes.COPY_IN else lane.split()[0]
