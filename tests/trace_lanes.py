"""Lanes that prove the schedule: a race detector for the engine, on a CPU.

:class:`Tracer` puts its own lanes into the engine and watches every tensor operation of the thread:
those of the model, of autograd and of the optimizer on the compute lane, those of the engine's
operations on their lanes. Operations run at once, so values are right whatever the schedule; what
is checked is whether the schedule alone would have forced an order.

[Note: Happens-before]
Each thread of execution has a clock: for every thread, up to which of its moments this one is known
to come later. A ticket carries the clock of the moment it was made; waiting for it takes the larger
of both, entry by entry. Two accesses conflict when they overlap in one storage and one of them
writes; allocating and freeing write all of it. A conflict is a race unless the later one's clock
covers the earlier one's moment. Worked example: compute writes ``x`` at its moment 3; lane ``g`` is
at {g: 7} and reads ``x``: a race. Had it waited for a ticket of {compute: 3}: none.

The same run is judged by two orders:

- *streams*, as on CUDA: each lane is a thread. Memory must be freed on the lane that allocated it,
  since the caching allocator hands it on in that stream's order; a tensor that Python drops is
  freed in the order of the stream on which it was made, at that moment.
- *host*, as on CPU: compute is the host's own thread, and every operation a thread that starts
  where it was submitted and ends where somebody waits for its ticket. Nothing orders two
  operations of one lane but a ticket.

Operations name what they read and write. They are held to it: what they were seen to touch must be
among it, and what they named is checked for races even where this machine took another path.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_engine import lanes as lanes_module
from fsdp_engine.lanes import Lanes, Operation
from fsdp_engine.memory import TransientStorage

COMPUTE = "compute"
LANES = (COMPUTE, "inner_gather", "inner_reduce", "outer_gather", "outer_reduce")

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two conflicting accesses that nothing orders, or memory used when it is not there."""


class AnnotationError(AssertionError):
    """An operation touched what it did not name."""


class Span(NamedTuple):
    """Bytes ``start..stop`` of one storage."""

    storage: torch.UntypedStorage
    start: int
    stop: int

    @property
    def key(self) -> int:
        return int(self.storage._cdata)


class Access(NamedTuple):
    """One access: what, where, by whom, at which moment of its thread."""

    kind: str
    thread: str
    moment: int
    label: str
    start: int
    stop: int

    @property
    def writes(self) -> bool:
        return self.kind != "read"

    def __str__(self) -> str:
        return f"{self.kind} of bytes {self.start}..{self.stop} on {self.thread}, in [{self.label}]"


@dataclass
class Memory:
    """What is known of one storage.

    Attributes:
        home: the thread in whose order it was allocated.
        freed: its last free, while it has no memory.
        accesses: the last access of each thread to each range. Earlier ones come before it.
    """

    reference: StorageWeakRef
    home: str
    freed: Access | None = None
    accesses: dict[tuple[str, bool, int, int], Access] = field(default_factory=dict)


class Order:
    """Clocks and accesses under one idea of what runs beside what: see [Note: Happens-before]."""

    def __init__(self, streams: bool, name_of: Callable[[int], str]) -> None:
        self.streams = streams
        self.title = "streams" if streams else "host"
        self.memories: dict[int, Memory] = {}
        self.num_checks = 0
        self._name_of = name_of
        self._clocks: dict[str, Clock] = {lane: {lane: 1} for lane in LANES}
        self._num_operations = 0

    def thread_of(self, lane: str) -> str:
        """Which thread does what is called on ``lane`` outside operations."""
        return lane if self.streams else COMPUTE

    def begin(self, lane: str, after: Sequence[Clock]) -> str:
        """An operation is submitted: the thread it runs on."""
        if self.streams:
            thread = lane
        else:
            self._num_operations += 1
            thread = f"{lane} #{self._num_operations}"
            self._clocks[thread] = {**self.record(COMPUTE), thread: 1}
        for clock in after:
            self._join(thread, clock)
        return thread

    def record(self, lane: str) -> Clock:
        """The clock of this moment; what follows on the thread is later than it."""
        thread = lane if lane in self._clocks and lane not in LANES else self.thread_of(lane)
        clock = self._clocks[thread]
        taken = dict(clock)
        clock[thread] += 1
        return taken

    def wait(self, lane: str, clock: Clock) -> None:
        """What follows on ``lane`` is later than ``clock``."""
        self._join(self.thread_of(lane), clock)

    def _join(self, thread: str, other: Clock) -> None:
        clock = self._clocks[thread]
        for each, moment in other.items():
            if clock.get(each, 0) < moment:
                clock[each] = moment

    def touch(self, thread: str, span: Span, write: bool, label: str) -> None:
        """A read or a write."""
        memory = self.memory(span, COMPUTE)
        moment = self._clocks[thread][thread]
        access = Access("write" if write else "read", thread, moment, label, span.start, span.stop)
        self._check(span.key, memory, access)
        memory.accesses[thread, write, span.start, span.stop] = access

    def allocate(self, thread: str, storage: torch.UntypedStorage, size: int, label: str) -> None:
        """New memory appears behind ``storage``: whoever uses it must come after this.

        It is not the memory that was there before, so it need not come after that one's free.
        """
        span = Span(storage, 0, size)
        known = span.key in self.memories
        memory = self.memory(span, thread)
        access = Access("allocation", thread, self._clocks[thread][thread], label, 0, size)
        if known and memory.freed is None:
            self._fail(span.key, "memory is allocated that is there already", memory, access)
        memory.freed, memory.home = None, thread
        memory.accesses = {(thread, True, 0, size): access}

    def free(self, thread: str, span: Span, label: str) -> None:
        """The memory behind a storage is handed back."""
        memory = self.memory(span, thread)
        access = Access("free", thread, self._clocks[thread][thread], label, 0, span.stop)
        if self.streams and memory.home != thread:
            why = f"memory is freed on {thread} that was allocated on {memory.home}"
            self._fail(span.key, why, memory, access)
        self._check(span.key, memory, access)
        memory.accesses = {(thread, True, 0, span.stop): access}
        memory.freed = access

    def memory(self, span: Span, home: str) -> Memory:
        """What is known of a storage; ``home`` is where it was allocated if nothing is."""
        found = self.memories.get(span.key)
        if found is None:
            found = self.memories[span.key] = Memory(StorageWeakRef(span.storage), home)
        return found

    def sweep(self) -> None:
        """What Python has dropped since was freed in the order of its home, and is forgotten."""
        for key in [k for k, m in self.memories.items() if m.reference.expired()]:
            memory = self.memories[key]
            if self.streams and memory.freed is None and memory.accesses:
                moment = self._clocks[memory.home][memory.home]
                stop = max(access.stop for access in memory.accesses.values())
                label = "its last reference went"
                self._check(key, memory, Access("free", memory.home, moment, label, 0, stop))
            del self.memories[key]

    def _check(self, key: int, memory: Memory, access: Access) -> None:
        if memory.freed is not None:
            self._fail(key, "memory is used after it was freed", memory, access)
        known = self._clocks[access.thread]
        for earlier in memory.accesses.values():
            if (earlier.writes or access.writes) and (
                earlier.start < access.stop and access.start < earlier.stop
            ):
                self.num_checks += 1
                if known.get(earlier.thread, 0) < earlier.moment:
                    raise RaceError(
                        f"race ({self.title}) over {self._name_of(key)}:\n"
                        f"  first   {earlier}\n  second  {access}\n"
                        "and nothing makes the second come after the first"
                    )

    def _fail(self, key: int, why: str, memory: Memory, access: Access) -> None:
        earlier = memory.freed or next(reversed(memory.accesses.values()), None)
        raise RaceError(
            f"{why} ({self.title}): {self._name_of(key)}:\n  first   {earlier}\n  second  {access}"
        )


@dataclass(frozen=True)
class TraceTicket:
    """A moment: a clock for each order."""

    label: str
    clocks: tuple[Clock, ...]
    done: bool = False


# (who would wait, for what) -> whether to forget to. Both are labels of operations, or names of
# lanes where no operation is meant.
Forgets = Callable[[str, str], bool]


class TraceLane:
    """One lane of a :class:`Tracer`; see ``fsdp_engine.lanes.Lane``."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name

    def submit(
        self,
        label: str,
        operation: Operation,
        *,
        after: Sequence[Any] = (),
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> TraceTicket:
        tracer = self._tracer
        waits = [ticket for ticket in after if not tracer.forgets(label, ticket.label)]
        threads = tracer.begin(self._name, waits)
        with tracer.doing(_Doing(label, threads, _named(reads, writes))):
            tracer.declare(reads, writes)
            for works in operation():
                for work in works:
                    work.wait()
        return TraceTicket(label, tracer.end(threads))

    def record(self) -> TraceTicket:
        self._tracer.sweep()
        return TraceTicket(
            self._name, tuple(order.record(self._name) for order in self._tracer.orders)
        )

    def wait(self, ticket: Any) -> None:
        self._tracer.sweep()
        if not self._tracer.forgets(self._name, ticket.label):
            for order, clock in zip(self._tracer.orders, ticket.clocks, strict=True):
                order.wait(self._name, clock)

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        tracer = self._tracer
        with tracer.doing(_Doing("work announced by the engine", tracer.threads_of(self._name))):
            tracer.declare(reads, writes)

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        tracer = self._tracer
        tracer.sweep()
        with tracer.doing(_Doing(label, tracer.threads_of(self._name), managed=storage)):
            action()

    def drain(self) -> list[RuntimeError]:
        return []


@dataclass
class _Doing:
    """What the host carries out right now.

    Attributes:
        threads: whose work it is, by order.
        named: (storage, start, stop, may write) that an operation named; None: it may do anything.
        born: storages that were made meanwhile, which need no name.
        managed: the only storage that may get or lose memory; None: any.
    """

    label: str
    threads: tuple[str, ...]
    named: list[tuple[int, int, int, bool]] | None = None
    born: set[int] = field(default_factory=set)
    managed: TransientStorage | None = None


class Tracer(TorchDispatchMode):
    """Within it, engines get lanes that prove their schedule. See the module docstring.

    Args:
        forgets: which waits the lanes forget, to see that somebody notices.

    Attributes:
        orders: the two judges.
        max_full: most storages of role "full" that had memory at one time.
    """

    def __init__(self, forgets: Forgets = lambda waiter, awaited: False) -> None:
        super().__init__()
        self.forgets = forgets
        self.orders = (Order(True, self.name_of), Order(False, self.name_of))
        self.max_full = 0
        self._full: set[int] = set()
        self._names: dict[int, str] = {}
        self._engines: list[Any] = []
        self._stack = [_Doing("model", (COMPUTE, COMPUTE))]
        self._undo: list[Callable[[], None]] = []

    # The engine's lanes call these.

    def lanes(self) -> Lanes:
        """Lanes for one engine."""
        return Lanes(*(TraceLane(self, name) for name in LANES))

    def begin(self, lane: str, after: Sequence[TraceTicket]) -> tuple[str, ...]:
        self.sweep()
        return tuple(
            order.begin(lane, [ticket.clocks[place] for ticket in after])
            for place, order in enumerate(self.orders)
        )

    def end(self, threads: Sequence[str]) -> tuple[Clock, ...]:
        self.sweep()
        return tuple(o.record(thread) for o, thread in zip(self.orders, threads, strict=True))

    def threads_of(self, lane: str) -> tuple[str, ...]:
        return tuple(order.thread_of(lane) for order in self.orders)

    def sweep(self) -> None:
        for order in self.orders:
            order.sweep()

    def doing(self, doing: _Doing) -> _Pushed:
        return _Pushed(self._stack, doing)

    def declare(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        for tensors, write in ((reads, False), (writes, True)):
            for span in _spans(tensors):
                self._touch(span, write, self._stack[-1].label)

    # What is watched.

    def watch(self, engine: Any) -> None:
        """Call the buffers of ``engine`` by name in errors."""
        self._engines.append(engine)

    def name_of(self, key: int) -> str:
        """What a storage is, for people."""
        for engine in self._engines:
            for buffer in engine.buffers:
                kinds: dict[str, Sequence[Tensor]] = {
                    "main weights": [buffer.weights.main.tensor],
                    "full parameters": buffer.weights.params,
                    "gradients": [
                        buffer.grads.optim_grads
                        for _ in range(1)
                        if buffer.grads is not None and buffer.grads.optim_grads is not None
                    ],
                }
                for kind, tensors in kinds.items():
                    if any(tensor.untyped_storage()._cdata == key for tensor in tensors):
                        return f"{kind} of {buffer.label}"
        return self._names.get(key, "a tensor of no buffer")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        label = self._stack[-1].label
        if len(self._stack) == 1:
            label = f"{label}: {func}"
        for value, write in _arguments(func, args, kwargs):
            for span in _spans(tree_leaves(value)):
                self._observe(span, write, label)
        result = func(*args, **kwargs)
        doing = self._stack[-1]
        for span in _spans(tree_leaves(result), empty_too=True):
            if span.key not in self.orders[0].memories:
                doing.born.add(span.key)
                for order, thread in zip(self.orders, doing.threads, strict=True):
                    order.memory(span, thread)
                    if span.stop:
                        order.touch(thread, span, True, label)
        return result

    def _observe(self, span: Span, write: bool, label: str) -> None:
        doing = self._stack[-1]
        if doing.named is not None and span.key not in doing.born:
            inside = any(
                key == span.key and start <= span.start and span.stop <= stop and may >= write
                for key, start, stop, may in doing.named
            )
            if not inside:
                raise AnnotationError(
                    f"[{label}] {'writes' if write else 'reads'} bytes {span.start}..{span.stop} "
                    f"of {self.name_of(span.key)} and did not name them when it was submitted"
                )
        self._touch(span, write, label)

    def _touch(self, span: Span, write: bool, label: str) -> None:
        for order, thread in zip(self.orders, self._stack[-1].threads, strict=True):
            order.touch(thread, span, write, label)

    def _filled(self, transient: TransientStorage) -> None:
        doing, storage = self._managing(transient)
        self._names[storage._cdata] = f"memory of [{doing.label}]"
        for order, thread in zip(self.orders, doing.threads, strict=True):
            order.allocate(thread, storage, transient.num_bytes, doing.label)
        if transient._role == "full":
            self._full.add(storage._cdata)
            self.max_full = max(self.max_full, len(self._full))

    def _drains(self, transient: TransientStorage) -> None:
        doing, storage = self._managing(transient)
        for order, thread in zip(self.orders, doing.threads, strict=True):
            order.free(thread, Span(storage, 0, transient.num_bytes), doing.label)
        self._full.discard(storage._cdata)

    def _managing(self, transient: TransientStorage) -> tuple[_Doing, torch.UntypedStorage]:
        doing = self._stack[-1]
        if doing.managed is not None and doing.managed is not transient:
            raise AnnotationError(f"[{doing.label}] allocates or frees another storage than named")
        return doing, transient._storage

    def __enter__(self) -> Tracer:
        fill, drain, make = TransientStorage.fill, TransientStorage.drain, lanes_module.make_lanes

        def traced_fill(transient: TransientStorage) -> None:
            was_filled = transient.filled
            fill(transient)
            if not was_filled:
                self._filled(transient)

        def traced_drain(transient: TransientStorage) -> None:
            if transient.filled:
                self._drains(transient)
            drain(transient)

        TransientStorage.fill, TransientStorage.drain = traced_fill, traced_drain  # type: ignore
        lanes_module.make_lanes = lambda device: self.lanes()

        def undo() -> None:
            TransientStorage.fill, TransientStorage.drain = fill, drain  # type: ignore
            lanes_module.make_lanes = make

        self._undo.append(undo)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._undo.pop()()


class _Pushed:
    def __init__(self, stack: list[_Doing], doing: _Doing) -> None:
        self._stack, self._doing = stack, doing

    def __enter__(self) -> None:
        self._stack.append(self._doing)

    def __exit__(self, *error: object) -> None:
        self._stack.pop()


def _named(
    reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> list[tuple[int, int, int, bool]]:
    return [
        (span.key, span.start, span.stop, write)
        for tensors, write in ((reads, False), (writes, True))
        for span in _spans(tensors)
    ]


def _spans(values: Sequence[Any], empty_too: bool = False) -> Iterator[Span]:
    """The bytes from the first to the last element of each tensor among ``values``."""
    for value in values:
        if not isinstance(value, Tensor):
            continue
        value = getattr(value, "_local_tensor", value)
        storage = value.untyped_storage()
        if value.numel():
            reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            start = value.storage_offset() * value.itemsize
            yield Span(storage, start, start + (reach + 1) * value.itemsize)
        elif empty_too:
            yield Span(storage, 0, 0)


_SHAPE_ONLY = re.compile(r"aten::(new_.*|.*_like|set_)$")


def _arguments(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, bool]]:
    """(argument, whether it is written) for all whose elements ``func`` touches."""
    for place, (name, write) in _touched_arguments(func).items():
        if place < len(args):
            yield args[place], write
        elif name in kwargs:
            yield kwargs[name], write


@functools.cache
def _touched_arguments(func: Any) -> dict[int, tuple[str, bool]]:
    """(name, whether it is written) by position."""
    found: dict[int, tuple[str, bool]] = {}
    schema = func._schema
    if _SHAPE_ONLY.match(schema.name):
        return found
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if schema.name.startswith("c10d::"):
            # Their schemas do not say what is written.
            in_place = schema.name.endswith("_") and argument.name == "tensors"
            found[place] = (argument.name, in_place or argument.name.startswith("output"))
        elif alias is None or alias.is_write:
            found[place] = (argument.name, alias is not None)
    return found
