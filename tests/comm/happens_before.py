"""Checks the order of memory accesses, for ``trace_lanes.py``.

[Note: Happens-before]
Each thread of execution has a clock. For every thread it holds the latest moment that is known to
precede this thread's next operation. A ticket carries the clock of the moment it was made; waiting
for it takes the larger of both, entry by entry. Two accesses conflict when they overlap in one
storage and one of them writes; allocating and freeing write all of it. A conflict is a race unless
the later one's clock covers the earlier one's moment. Worked example: compute writes ``x`` at its
moment 3; lane ``g`` is at {g: 7} and reads ``x``. This is a race, unless it has waited for a ticket
of {compute: 3}.

Every run is judged by two orders:

- *streams*, as on CUDA: each lane is a thread. Memory must be freed on the lane that allocated it,
  since the caching allocator hands it on in that stream's order; a tensor that Python drops is
  freed in the order of the stream on which it was made, at that moment.
- *host*, as on CPU: compute is the host's own thread. Every operation is a thread of its own, which
  starts where it was submitted and ends where its ticket is waited for. Only tickets order two
  operations of one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

COMPUTE = "compute"
LANES = (COMPUTE, "inner_gather", "inner_reduce", "outer_gather", "outer_reduce", "copy_in")

Clock = dict[str, int]


class RaceError(AssertionError):
    """Two conflicting accesses that nothing orders, or memory used when it is not there."""


class Span(NamedTuple):
    """Bytes ``start..stop`` of one storage."""

    storage: torch.UntypedStorage
    start: int
    stop: int

    @property
    def key(self) -> int:
        return int(self.storage._cdata)


class Access(NamedTuple):
    """One access: its kind, thread, moment of the thread, range of bytes, and operation."""

    kind: str
    thread: str
    moment: int
    start: int
    stop: int
    label: str

    @property
    def writes(self) -> bool:
        return self.kind != "read"

    def __str__(self) -> str:
        return f"{self.kind} of bytes {self.start}..{self.stop} on {self.thread}, in [{self.label}]"


@dataclass
class Memory:
    """The state of one storage.

    Attributes:
        reference: prevents reuse of the storage's identity, but does not keep its memory.
        home: the thread in whose order it was allocated.
        freed: its last free, while it has no memory.
        accesses: the last access of each thread to each range; earlier ones come before it.
    """

    reference: StorageWeakRef
    home: str
    freed: Access | None = None
    accesses: dict[tuple[str, bool, int, int], Access] = field(default_factory=dict)


class Order:
    """Clocks and accesses under one of the two orders of [Note: Happens-before].

    Args:
        streams: judge as on CUDA; else as on CPU.
        name_of: what a storage is called, by its key.
    """

    def __init__(self, streams: bool, name_of: Callable[[int], str]) -> None:
        self.streams = streams
        self.title = "streams" if streams else "host"
        self.memories: dict[int, Memory] = {}
        self.num_checks = 0
        self._name_of = name_of
        self._clocks: dict[str, Clock] = {lane: {lane: 1} for lane in LANES}
        self._num_operations = 0

    # Threads.

    def thread_of(self, lane: str) -> str:
        """The thread of calls on ``lane`` outside operations."""
        return lane if self.streams else COMPUTE

    def begin(self, lane: str, after: Sequence[Clock]) -> str:
        """An operation is submitted; returns the thread it runs on."""
        if self.streams:
            thread = lane
        else:
            self._num_operations += 1
            thread = f"{lane} (operation {self._num_operations})"
            self._clocks[thread] = {**self._take(COMPUTE), thread: 1}
        for clock in after:
            self._join(thread, clock)
        return thread

    def end(self, thread: str) -> Clock:
        """The operation is over; returns the clock of its ticket."""
        return self._take(thread)

    def record(self, lane: str) -> Clock:
        """The clock of this moment of ``lane``, which precedes later operations there."""
        return self._take(self.thread_of(lane))

    def wait(self, lane: str, clock: Clock) -> None:
        """Later operations on ``lane`` come after ``clock``."""
        self._join(self.thread_of(lane), clock)

    def _take(self, thread: str) -> Clock:
        clock = self._clocks[thread]
        taken = dict(clock)
        clock[thread] += 1
        return taken

    def _join(self, thread: str, other: Clock) -> None:
        clock = self._clocks[thread]
        for each, moment in other.items():
            if clock.get(each, 0) < moment:
                clock[each] = moment

    # Memory.

    def note_access(self, thread: str, span: Span, write: bool, label: str) -> None:
        """A read or a write."""
        memory = self.memory(span, COMPUTE)
        access = self._access("write" if write else "read", thread, span, label)
        self._check(span.key, memory, access)
        memory.accesses[thread, write, span.start, span.stop] = access

    def look(self, thread: str, span: Span, label: str) -> None:
        """A view is created: the storage must have memory."""
        memory = self.memories.get(span.key)
        if memory is not None and memory.freed is not None:
            access = self._access("view", thread, span, label)
            self._fail("memory is used after it was freed", span.key, memory, access)

    def allocate(self, thread: str, span: Span, label: str) -> None:
        """Memory is allocated for a storage: all its uses must come after this.

        A free of the storage's earlier memory need not come before.
        """
        is_new = span.key not in self.memories
        memory = self.memory(span, thread)
        access = self._access("allocation", thread, span, label)
        if not is_new and memory.freed is None:
            self._fail("memory is allocated where there is some", span.key, memory, access)
        memory.freed, memory.home = None, thread
        memory.accesses = {(thread, True, span.start, span.stop): access}

    def free(self, thread: str, span: Span, label: str) -> None:
        """The memory behind a storage is freed."""
        memory = self.memory(span, thread)
        access = self._access("free", thread, span, label)
        if memory.freed is not None:
            self._fail("memory is freed twice", span.key, memory, access)
        if self.streams and memory.home != thread:
            why = f"memory is freed on {thread} that was allocated on {memory.home}"
            self._fail(why, span.key, memory, access)
        self._check(span.key, memory, access)
        memory.accesses, memory.freed = {}, access

    def memory(self, span: Span, home: str) -> Memory:
        """The state of a storage; a new one gets ``home`` as the place of its allocation."""
        found = self.memories.get(span.key)
        if found is None:
            found = self.memories[span.key] = Memory(StorageWeakRef(span.storage), home)
        return found

    def sweep(self) -> None:
        """Forget storages that Python has dropped. They count as freed, in the order of their
        home."""
        for key in [key for key, m in self.memories.items() if m.reference.expired()]:
            memory = self.memories[key]
            # On CPU a storage keeps its memory while an operation references it.
            if self.streams and memory.freed is None and memory.accesses:
                stop = max(access.stop for access in memory.accesses.values())
                moment = self._clocks[memory.home][memory.home]
                label = "its last reference went"
                self._check(key, memory, Access("free", memory.home, moment, 0, stop, label))
            del self.memories[key]

    def _access(self, kind: str, thread: str, span: Span, label: str) -> Access:
        moment = self._clocks[thread][thread]
        return Access(kind, thread, moment, span.start, span.stop, label)

    def _check(self, key: int, memory: Memory, access: Access) -> None:
        if memory.freed is not None:
            self._fail("memory is used after it was freed", key, memory, access)
        known = self._clocks[access.thread]
        for earlier in memory.accesses.values():
            overlaps = earlier.start < access.stop and access.start < earlier.stop
            if overlaps and (earlier.writes or access.writes):
                self.num_checks += 1
                if known.get(earlier.thread, 0) < earlier.moment:
                    why = "nothing makes the second access come after the first"
                    self._fail(why, key, memory, access, earlier)

    def _fail(
        self, why: str, key: int, memory: Memory, access: Access, earlier: Access | None = None
    ) -> None:
        earlier = earlier or memory.freed or next(iter(memory.accesses.values()), None)
        raise RaceError(
            f"{self._name_of(key)}: {why} ({self.title})\n  first:  {earlier}\n  second: {access}"
        )
