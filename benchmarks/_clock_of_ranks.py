"""All ranks of a simulated machine in one process, with the clock of ``fe.simulate``.

The engine of each rank runs in a thread of its own, with fake tensors over torch's "fake" process
group. One thread runs at a time. Host messages are exchanged between threads, so ranks may differ
in what they run.

If the host runs ahead of the device (:class:`DeviceClock`), only messages delay the host.
Operations are recorded with their dependencies, and their times are determined when all ranks have
issued a step. A collective begins on all of its ranks when the last of them has reached it. If
ranks compute on the host (:class:`HostClock`), a thread waits for the others as in training.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fsdp_engine as fe
from fsdp_engine.comm import collectives, host_message
from fsdp_engine.comm.lanes import COMPUTE, COPY_IN, LANES, Lanes, Operation
from fsdp_engine.extensions.different_modules import gather_rounds
from fsdp_engine.extensions.different_modules.gather_rounds import GatherRounds
from fsdp_engine.planner.simulation.clock import Clock, Moment, SimulatedLane, SimulatedTicket

# Operations that a host issues to send a message (a pinned copy, its move, the all-reduce, an
# event), and to read its answer.
CALLS_OF_SENDING, CALLS_OF_READING = 4, 2


class Node:
    """An operation of one rank. :func:`resolve` sets its end.

    Attributes:
        begin_after: The host's time when the operation was issued.
        after: Nodes that it waits for.
        seconds: Its duration.
        end_after: The host's time when all of it was issued.
        peers: The same collective on all of its ranks; None: it is no collective.
        end: The time at which it ends; None: not resolved.
        awaited: For compute: further nodes that it waits for, each with the phase of the wait.
        clock, lane: The clock and the name of the lane that run it.
    """

    __slots__ = (
        "after",
        "awaited",
        "begin_after",
        "clock",
        "end",
        "end_after",
        "lane",
        "peers",
        "seconds",
    )
    done = False  # the host cannot query it

    def __init__(
        self,
        clock: DeviceClock,
        lane: str,
        begin_after: float,
        after: Sequence[Node],
        seconds: float = 0.0,
    ) -> None:
        self.clock = clock
        self.lane = lane
        self.begin_after = self.end_after = begin_after
        self.after = after
        self.seconds = seconds
        self.peers: list[Node] | None = None
        self.end: float | None = None
        self.awaited: list[tuple[Node, str]] = []

    @property
    def everything_before(self) -> Iterator[Node]:
        """Nodes that must be resolved before this one."""
        for each in self.peers or (self,):
            yield from each.after
            for awaited, _ in each.awaited:
                yield awaited

    @property
    def known_end(self) -> float:
        """The end of a resolved node."""
        assert self.end is not None
        return self.end

    @property
    def ready(self) -> float:
        """The time at which the nodes in ``after`` have ended."""
        return max((each.known_end for each in self.after), default=0.0)

    def start(self) -> float:
        """The earliest time at which this rank can begin the operation."""
        awaited = [each.known_end for each, _ in self.awaited]
        return max(self.begin_after, self.ready, *awaited)


def resolve(nodes: Sequence[Node]) -> None:
    """Determine the ends of ``nodes``, and the times for which compute waits."""
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if node.end is not None:
                stack.pop()
                continue
            missing = [each for each in node.everything_before if each.end is None]
            if missing:
                stack += missing
                assert len(stack) < 10_000_000, "operations of ranks wait for each other"
                continue
            peers = node.peers or [node]
            start = max(each.start() for each in peers)
            for each in peers:
                each.end = max(start + each.seconds, each.end_after) if each.seconds else start
                if each.awaited:
                    each.clock.exposed(each)
            stack.pop()
    for node in nodes:
        node.after, node.awaited, node.peers = (), [], None


@dataclass
class StepCosts:
    """Costs of one step on one rank.

    Attributes:
        exposed: Seconds for which compute waits, by (lane, phase).
        compute: Seconds of compute.
        num_gathers: Number of gathers that communicate.
        num_rounds: Number of messages in which ranks exchange the units that they need next.
    """

    exposed: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    compute: float = 0.0
    num_gathers: int = 0
    num_rounds: int = 0

    def exposed_by(self, kind: str) -> float:
        """Seconds that compute waits for lanes of ``kind``, "gather" or "reduce"."""
        return sum(
            seconds
            for (lane, _), seconds in self.exposed.items()
            if ("reduce" in lane) == (kind == "reduce")
        )


@dataclass
class _Message:
    """A host message in flight.

    Attributes:
        content: The elementwise maximum of the contents that ranks have sent.
        num_sent: Number of ranks that have sent.
        sent: The time at which the last of them sent.
    """

    content: bytes = b""
    num_sent: int = 0
    sent: float = 0.0


class Team:
    """All ranks. One thread runs at a time, the others wait for a message or at a barrier.

    Args:
        sizes: Sizes of the mesh.
        machine: The machine of all ranks.
        latency: Seconds of a host message.

    Attributes:
        holds_back: Whether rounds delay the gather of a unit until other ranks that will need it
            soon need it too, as in the engine.
    """

    def __init__(self, sizes: Sequence[int], machine: fe.Machine, latency: float) -> None:
        self.sizes = tuple(sizes)
        self.machine = machine
        self.latency = latency
        self.num_ranks = math.prod(sizes)
        self.running = threading.Condition()
        # The items that ranks have passed to join(), by lane, group and number.
        self.collectives: dict[tuple[str, int, int], list[Any]] = {}
        self.messages: dict[int, _Message] = {}
        self.holds_back = True
        self.error: BaseException | None = None
        self._num_waiting = self._generation = 0

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Let other ranks run until ``is_true``."""
        self.running.notify_all()
        self.running.wait_for(lambda: self.error is not None or is_true())
        if self.error is not None:
            raise RuntimeError("another rank has failed") from self.error

    def barrier(self, action: Callable[[], None]) -> None:
        """Wait for all ranks; the last one runs ``action``."""
        generation = self._generation
        self._num_waiting += 1
        if self._num_waiting == self.num_ranks:
            action()
            self._num_waiting = 0
            self._generation += 1
        self.wait_until(lambda: self._generation > generation)

    def join(self, rank: int, lane: str, number: int, item: Any) -> list[Any]:
        """Add ``item`` for a rank's collective ``number`` on ``lane``. Returns the items of all
        ranks of its group that have issued this collective."""
        inner = self.sizes[-1]
        group = rank // inner if lane.startswith("inner") else rank % inner
        found = self.collectives.setdefault((lane, group, number), [])
        found.append(item)
        return found

    def group_size(self, lane: str) -> int:
        """The number of ranks of a collective on ``lane``."""
        return self.sizes[-1] if lane.startswith("inner") else self.num_ranks // self.sizes[-1]

    def end_step(self) -> None:
        """Clear messages and collectives, of which none is in flight."""
        self.messages.clear()
        self.collectives.clear()


class DeviceLane:
    """A lane that records its operations; see :class:`~fsdp_engine.comm.lanes.Lane`."""

    runs_ahead = True
    meters = ()

    def __init__(self, clock: DeviceClock, name: str) -> None:
        self.name = name
        self.last = Node(clock, name, 0.0, ())
        self.last.end = 0.0
        self._clock = clock

    def submit(
        self, label: str, operation: Operation, *, after: Sequence[Any] = (), **_: Any
    ) -> Node:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        self._clock.call()
        return self._clock.run(self, operation, after)

    def record(self) -> Node:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        after = [self.last]
        if self.name == COMPUTE:
            after += [each for each, _ in self._clock.awaited]
        return self._clock.note(Node(self._clock, self.name, self._clock.host, after))

    def wait(self, *tickets: Node) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        if self.name == COMPUTE:
            self._clock.awaited += [(each, self._clock.phase) for each in tickets]
        else:
            self.last = self._clock.note(Node(self._clock, self.name, 0.0, [self.last, *tickets]))

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        action()

    def drain(self) -> list[Exception]:
        """See :class:`~fsdp_engine.comm.lanes.Lane`."""
        return []


class _Messages:
    """Host messages of one rank.

    Attributes:
        team, rank: All ranks, and the number of this one.
        host: The host's time.
        costs: Costs of this step.
    """

    def __init__(self, team: Team, rank: int) -> None:
        self.team = team
        self.rank = rank
        self.host = 0.0
        self.costs = StepCosts()
        self._num_messages = 0

    def start_message(self, content: bytes) -> _Message:
        """Send a host message."""
        self.host += CALLS_OF_SENDING * self.team.machine.host_seconds
        message = self.team.messages.setdefault(self._num_messages, _Message(bytes(len(content))))
        self._num_messages += 1
        message.content = bytes(map(max, message.content, content))
        message.num_sent += 1
        message.sent = max(message.sent, self.host)
        return message

    def finish_message(self, message: _Message) -> None:
        """Wait until all ranks have sent it."""
        self.team.wait_until(lambda: message.num_sent == self.team.num_ranks)
        self.host = max(self.host, message.sent + self.team.latency)
        self.host += CALLS_OF_READING * self.team.machine.host_seconds


class DeviceClock(_Messages):
    """The clock of one rank on a machine whose host runs ahead: the host's time, and the operations
    that it issues. See [Note: Two clocks] in ``simulation/clock.py``."""

    def __init__(self, team: Team, rank: int) -> None:
        super().__init__(team, rank)
        self.machine = team.machine
        self.phase = "build"
        self.lanes = {name: DeviceLane(self, name) for name in (*LANES, COPY_IN)}
        self.awaited: list[tuple[Node, str]] = []
        self.nodes: list[Node] = []
        self.model_flops = self.seconds_at_peak = 0.0  # counted by operations, and not read
        self._num_collectives: Counter[str] = Counter()
        self._at_work: DeviceLane | None = None
        self._sending = self._computed = 0.0
        self._last: Node | None = None

    def make_lanes(self, device: torch.device) -> Lanes:
        """Returns the lanes of an engine."""
        return Lanes(*self.lanes.values())  # type: ignore[arg-type]

    def note(self, node: Node) -> Node:
        """Keep ``node`` to be resolved."""
        self.nodes.append(node)
        return node

    # The methods of ``simulation.clock.Clock`` that ``Operations`` calls.

    @property
    def lane_at_work(self) -> str | None:
        """The lane whose operation runs; None: compute."""
        return None if self._at_work is None else self._at_work.name

    def call(self, count: int = 1) -> None:
        """Add the host's time to issue ``count`` operations."""
        self.host += count * self.machine.host_seconds

    def compute(self, label: str, seconds: float) -> None:
        """Record an operation that takes ``seconds``."""
        self.call()
        if self._at_work is not None:
            self._computed += seconds
            return
        lane = self.lanes[COMPUTE]
        node = self.note(Node(self, COMPUTE, self.host, [lane.last], seconds))
        node.awaited, self.awaited = self.awaited, []
        lane.last = node
        self.costs.compute += seconds

    def send(self, num_bytes: float, seconds: float, of_compute: float = 0.0) -> None:
        """Record communication that takes ``seconds``."""
        self.call()
        if self._at_work is not None:
            self._sending += seconds

    # The methods that lanes and ``Team`` call.

    def run(self, lane: DeviceLane, operation: Operation, after: Sequence[Node]) -> Node:
        """Issue an operation on ``lane``."""
        node = self.note(Node(self, lane.name, self.host, [lane.last, *after]))
        self._at_work, self._sending, self._computed = lane, 0.0, 0.0
        for works in operation():
            for work in works:
                work.wait()
        self._at_work = None
        node.seconds = self._sending + self._computed
        node.end_after = self.host
        if self._sending:
            self.costs.num_gathers += int("gather" in lane.name)
            number = self._num_collectives[lane.name]
            self._num_collectives[lane.name] += 1
            node.peers = self.team.join(self.rank, lane.name, number, node)
        lane.last = node
        return node

    def end_step(self) -> None:
        """Record the end of a step, of which the host has issued all operations."""
        self._last = self.note(Node(self, COMPUTE, self.host, [self.lanes[COMPUTE].last]))
        self._last.awaited, self.awaited = self.awaited, []
        self.lanes[COMPUTE].last = self._last

    def step_end(self, *, host_waits: bool) -> float:
        """Returns the time at which this rank's step ends. All ranks have issued the step.

        Args:
            host_waits: Whether the host waits for the end of the step.
        """
        resolve(self.nodes)
        self.nodes = []
        assert self._last is not None
        if host_waits:
            self.host = max(self.host, self._last.known_end)
        return self._last.known_end

    def exposed(self, node: Node) -> None:
        """Record the time for which a resolved operation of compute waited for other lanes."""
        ready = max(node.begin_after, node.ready)
        last, phase = max(node.awaited, key=lambda each: each[0].known_end)
        if last.known_end > ready and last.lane != COMPUTE:
            self.costs.exposed[last.lane, phase] += last.known_end - ready


class HostClock(_Messages, Clock):
    """The clock of one rank that computes on the host. See [Note: Two clocks] in
    ``simulation/clock.py``."""

    def __init__(self, team: Team, rank: int) -> None:
        Clock.__init__(self, team.machine)
        _Messages.__init__(self, team, rank)
        self._num_collectives: Counter[str] = Counter()
        self._has_sent = False
        # By a moment's id: the moment, the starts of its collective on all ranks, and on this rank.
        self._begun: dict[int, tuple[Moment, list[float], float]] = {}

    def send(self, num_bytes: float, seconds: float, of_compute: float = 0.0) -> None:
        """See :class:`Clock`."""
        super().send(num_bytes, seconds, of_compute)
        self._has_sent = True

    def compute(self, label: str, seconds: float) -> None:
        """See :class:`Clock`."""
        super().compute(label, seconds)
        if self.lane_at_work is None:
            self.costs.compute += seconds

    def run(
        self, lane: SimulatedLane, label: str, operation: Operation, after: Sequence[Any]
    ) -> Moment:
        """See :class:`Clock`."""
        self._has_sent = False
        moment = super().run(lane, label, operation, after)
        if self._has_sent:
            self.costs.num_gathers += int("gather" in lane.name)
            number = self._num_collectives[lane.name]
            self._num_collectives[lane.name] += 1
            start = self.spans[-1].start
            starts = self.team.join(self.rank, lane.name, number, start)
            self._begun[id(moment)] = (moment, starts, start)
        return moment

    def block(self, ticket: SimulatedTicket) -> None:
        """See :class:`Clock`. The last rank to begin a collective delays its end on all."""
        ticket.begin_in_turn()
        moment, starts, start = self._begun.pop(id(ticket.moment), (None, [], 0.0))
        if moment is not None:
            lane = self.lanes[moment.lane]
            size = self.team.group_size(moment.lane)
            self.team.wait_until(lambda: len(starts) == size)
            ticket.moment = replace(moment, known=moment.time + max(starts) - start)
            lane.free = max(lane.free, ticket.moment.time)
        super().block(ticket)

    def finish_message(self, message: _Message) -> None:
        """See :class:`_Messages`."""
        super().finish_message(message)
        self.lanes[COMPUTE].free = self.host

    def end_step(self) -> None:
        """Add the exposed times of a step to its costs."""
        for each in self.exposed:
            self.costs.exposed[each.lane, each.phase] += each.seconds
        self.spans.clear()
        self.exposed.clear()

    def step_end(self, *, host_waits: bool) -> float:
        """Returns the time at which this rank's step ends. All ranks have done the step."""
        return self.finish()


RankClock = DeviceClock | HostClock


def clock_of(team: Team, rank: int) -> RankClock:
    """The clock of one rank."""
    return (DeviceClock if team.machine.host_runs_ahead else HostClock)(team, rank)


_RANK = threading.local()


def set_rank(clock: RankClock) -> None:
    """Set the clock of the rank that runs on this thread."""
    _RANK.clock = clock


class _Content:
    """A host message that replaces a tensor and its all-reduce."""

    def __init__(self, content: bytearray) -> None:
        self.clock: RankClock = _RANK.clock
        self.message: _Message | None = None
        self._content = bytes(content)

    def start(self) -> _Content:
        """Start the all-reduce."""
        self.message = self.clock.start_message(self._content)
        return self

    def wait(self) -> None:
        """Wait for the all-reduce."""
        assert self.message is not None
        self.clock.finish_message(self.message)

    def tolist(self) -> list[int]:
        """Returns the result of the all-reduce."""
        assert self.message is not None
        return list(self.message.content)


class _OneEngine(dict[Any, int]):
    """Replaces the number of ``GatherRounds`` per group, which would count those of all ranks here,
    since the ranks share a process."""

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns ``default``, so that the ``GatherRounds`` of all ranks have the same number."""
        return default


@contextmanager
def messages_between_threads() -> Iterator[None]:
    """Context in which host messages are exchanged between the threads of this process."""

    def send(content: _Content, group: object, op: str) -> _Content:
        assert op == "max"
        return content.start()

    def bytes_to(content: bytearray, device: torch.device) -> _Content:
        return _Content(content)

    vote = GatherRounds._send

    def counted(rounds: GatherRounds, *args: Any, **kwargs: Any) -> None:
        clock: RankClock = _RANK.clock
        clock.costs.num_rounds += 1
        if not clock.team.holds_back:
            rounds._expected.clear()
        vote(rounds, *args, **kwargs)

    with (
        mock.patch.object(host_message, "bytes_to", bytes_to),
        mock.patch.object(host_message, "start_all_reduce", send),
        mock.patch.object(collectives, "bytes_to", bytes_to),
        mock.patch.object(collectives, "start_all_reduce", send),
        mock.patch.object(gather_rounds, "_NUM_MADE", _OneEngine()),
        mock.patch.object(GatherRounds, "_send", counted),
    ):
        yield
