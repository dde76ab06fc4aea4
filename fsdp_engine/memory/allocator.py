"""The engine's only allocations: persistent tensors, transient storages, and a ledger of both.

[Note: Transient storage]
Autograd saves views of a unit's full parameters between forward and backward, while the memory
behind them must be freed. So a storage *object* exists as long as its unit, and only its memory is
allocated and freed. Tensors over it are created with ``set_``, which gives each its own version
counter, so that autograd does not see a collective's writes as an in-place change.

On CUDA memory comes from the caching allocator by ``resize_``. On CPU there is none, and fresh
pages are costly (the kernel zeroes each): so there memory is passed between storages of one size by
swapping their data pointers, where torch can do so (``UntypedStorage._swap_data_ptr_``, in 2.13 but
not in 2.11). Idle memory is kept within a step, as a caching allocator keeps it, but never so much
that memory in use and idle together exceed the most that was in use. The step's last backward frees
it, for the optimizer or another model. (Allocating it again costs up to 2 % of a step,
``docs/internals/benchmarks.md``.)

[Note: Unread memory]
Memory that a gather writes must not be read before compute has waited for the gather. Functions of
autograd read full parameters without a hook of the engine, and they may run earlier than the engine
expects. So storages of full parameters are two objects: operations write one, readers' tensors lie
over the other. The memory is passed from the first to the second once compute has waited
(``expose``), and back before a further gather, or before it is freed (``withdraw``). Meanwhile
readers find a storage without memory, as they do between two gathers:

    gather                  written --- memory A      read --- nothing
    compute has waited      written --- nothing       read --- memory A

Where torch can say so (``_set_storage_data_ptr_access_error_msg``, in builds for CUDA), access to
the latter is an error that names the unit. Elsewhere torch raises an error of its own where it
creates a view, or in kernels that check for memory. Where it cannot swap data pointers, both are
one object.

[Note: Freed pages]
Small allocations that last (of gloo's threads, of loggers) settle between large tensors that
autograd frees, so on CPU glibc's heap has ever more holes, and the resident set grows to about
twice its size over a thousand steps though nothing leaks. ``malloc_trim`` hands the pages of all
holes back to the system. It takes milliseconds, and the next step takes the pages again, so it is
called once in many backwards. Settings of malloc do not do as well:
with a larger ``M_TOP_PAD`` (or any other of them) glibc no longer learns how large tensors are, and
where the heap has no hole for one above 128 KiB it maps and unmaps it (``benchmarks/long_run.py``).
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_engine import backend

# Swaps the memory of two storages; called as it is, since a unit's step does so ten times.
_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
CAN_SWAP = _swap is not None
_set_access_error: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
# See [Note: Freed pages].
BACKWARDS_PER_TRIM = 100

# Places of memory: the device of an engine, and one of :meth:`Memory.book_elsewhere`.
DEVICE, HOST = "device", "host"

# Kinds of memory in reports and simulations, by the role in a ledger ("idle": memory of transient
# storages between uses). Any other role is of weights.
KIND_OF_ROLE = {
    "grad": "gradients",
    **dict.fromkeys(("full", "staging", "idle"), "transient"),
    "optimizer": "optimizer",  # chunks of its state in a step
}


class Ledger:
    """Bytes held now, and at most so far, by role and in total.

    Attributes:
        watchers: called with the ledger after each change.
    """

    def __init__(self) -> None:
        self.watchers: tuple[Callable[[Ledger], None], ...] = ()
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = 0
        self.peak_total = 0

    def add(self, role: str, num_bytes: int) -> None:
        """Book ``num_bytes`` (negative when freed) on ``role``."""
        held = self.held[role] = self.held[role] + num_bytes
        self.total += num_bytes
        # Comparisons: they cost less than max(), and this is counted some times for each unit.
        if held > self.peak[role]:
            self.peak[role] = held
        if self.total > self.peak_total:
            self.peak_total = self.total
        for watch in self.watchers:
            watch(self)

    def reset_peak(self) -> None:
        """Start a new peak from the bytes held now."""
        self.peak = Counter(self.held)
        self.peak_total = self.total


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Within it, new tensors are on a real device unless another is named, and take part in
    autograd: also under ``with torch.device("meta")`` and ``torch.inference_mode()``."""
    is_meta = torch.get_default_device().type == "meta"
    with torch.inference_mode(False), torch.device("cpu") if is_meta else nullcontext():
        yield


def empty(
    shape: int | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    pinned: bool = False,
) -> torch.Tensor:
    """An uninitialised tensor that is not booked: temporary tensors, results for the user.

    Args:
        shape, dtype, device: The shape, dtype and device of the tensor.
        pinned: it is host memory that the accelerator copies from and to by itself.
    """
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor that is not booked, of the shape, strides and dtype of another."""
    return torch.empty_like(tensor, device=device)


def empty_strided_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same of a strided tensor, whose values and mode are not looked at."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


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


def storage_keys(tensor: torch.Tensor) -> list[int]:
    """What identifies the storages under ``tensor``: one, or those of a wrapper's inner tensors.

    A key is the address of the storage object, so it stays the same when the storage is resized.
    Tensors without a storage (sparse ones, those of ``torch.vmap``) have no key.
    """
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        # Of a DTensor its mesh is among them.
        inner = [each for name in names if isinstance(each := getattr(tensor, name), torch.Tensor)]
        return [key for each in inner for key in storage_keys(each)]
    if not torch._C._has_storage(tensor):
        return []
    return [tensor.untyped_storage()._cdata]


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """A tensor over ``storage``, which must have the memory, with a version counter of its own.

    Args:
        storage, dtype, device, shape, strides: The storage, dtype, device, shape and strides of the
            tensor.
        offset: in elements.
    """
    tensor = torch.empty(0, dtype=dtype, device=device)
    return tensor.set_(storage, offset, shape, strides)


def forget_memory(tensor: torch.Tensor) -> None:
    """Let ``tensor`` refer to no memory; it keeps the version counter that it shares."""
    # An assignment to `data` replaces everything else.
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def begin_together(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors begin at one byte of one storage, also where that has no memory."""
    storages = (first.untyped_storage()._cdata, second.untyped_storage()._cdata)
    starts = [each.storage_offset() * each.itemsize for each in (first, second)]
    return storages[0] == storages[1] and starts[0] == starts[1]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory with a version counter of its own."""
    return tensor.data


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

    A seam: a subclass takes the memory from elsewhere.

    Args:
        device: which.

    Attributes:
        ledger: bytes by role: "main", "model", "grad" (persistent); "full", "staging" (transient).
        elsewhere: bytes at other places than ``device``, by place and role.
        is_steady: gradients stay allocated, so that steady steps allocate nothing.
        is_fixed: tensors that collectives use are allocated while the engine is made.
        transients: its transient storages, by their keys.
    """

    is_steady = False
    is_fixed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_use = 0
        self._most_in_use = 0
        self.ledger = Ledger()
        self.elsewhere: dict[str, Counter[str]] = {}
        # A device's own allocator keeps idle memory.
        runs_ahead = backend.current().runs_ahead(device)
        self._swaps = CAN_SWAP and device.type == "cpu" and not runs_ahead
        self._swap = _swap_sizes if empty_storage(device).device.type == "meta" else _swap
        self._idle: dict[int, list[torch.UntypedStorage]] = {}
        # See [Note: Unread memory].
        self.can_withhold = (
            CAN_SWAP
            and backend.current().has_values
            and type(empty(0, torch.uint8, device)) is torch.Tensor
        )
        # Storage objects that have given their memory away, to take some again.
        self._hollow: list[torch.UntypedStorage] = []
        self._trim = _find_malloc_trim() if device.type == "cpu" else None
        self._backwards = 0
        # By `storage_keys`.
        self._persistent: set[int] = set()
        self.transients: WeakValueDictionary[int, TransientStorage] = WeakValueDictionary()

    def unreadable_storage(self, num_bytes: int, error: str) -> torch.UntypedStorage:
        """A storage object without memory; access is ``error``, where torch can raise it."""
        if _set_access_error is None:
            return empty_storage(self.device)
        # As long as with memory, so that views of it can be created, whose access is the error.
        made = torch._C._construct_storage_from_data_pointer(0, self.device, num_bytes)
        storage: torch.UntypedStorage = made  # type: ignore[assignment]
        _set_access_error(storage._cdata, error)
        return storage

    def persistent(
        self, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
    ) -> torch.Tensor:
        """A zeroed 1-D tensor that lives as long as the engine; ``sent``: collectives use it."""
        self.ledger.add(role, numel * dtype.itemsize)
        tensor = zeros(numel, dtype, self.device)
        self._persistent.update(storage_keys(tensor))
        return tensor

    def give_back(self, tensor: torch.Tensor, role: str) -> None:
        """A persistent tensor is about to go."""
        self.ledger.add(role, -tensor.nbytes)
        self._persistent.difference_update(storage_keys(tensor))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory of this object, also while that is freed."""
        keys = storage_keys(tensor)
        return any(key in self._persistent or key in self.transients for key in keys)

    def book_elsewhere(self, holder: object, place: str, role: str, tensor: torch.Tensor) -> None:
        """Book memory at another place than the device, as long as ``holder`` is alive."""
        held = self.elsewhere.setdefault(place, Counter())
        held[role] += tensor.nbytes
        weakref.finalize(holder, held.subtract, {role: tensor.nbytes}).atexit = False
        backend.current().booked_elsewhere(tensor, place)

    def transient(
        self, numel: int, dtype: torch.dtype, role: str, *, read_error: str | None = None
    ) -> TransientStorage:
        """A storage whose memory comes and goes; it starts without.

        Args:
            numel, dtype, role: see :class:`TransientStorage`.
            read_error: others read it: see [Note: Unread memory]. The error of a read too early.

        It has to be filled and drained on one lane; and all storages of one ``role`` on the same
        one, or each drained after compute is done with it, and filled after compute.
        """
        return TransientStorage(self, numel, dtype, role, read_error=read_error)

    def lasting(self, numel: int, dtype: torch.dtype, role: str) -> TransientStorage:
        """A storage whose memory comes and goes, and is gone for long: it is freed,
        not kept idle."""
        return TransientStorage(self, numel, dtype, role, is_kept_idle=False)

    def begin_unit(self) -> None:
        """Transient storages that are made from here on are the next unit's."""

    def end_backward(self, *, step_is_over: bool = False) -> None:
        """A backward is over: now and then freed pages go back. See [Note: Freed pages].

        Args:
            step_is_over: it was the step's last: idle memory goes back, too.
        """
        if step_is_over:
            self.release_idle()
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

    def fill(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """Give ``storage``, which is empty, idle or new memory."""
        self.ledger.add(role, num_bytes)
        self._in_use += num_bytes
        if self._in_use > self._most_in_use:
            self._most_in_use = self._in_use
        blocks = self._idle.get(num_bytes)
        if blocks:
            block = blocks.pop()
            self._swap(storage, block)
            self._hollow.append(block)
            return
        idle = self.idle_bytes
        while idle and self._in_use + idle > self._most_in_use:
            size = max(size for size, blocks in self._idle.items() if blocks)
            self._idle[size].pop()
            idle -= size
        self.resize(storage, num_bytes)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give ``storage``, which is empty, new memory."""
        storage.resize_(num_bytes)

    def drain(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """Take the memory of :meth:`fill` away."""
        self.ledger.add(role, -num_bytes)
        self._in_use -= num_bytes
        if self._swaps:
            block = self._hollow.pop() if self._hollow else empty_storage(self.device)
            self._swap(storage, block)
            blocks = self._idle.get(num_bytes)
            if blocks is None:
                blocks = self._idle[num_bytes] = []
            blocks.append(block)
        else:
            storage.resize_(0)


def _swap_sizes(first: torch.UntypedStorage, second: torch.UntypedStorage) -> None:
    """Of storages under ``FakeTensorMode``. Torch refuses to swap those of two sizes, and
    operations on fake tensors over an empty storage give it one."""
    sizes = first.nbytes(), second.nbytes()
    first.resize_(sizes[1])
    second.resize_(sizes[0])


def _find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's function of that name; None with another C library."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resize_foreign(tensor: torch.Tensor, num_bytes: int) -> None:
    """Resize the storage of a tensor that code outside of the engine has allocated; the ledger does
    not count it. On CUDA the caller's stream is the one that computes with the tensor.

    Args:
        tensor: at any offset of its storage.
        num_bytes: The number of bytes of the whole storage; 0 frees its memory.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


class TransientStorage:
    """A storage object of ``numel`` elements whose memory comes and goes.

    See [Note: Transient storage]. On CUDA, :meth:`fill` and :meth:`drain` must run on one stream.

    Args:
        memory: The memory of the engine.
        numel, dtype: its size.
        role: in the ledger.
        is_kept_idle: its memory is kept within a step when it is freed.
        read_error: others read it ([Note: Unread memory]); the error of a read too early.

    Attributes:
        numel, dtype, num_bytes: its size.
        filled: it has memory.
        is_exposed: readers' tensors have the memory, and operations that write it have none.
    """

    def __init__(
        self,
        memory: Memory,
        numel: int,
        dtype: torch.dtype,
        role: str,
        *,
        is_kept_idle: bool = True,
        read_error: str | None = None,
    ) -> None:
        self._memory = memory
        self._role = role
        self._is_kept_idle = is_kept_idle
        self.numel = numel
        self.dtype = dtype
        self.num_bytes = numel * dtype.itemsize
        self.filled = False
        # Views can only be made over memory that is there: `view` fills and drains once.
        self._written = self._read = empty_storage(memory.device)
        self.is_exposed = False
        if read_error is not None and memory.can_withhold and self.num_bytes:
            self._read = memory.unreadable_storage(self.num_bytes, read_error)
            memory.transients[self._read._cdata] = self
        memory.transients[self._written._cdata] = self

    def fill(self) -> None:
        """Give the storage memory (uninitialised). Nothing happens if it has some."""
        if not self.filled:
            if self._is_kept_idle:
                self._memory.fill(self._written, self.num_bytes, self._role)
            else:
                self._written.resize_(self.num_bytes)
                self._memory.ledger.add(self._role, self.num_bytes)
            self.filled = True

    def drain(self) -> None:
        """Take the memory away. Nothing happens if there is none."""
        if self.filled:
            if self.is_exposed:
                self.withdraw()
            if not self._is_kept_idle:
                self._written.resize_(0)
                self.leave()
                return
            self._memory.drain(self._written, self.num_bytes, self._role)
            self.filled = False

    def leave(self) -> None:
        """Leave the memory to the tensors over it; this storage cannot be used again."""
        if self.filled:
            self._memory.ledger.add(self._role, -self.num_bytes)
            self.filled = False

    def expose(self) -> None:
        """Compute has waited for the writes: readers' tensors have the memory from here on."""
        if not self.is_exposed and self._read is not self._written:
            self.is_exposed = True
            _swap(self._read, self._written)

    def withdraw(self) -> None:
        """Readers' tensors have no memory from here on."""
        if self.is_exposed:
            self.is_exposed = False
            _swap(self._read, self._written)

    @property
    def _storage(self) -> torch.UntypedStorage:
        """The object that has the memory, if there is any."""
        return self._read if self.is_exposed else self._written

    @property
    def key(self) -> int:
        """That of readers' tensors; see :func:`storage_keys`."""
        key: int = self._read._cdata
        return key

    @property
    def num_uses(self) -> int:
        """Tensors over the storage, and other holds on it, that there are now."""
        count: int = torch._C._storage_Use_Count(self._read._cdata)
        return count

    @contextmanager
    def while_filled(self) -> Iterator[TransientStorage]:
        """Have memory for a moment, to make views over it."""
        self.fill()
        yield self
        self.drain()

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous tensor over elements from ``offset``, with a version counter of its own:
        for readers if the memory is exposed, else for operations that write it.

        The storage must have memory at this moment; the tensor outlives it.
        """
        assert self._storage.nbytes() >= self.num_bytes, (
            "a view needs memory behind it when it is made"
        )
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        assert offset + math.prod(shape) <= self.numel
        device = self._memory.device
        return tensor_over(
            self._storage, self.dtype, device, offset, shape, tuple(reversed(strides))
        )
