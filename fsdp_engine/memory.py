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
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


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


def host_block(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Uninitialised bytes of host memory, not booked. Pinned memory is copied to without a stop."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


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


class Memory:
    """What one engine allocates on one device.

    Attributes:
        ledger: bytes by role: "main", "model", "grad" (persistent); "full", "staging" (transient).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_use = 0
        self._most_in_use = 0
        self.ledger = Ledger()
        self._swaps = _CAN_SWAP and device.type == "cpu"
        self._idle: dict[int, list[torch.UntypedStorage]] = {}

    def persistent(self, numel: int, dtype: torch.dtype, role: str) -> torch.Tensor:
        """A zeroed 1-D tensor that lives as long as the engine."""
        self.ledger.add(role, numel * dtype.itemsize)
        return zeros(numel, dtype, self.device)

    def transient(self, numel: int, dtype: torch.dtype, role: str) -> TransientStorage:
        """A storage whose memory comes and goes; it starts without."""
        return TransientStorage(self, numel, dtype, role)

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
            block = torch.UntypedStorage(0)
            storage._swap_data_ptr_(block)  # type: ignore[attr-defined]
            self._idle.setdefault(num_bytes, []).append(block)
        else:
            storage.resize_(0)


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
        # Views can only be made over memory that is there: `view` fills and drains once.
        self._storage = torch.UntypedStorage(0, device=memory.device)

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
        assert self.filled, "a view needs memory behind it when it is made"
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        assert offset + math.prod(shape) <= self.numel
        tensor = torch.empty(0, dtype=self.dtype, device=self._memory.device)
        return tensor.set_(self._storage, offset, shape, tuple(reversed(strides)))
