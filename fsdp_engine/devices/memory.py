"""The engine's only allocations: persistent tensors, transient storages, and a ledger of both.

[Note: Transient storage]
Autograd saves views of a unit's full parameters between forward and backward, while the memory
behind them must go. So a storage *object* lives as long as its unit and only its memory comes and
goes. Tensors over it are made with ``set_``, which gives each its own version counter: refilling
the memory by a collective is then no in-place change that autograd would complain about.

On CUDA memory comes from the caching allocator by ``resize_``. On CPU there is none, and fresh
pages are costly (the kernel zeroes each): so there memory is passed between storages of one size by
swapping their data pointers, where torch can do so (``UntypedStorage._swap_data_ptr_``, in 2.13 but
not in 2.11). Idle memory is kept, as a caching allocator keeps it, but never so much that memory
in use and idle together exceed what was once in use.

[Note: Freed pages]
Small allocations that last (of gloo's threads, of whoever logs) settle between large tensors that
autograd frees, so on CPU glibc's heap has ever more holes, and the resident set grows to about
twice its size over a thousand steps though nothing leaks. ``malloc_trim`` hands the pages of all
holes back to the system. It takes milliseconds, and what it gave back is taken again in the next
step, so every so many backwards it costs next to nothing. Settings of malloc do not do as well:
with a larger ``M_TOP_PAD`` (or any other of them) glibc no longer learns how large tensors are, and
where the heap has no hole for one above 128 KiB it maps and unmaps it (``benchmarks/long_run.py``).

[Note: Slots]
With ``fsdp_double_buffer`` transient memory neither comes nor goes. For each role ("full",
"staging") there are two *slots*, storages that last as long as the engine, and units take them in
turn: the first, third, ... unit lives in one, the second, fourth, ... in the other, for life, in
forward and backward alike. All transient storages that a unit has of a role lie one after the other
in its slot, which is as long as the largest of its units needs. Filling is then to take the slot,
draining to give it back, and a slot has one user at a time: schedulers see to it (``rival``).

Units in turn are those whose modules contain no other unit. The root, and units that contain
others, are full while others are: each of them has slots of its own.

Sizes are known when all units are made: until :meth:`Memory.fix_slots` slots grow as they need.
Views are made over the storage object, and need not care.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
_SLOT_ALIGNMENT = 128  # bytes
# See [Note: Freed pages].
BACKWARDS_PER_TRIM = 100


class Ledger:
    """Bytes held now, and at most so far, by role and in total."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = 0
        self.peak_total = 0

    def add(self, role: str, num_bytes: int) -> None:
        """Book ``num_bytes`` (negative when given back) on ``role``."""
        self.held[role] += num_bytes
        self.total += num_bytes
        if num_bytes > 0:
            self.peak[role] = max(self.peak[role], self.held[role])
            self.peak_total = max(self.peak_total, self.total)

    def reset_peak(self) -> None:
        """Start a new peak from what is held now."""
        self.peak = Counter(self.held)
        self.peak_total = self.total


def empty(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """An uninitialised tensor that is not booked: scratch, results handed to the user."""
    return torch.empty(shape, dtype=dtype, device=device)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that is not booked, of the shape, strides and dtype of another."""
    return torch.empty_like(tensor, device=device)


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are not booked, laid out as ``tensor`` is, also where it is a sharded one."""
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)


def zeros(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """A zeroed tensor that is not booked."""
    return torch.zeros(shape, dtype=dtype, device=device)


def empty_storage(device: torch.device | str) -> torch.UntypedStorage:
    """A storage object without memory; under ``FakeTensorMode`` one that never gets any."""
    return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def begin_together(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors begin at one byte of one storage, also where that has no memory."""
    storages = (first.untyped_storage()._cdata, second.untyped_storage()._cdata)
    starts = [each.storage_offset() * each.itemsize for each in (first, second)]
    return storages[0] == storages[1] and starts[0] == starts[1]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory with a version counter of its own."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, on the CPU, whose storage ends where the tensor ends.

    It keeps the memory alive. ``tensor`` must be contiguous.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = torch.from_numpy(tensor.detach().reshape(-1).view(torch.uint8).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


TRANSIENT_ROLES = ("full", "staging")


class Pool(Protocol):
    """Where communication buffers come from, if not from the usual allocator."""

    def allocating(self) -> AbstractContextManager[None]:
        """Within it, what this thread allocates on the device comes from the pool."""
        ...


class Memory:
    """What one engine allocates on one device.

    Args:
        device: which.
        pool: what collectives read and write for longer than a moment is allocated in it: slots,
            and persistent tensors that are ``sent``. None: nowhere special.

    Attributes:
        ledger: bytes by role: "main", "model", "grad" (persistent); "full", "staging" (transient,
            or, see [Note: Slots], held from :meth:`fix_slots` on).
        has_pool: communication buffers must all be there when the engine is made.
    """

    def __init__(self, device: torch.device, pool: Pool | None = None) -> None:
        self.device = device
        self._pool = pool
        self.has_pool = pool is not None
        self._in_use = 0
        self._most_in_use = 0
        self.ledger = Ledger()
        # Not by the device's name: under FakeTensorMode storages are on none.
        self._swaps = _CAN_SWAP and empty_storage(device).device.type == "cpu"
        self._idle: dict[int, list[torch.UntypedStorage]] = {}
        self._trim = _find_malloc_trim() if device.type == "cpu" else None
        self._backwards = 0
        self._slots: list[Slot] = []
        self._place: Place | None = None

    def persistent(
        self, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
    ) -> torch.Tensor:
        """A zeroed 1-D tensor that lives as long as the engine; ``sent``: collectives use it."""
        self.ledger.add(role, numel * dtype.itemsize)
        with self._allocating(sent):
            return zeros(numel, dtype, self.device)

    def transient(self, numel: int, dtype: torch.dtype, role: str) -> TransientStorage:
        """A storage whose memory comes and goes; it starts without.

        Within :meth:`placing` it is part of a slot instead.
        """
        if self._place is not None:
            return SlottedStorage(self, numel, dtype, role, self._place)
        return TransientStorage(self, numel, dtype, role)

    def make_slots(self) -> dict[str, Slot]:
        """A slot for each role."""
        made = {role: Slot(self.device, role) for role in TRANSIENT_ROLES}
        self._slots += made.values()
        return made

    @contextmanager
    def placing(self, place: Place | None) -> Iterator[None]:
        """Within it, transient storages are made for the unit at ``place``. None: as ever."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def fix_slots(self) -> None:
        """All units are made: give the slots the memory that they keep."""
        for slot in self._slots:
            slot.storage.resize_(0)
            with self._allocating(sent=True):
                slot.storage.resize_(slot.num_bytes)
            self.ledger.add(slot.role, slot.num_bytes)

    def _allocating(self, sent: bool) -> AbstractContextManager[None]:
        return self._pool.allocating() if self._pool is not None and sent else nullcontext()

    def end_backward(self) -> None:
        """A backward is over: now and then freed pages go back. See [Note: Freed pages]."""
        self._backwards += 1
        if self._trim is not None and self._backwards % BACKWARDS_PER_TRIM == 0:
            self._trim(0)

    def release_idle(self) -> None:
        """Hand idle memory back."""
        self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of transient memory that no storage uses."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def _fill(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self._in_use += num_bytes
        self._most_in_use = max(self._most_in_use, self._in_use)
        blocks = self._idle.get(num_bytes)
        if blocks:
            storage._swap_data_ptr_(blocks.pop())  # type: ignore[attr-defined]
            return
        idle = self.idle_bytes
        while idle and self._in_use + idle > self._most_in_use:
            size = max(size for size, blocks in self._idle.items() if blocks)
            self._idle[size].pop()
            idle -= size
        storage.resize_(num_bytes)

    def _drain(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        self._in_use -= num_bytes
        if self._swaps:
            block = empty_storage(self.device)
            storage._swap_data_ptr_(block)  # type: ignore[attr-defined]
            self._idle.setdefault(num_bytes, []).append(block)
        else:
            storage.resize_(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's function of that name; None with another C library."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class TransientStorage:
    """A storage object of ``numel`` elements whose memory comes and goes.

    See [Note: Transient storage]. On CUDA, :meth:`fill` and :meth:`drain` must run on one stream.
    """

    def __init__(self, memory: Memory, numel: int, dtype: torch.dtype, role: str) -> None:
        self._memory = memory
        self._role = role
        self.numel = numel
        self.dtype = dtype
        self.num_bytes = numel * dtype.itemsize
        self.filled = False
        self._start = 0  # in the storage, in elements
        # Views can only be made over memory that is there: `view` fills and drains once.
        self._storage = self._find_storage()

    def fill(self) -> None:
        """Give the storage memory (uninitialised). Nothing happens if it has some."""
        if not self.filled:
            self._memory._fill(self._storage, self.num_bytes)
            self._memory.ledger.add(self._role, self.num_bytes)
            self.filled = True

    def drain(self) -> None:
        """Take the memory away. Nothing happens if there is none."""
        if self.filled:
            self._memory._drain(self._storage, self.num_bytes)
            self._memory.ledger.add(self._role, -self.num_bytes)
            self.filled = False

    @contextmanager
    def while_filled(self) -> Iterator[TransientStorage]:
        """Have memory for a moment, to make views over it."""
        self.fill()
        yield self
        self.drain()

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor over elements from ``offset``, with a version counter of its own.

        The storage must have memory at this moment; the tensor outlives it.
        """
        behind = self._storage.nbytes() - self._start * self.dtype.itemsize
        assert behind >= self.num_bytes, "a view needs memory behind it when it is made"
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        assert offset + math.prod(shape) <= self.numel
        tensor = torch.empty(0, dtype=self.dtype, device=self._memory.device)
        return tensor.set_(self._storage, self._start + offset, shape, tuple(reversed(strides)))

    def _find_storage(self) -> torch.UntypedStorage:
        return empty_storage(self._memory.device)


class Slot:
    """Memory of one role that units take in turn. See [Note: Slots].

    Attributes:
        num_bytes: what the largest of its units needs.
        user: the unit that has it now, by number; None: it is free.
    """

    def __init__(self, device: torch.device, role: str) -> None:
        self.role = role
        self.storage = empty_storage(device)
        self.num_bytes = 0
        self.user: int | None = None
        self._num_parts = 0  # of the user that are filled

    def take(self, unit: int) -> None:
        """A part of ``unit`` is filled."""
        assert self.user in (None, unit), f"units {self.user} and {unit} are in one slot at once"
        self.user = unit
        self._num_parts += 1

    def grow(self) -> None:
        """Before slots are fixed: memory for all that was added so far."""
        if self.storage.nbytes() < self.num_bytes:
            self.storage.resize_(self.num_bytes)

    def give_back(self) -> None:
        """A part of its user is drained."""
        self._num_parts -= 1
        if not self._num_parts:
            self.user = None


class Place:
    """The slots of one unit, and how much of each is taken up by what the unit has so far."""

    def __init__(self, unit: int, slots: dict[str, Slot]) -> None:
        self.unit = unit
        self.slots = slots
        self._ends = dict.fromkeys(slots, 0)

    def rival(self, role: str) -> int | None:
        """The other unit that has this one's slot now, by number; None if there is none."""
        user = self.slots[role].user
        return None if user == self.unit else user

    def add(self, role: str, num_bytes: int) -> int:
        """Room for ``num_bytes`` more; returns the byte where it starts."""
        start = -(-self._ends[role] // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self._ends[role] = start + num_bytes
        slot = self.slots[role]
        slot.num_bytes = max(slot.num_bytes, self._ends[role])
        return start


class SlottedStorage(TransientStorage):
    """A part of a slot: to fill it is to take the slot. See [Note: Slots]."""

    def __init__(
        self, memory: Memory, numel: int, dtype: torch.dtype, role: str, place: Place
    ) -> None:
        self._slot = place.slots[role]
        self._unit = place.unit
        super().__init__(memory, numel, dtype, role)
        self._start = place.add(role, self.num_bytes) // dtype.itemsize

    def _find_storage(self) -> torch.UntypedStorage:
        return self._slot.storage

    @contextmanager
    def while_filled(self) -> Iterator[TransientStorage]:
        """See :class:`TransientStorage`; memory is there, whoever uses it."""
        self._slot.grow()
        yield self

    def fill(self) -> None:
        """See :class:`TransientStorage`; takes the slot."""
        if not self.filled:
            self._slot.take(self._unit)
            self._slot.grow()
            self.filled = True

    def drain(self) -> None:
        """See :class:`TransientStorage`; gives the slot back."""
        if self.filled:
            self._slot.give_back()
            self.filled = False
