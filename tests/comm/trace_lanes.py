"""Lanes that prove the schedule: a race detector for the engine, on a CPU.

:class:`Tracer` puts its own lanes into the engine and watches every tensor operation of the thread:
those of the model, of autograd and of the optimizer on the compute lane, those of the engine's
operations on their lanes. Operations run at once, so values are always right. The tracer checks
whether the schedule alone would have forced an order, on streams as on CUDA and with asynchronous
works as on CPU: see [Note: Happens-before] in ``happens_before.py``.

Operations declare what they read and write. An undeclared access is an error, and all declared
accesses are checked for races, even if this machine does not make them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_engine.comm.lanes import Lanes, Operation
from fsdp_engine.memory.allocator import TransientStorage
from fsdp_engine.units import build
from tests.comm.happens_before import COMPUTE, LANES, Clock, Order, Span

# Operations write one storage, and readers use another one; the same memory moves between the two
# ([Note: Unread memory] in ``allocator.py``). The written storage, by the key of the read one.
_WRITTEN: dict[int, UntypedStorage] = {}

# (waiter, awaited) -> whether to leave the wait out. Both are labels of operations, or names of
# lanes outside of operations.
Forgets = Callable[[str, str], bool]


class AnnotationError(AssertionError):
    """An operation touched what it did not name."""


@dataclass(frozen=True)
class TraceTicket:
    """A moment: a clock for each order."""

    label: str
    clocks: tuple[Clock, ...]
    done: bool = False


class TraceLane:
    """One lane of a :class:`Tracer`; see ``fsdp_engine.comm.lanes.Lane``."""

    runs_ahead = True  # as on CUDA
    meters = ()

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._submitted: list[TraceTicket] = []

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
        tracer.sweep()
        tracer.num_operations[self._name] += 1
        waits = [ticket for ticket in after if not tracer.forgets(label, ticket.label)]
        threads = tuple(
            order.begin(self._name, [ticket.clocks[place] for ticket in waits])
            for place, order in enumerate(tracer.orders)
        )
        with tracer.doing(_Doing(label, threads, named=_named(reads, writes))):
            tracer.note_access(reads, writes)
            for works in operation():
                for work in works:
                    work.wait()
        tracer.sweep()
        clocks = (o.end(thread) for o, thread in zip(tracer.orders, threads, strict=True))
        ticket = TraceTicket(label, tuple(clocks))
        self._submitted.append(ticket)
        return ticket

    def record(self) -> TraceTicket:
        self._tracer.sweep()
        clocks = (order.record(self._name) for order in self._tracer.orders)
        return TraceTicket(self._name, tuple(clocks))

    def wait(self, *tickets: Any) -> None:
        self._tracer.sweep()
        for ticket in tickets:
            if not self._tracer.forgets(self._name, ticket.label):
                for order, clock in zip(self._tracer.orders, ticket.clocks, strict=True):
                    order.wait(self._name, clock)

    def access(self, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        with self._tracer.doing(_Doing("what the engine announces", self._threads)):
            self._tracer.note_access(reads, writes)

    def manage(self, label: str, action: Callable[[], None], storage: Any) -> None:
        self._tracer.sweep()
        with self._tracer.doing(_Doing(label, self._threads, managed=storage)):
            action()

    def drain(self) -> list[RuntimeError]:
        self._tracer.sweep()
        for ticket in self._submitted:  # the host has waited for all submitted operations
            for order, clock in zip(self._tracer.orders, ticket.clocks, strict=True):
                order.wait(COMPUTE, clock)
        self._submitted.clear()
        return []

    @property
    def _threads(self) -> tuple[str, ...]:
        return tuple(order.thread_of(self._name) for order in self._tracer.orders)


@dataclass
class _Doing:
    """The operation that the host executes now.

    Attributes:
        threads: the threads of the operation, one for each order.
        named: (storage, start, stop, may write) that an operation named; None: it may do anything.
        born: storages created by the operation, which need no declaration.
        managed: the only storage that may get or lose memory; None: any.
    """

    label: str
    threads: tuple[str, ...]
    named: list[tuple[int, int, int, bool]] | None = None
    born: set[int] = field(default_factory=set)
    managed: TransientStorage | None = None


class Tracer(TorchDispatchMode):
    """Gives engines within the context lanes that check their schedule. See the module docstring.

    Args:
        forgets: waits to leave out, in tests of the detector.

    Attributes:
        orders: the two orders that accesses are checked in: streams, host.
        num_operations: number of operations, by lane.
        max_full: most storages of role "full" that had memory at one time.
    """

    def __init__(self, forgets: Forgets = lambda waiter, awaited: False) -> None:
        super().__init__()
        self.forgets = forgets
        self.orders = (Order(True, self._name_of), Order(False, self._name_of))
        self.num_operations: Counter[str] = Counter()
        self.max_full = 0
        self._full: set[int] = set()
        self._names: dict[int, str] = {}
        self._engines: list[Any] = []
        self._stack = [_Doing("model", (COMPUTE, COMPUTE))]
        self._undo: list[Callable[[], None]] = []

    def watch(self, engine: Any) -> None:
        """Call the buffers of ``engine`` by name in errors."""
        self._engines.append(engine)

    def lanes(self) -> Lanes:
        """Lanes for one engine."""
        return Lanes(*(TraceLane(self, name) for name in LANES))

    @contextmanager
    def doing(self, doing: _Doing) -> Iterator[None]:
        """Attribute accesses within the block to ``doing``."""
        self._stack.append(doing)
        try:
            yield
        finally:
            self._stack.pop()

    def sweep(self) -> None:
        """Forget storages that Python has dropped; raise if one was dropped too early."""
        for order in self.orders:
            order.sweep()

    def note_access(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Record accesses of the current operation."""
        for tensors, write in ((reads, False), (writes, True)):
            for span in _spans(tensors):
                self._note_access(span, write, self._stack[-1].label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        doing = self._stack[-1]
        label = f"{doing.label}: {func}" if len(self._stack) == 1 else doing.label
        for value, kind in _accessed(func, args, kwargs):
            for span in _spans(tree_leaves(value)):
                if kind == "view":
                    self._check_there(span, label)
                else:
                    self._check_named(doing, span, kind == "write")
                    self._note_access(span, kind == "write", label)
        result = func(*args, **kwargs)
        for span in _spans(tree_leaves(result), empty_too=True):
            if span.key not in self.orders[0].memories:
                doing.born.add(span.key)
                for order, thread in zip(self.orders, doing.threads, strict=True):
                    if span.stop > span.start:  # an empty storage has no memory
                        order.allocate(thread, span, label)
        return result

    def _note_access(self, span: Span, write: bool, label: str) -> None:
        for order, thread in zip(self.orders, self._stack[-1].threads, strict=True):
            order.note_access(thread, span, write, label)

    def _check_there(self, span: Span, label: str) -> None:
        for order, thread in zip(self.orders, self._stack[-1].threads, strict=True):
            order.look(thread, span, label)

    def _check_named(self, doing: _Doing, span: Span, write: bool) -> None:
        if doing.named is None or span.key in doing.born:
            return
        if not any(
            key == span.key and start <= span.start and span.stop <= stop and may_write >= write
            for key, start, stop, may_write in doing.named
        ):
            raise AnnotationError(
                f"[{doing.label}] {'writes' if write else 'reads'} bytes {span.start}.."
                f"{span.stop} of the {self._name_of(span.key)}; the operation does not declare it"
            )

    def _filled(self, transient: TransientStorage) -> None:
        doing, storage = self._managing(transient), transient._written
        _WRITTEN[transient.key] = storage
        self._names[storage._cdata] = f"memory of [{doing.label}]"
        for order, thread in zip(self.orders, doing.threads, strict=True):
            order.allocate(thread, Span(storage, 0, transient.num_bytes), doing.label)
            for span in _planned(transient):
                order.note_access(thread, span, True, doing.label)
        if transient._role == "full":
            self._full.add(id(transient))
            self.max_full = max(self.max_full, len(self._full))

    def _drains(self, transient: TransientStorage) -> None:
        doing, storage = self._managing(transient), transient._written
        for order, thread in zip(self.orders, doing.threads, strict=True):
            order.free(thread, Span(storage, 0, transient.num_bytes), doing.label)
            for span in _planned(transient):
                order.note_access(thread, span, True, doing.label)
        self._full.discard(id(transient))

    def _managing(self, transient: TransientStorage) -> _Doing:
        doing = self._stack[-1]
        if doing.managed is not None and doing.managed is not transient:
            raise AnnotationError(f"[{doing.label}] allocates or frees an undeclared storage")
        return doing

    def _name_of(self, key: int) -> str:
        for engine in self._engines:
            for buffer in engine.buffers:
                grads = buffer.grads.optim_grads if buffer.grads is not None else None
                kinds: dict[str, Sequence[Tensor]] = {
                    "main weights": [buffer.weights.main.tensor],
                    "full parameters": buffer.weights.params,
                    "gradients": [] if grads is None else [grads],
                }
                for kind, tensors in kinds.items():
                    if any(span.key == key for span in _spans(tensors, empty_too=True)):
                        return f"{kind} of {buffer.label}"
        return self._names.get(key, "tensor of no buffer")

    def __enter__(self) -> Tracer:
        make = build.make_lanes
        fill, free = TransientStorage.fill, TransientStorage.free
        traced_fill, traced_free = self._traced(fill, free)
        TransientStorage.fill = traced_fill  # type: ignore[method-assign]
        TransientStorage.free = traced_free  # type: ignore[method-assign]
        build.make_lanes = lambda device, ranks=(): self.lanes()

        def undo() -> None:
            TransientStorage.fill = fill  # type: ignore[method-assign]
            TransientStorage.free = free  # type: ignore[method-assign]
            build.make_lanes = make
            _WRITTEN.clear()

        self._undo.append(undo)
        super().__enter__()
        return self

    def _traced(self, fill: Any, free: Any) -> tuple[Any, Any]:
        def traced_fill(transient: TransientStorage) -> None:
            was_filled = transient.filled
            fill(transient)
            if not was_filled:
                self._filled(transient)

        def traced_free(transient: TransientStorage) -> None:
            if transient.filled:
                self._drains(transient)
            free(transient)

        return traced_fill, traced_free

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._undo.pop()()


def _planned(transient: TransientStorage) -> list[Span]:
    """The bytes of an arena behind a transient storage. The next storage there must wait until this
    one is freed. Empty without arenas."""
    arena = getattr(transient._memory, "arenas", {}).get(transient._role)
    memory = None if arena is None else arena.memory
    if memory is None:
        return []
    offset = transient._storage.data_ptr() - memory.data_ptr()
    if not 0 <= offset < memory.numel():
        return []
    return [Span(memory.untyped_storage(), offset, offset + transient.num_bytes)]


def _named(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[tuple[int, int, int, bool]]:
    return [
        (span.key, span.start, span.stop, may_write)
        for tensors, may_write in ((reads, False), (writes, True))
        for span in _spans(tensors)
    ]


def _spans(values: Sequence[Any], empty_too: bool = False) -> Iterator[Span]:
    """The bytes from the first to the last element of each tensor among ``values``."""
    for value in values:
        if not isinstance(value, Tensor):
            continue
        tensor = getattr(value, "_local_tensor", value)
        storage = tensor.untyped_storage()
        storage = _WRITTEN.get(storage._cdata, storage)
        if tensor.numel():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.storage_offset() * tensor.itemsize
            yield Span(storage, start, start + (reach + 1) * tensor.itemsize)
        elif empty_too:
            yield Span(storage, 0, 0)


def _accessed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """(argument, "read", "write" or "view") for each argument whose elements ``func`` needs."""
    for place, name, kind in _accessed_arguments(func):
        if place < len(args):
            yield args[place], kind
        elif name in kwargs:
            yield kwargs[name], kind


# These look at shapes or storages only.
_SHAPE_ONLY = re.compile(r"aten::(new_.*|.*_like|set_|detach|alias)$")


@functools.cache
def _accessed_arguments(func: Any) -> tuple[tuple[int, str, str], ...]:
    """(position, name, kind)."""
    schema = func._schema
    if _SHAPE_ONLY.match(schema.name):
        return ()
    found = []
    for place, argument in enumerate(schema.arguments):
        alias, kind = argument.alias_info, "read"
        if schema.name.startswith("c10d::"):
            # Schemas of c10d do not mark the written arguments.
            in_place = argument.name == "tensors" and schema.name.endswith("_")
            if in_place or argument.name.startswith("output"):
                kind = "write"
        elif alias is not None:
            kind = "write" if alias.is_write else "view"
        found.append((place, argument.name, kind))
    return tuple(found)
