"""All allocations of the engine: persistent tensors, transient storages, and a ledger of both.

[Note: Transient storage]
Autograd saves views of a unit's full parameters between forward and backward, while the memory
behind them must be freed. Therefore a storage *object* exists as long as its unit, and only its
memory is allocated and freed. Tensors over the storage are created with ``set_``, which gives each
of them its own version counter. So autograd does not treat a collective's writes as an in-place
change.

On CUDA memory comes from the caching allocator by ``resize_``. On CPU there is no such allocator,
and fresh pages are costly, because the kernel zeroes each. There, memory is moved between storages
of one size by swapping their data pointers, if torch can do so
(``UntypedStorage._swap_data_ptr_``, in 2.13 but not in 2.11). Idle memory is kept within a step, as
in a caching allocator, but idle memory and memory in use together never exceed the peak of memory
in use. The last backward of a step frees idle memory, for the optimizer or another model. To
allocate it again costs up to 2 % of the step time (``docs/internals/benchmarks.md``).

[Note: Unread memory]
Memory that a gather writes must not be read before compute has waited for the gather. Functions of
autograd read full parameters without a hook of the engine, and they may run earlier than the engine
expects. Full parameters therefore have two storage objects: operations write to one, and the
tensors of readers are over the other. The memory is moved from the first to the second once compute
has waited (``expose``), and back before the next gather or before it is freed (``withdraw``).
At all other times the storage of readers has no memory:

    gather                  written --- memory A      read --- nothing
    compute has waited      written --- nothing       read --- memory A

In builds of torch for CUDA (``_set_storage_data_ptr_access_error_msg``), access to this storage
while it has no memory raises an error that names the unit. Other builds raise an error of torch
when a view is created, or in kernels that check for memory. If torch cannot swap data pointers,
both storages are one object.

[Note: Freed pages]
Small, long-lived allocations (of gloo's threads, of loggers) are placed between large tensors that
autograd frees. On CPU glibc's heap therefore has more and more holes, and the resident set grows to
about twice its size over a thousand steps, although no memory leaks. ``malloc_trim`` returns the
pages of all holes to the operating system. It takes milliseconds, and the next step allocates the
pages again, so it is called once in many backwards. Settings of malloc are no alternative: with a
larger ``M_TOP_PAD`` (or any other setting) glibc no longer adapts its thresholds to the sizes of
tensors, and maps and unmaps each tensor above 128 KiB for which the heap has no hole
(``benchmarks/long_run.py``).
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

# Swaps the memory of two storages. It is called without a wrapper, ten times per unit and step.
_swap: Any = getattr(torch.UntypedStorage, "_swap_data_ptr_", None)
CAN_SWAP = _swap is not None
_set_access_error: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
# See [Note: Freed pages].
BACKWARDS_PER_TRIM = 100

# Places of memory: the device of an engine, and host memory, which :meth:`Memory.book_elsewhere`
# counts.
DEVICE, HOST = "device", "host"

# Kinds of memory in reports and simulations, by role in a ledger ("idle": memory of transient
# storages between uses). All other roles are weights.
KIND_OF_ROLE = {
    "grad": "gradients",
    **dict.fromkeys(("full", "staging", "idle"), "transient"),
    "optimizer": "optimizer",  # chunks of the optimizer's state on the device during a step
}


class Ledger:
    """Bytes held now, and their peak so far, by role and in total.

    Attributes:
        watchers: Functions that are called with the ledger after each change.
        held: Bytes held now, by role.
        peak: The largest value of ``held`` so far, by role.
        total: Bytes held now by all roles.
        peak_total: The largest value of ``total`` so far.
    """

    def __init__(self) -> None:
        self.watchers: tuple[Callable[[Ledger], None], ...] = ()
        self.held: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total = 0
        self.peak_total = 0

    def add(self, role: str, num_bytes: int) -> None:
        """Add ``num_bytes`` (negative when freed) to ``role``."""
        held = self.held[role] = self.held[role] + num_bytes
        self.total += num_bytes
        # Comparisons cost less than max(), and this runs several times per unit and step.
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
    """Context in which new tensors are on a real device by default, and take part in autograd.

    It overrides ``with torch.device("meta")`` and ``torch.inference_mode()``.
    """
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
    """Returns an uninitialised tensor that no ledger counts: a temporary, or a result for the user.

    Args:
        shape, dtype, device: The shape, dtype and device of the tensor.
        pinned: Whether to allocate pinned host memory, for asynchronous copies of an accelerator.
    """
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


def empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised tensor with the shape, strides and dtype of ``tensor``.

    No ledger counts it.
    """
    return torch.empty_like(tensor, device=device)


def empty_strided_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised tensor like :func:`empty_like`, made from metadata only.

    ``tensor`` may therefore be a fake tensor of another mode. It must be strided.
    """
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def zeros_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in the layout of ``tensor``, which may be a sharded tensor.

    No ledger counts them.
    """
    return torch.zeros_like(tensor, dtype=dtype, requires_grad=False)


def zeros(
    shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Returns a tensor of zeros that no ledger counts."""
    return torch.zeros(shape, dtype=dtype, device=device)


def empty_storage(device: torch.device | str) -> torch.UntypedStorage:
    """Returns a storage object without memory. Under ``FakeTensorMode`` it can never have any."""
    return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()


def storage_keys(tensor: torch.Tensor) -> list[int]:
    """Returns keys that identify the storage of a tensor, or those of a wrapper's inner tensors.

    A key is the address of the storage object, so it stays the same when the storage is resized.
    Tensors without a storage (sparse tensors, tensors of ``torch.vmap``) have no key.
    """
    if type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        # The names of a DTensor include its mesh, which is not a tensor.
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
    """Returns a tensor over ``storage`` with its own version counter.

    Args:
        storage: The storage. It must have memory for the tensor.
        dtype, device, shape, strides: The dtype, device, shape and strides of the tensor.
        offset: The storage offset in elements.
    """
    tensor = torch.empty(0, dtype=dtype, device=device)
    return tensor.set_(storage, offset, shape, strides)


def forget_memory(tensor: torch.Tensor) -> None:
    """Make ``tensor`` empty. It keeps its version counter, which other tensors may share."""
    # An assignment to `data` replaces everything but the version counter.
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def begin_together(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors start at the same byte of the same storage.

    The storage need not have memory.
    """
    storages = (first.untyped_storage()._cdata, second.untyped_storage()._cdata)
    starts = [each.storage_offset() * each.itemsize for each in (first, second)]
    return storages[0] == storages[1] and starts[0] == starts[1]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory with its own version counter."""
    return tensor.data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, 1-D. It is a view if the tensor is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    # A single element may have any stride, with which torch would refuse the view.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the memory of a CPU tensor, with a storage of exactly its size.

    It keeps the memory alive. ``tensor`` must be contiguous.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = torch.from_numpy(as_bytes(tensor).numpy())
    return flat.view(tensor.dtype).view(tensor.shape)


class Memory:
    """The memory manager of one engine.

    This class is a seam (see ``docs/design.md``): subclasses allocate memory in other ways.

    Args:
        device: The device of the memory.

    Attributes:
        device: The device of the memory.
        ledger: Bytes on ``device`` by role: "main", "model" (persistent), "grad" (freed while
            gradients are cleared), "full", "staging" (transient), and roles of extensions.
        elsewhere: Bytes at other places than ``device``, by place and role.
        is_steady: Whether gradients stay allocated, so that steady steps allocate nothing.
        is_fixed: Whether all tensors of collectives are allocated when the engine is made.
        can_withhold: Whether tensors of readers can have a storage object of their own: see
            [Note: Unread memory].
        transients: The transient storages by their keys.
    """

    is_steady = False
    is_fixed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in_use = 0
        self._most_in_use = 0
        self.ledger = Ledger()
        self.elsewhere: dict[str, Counter[str]] = {}
        # On an accelerator the caching allocator keeps idle memory.
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
        # Storage objects without memory, to be swapped with the next storage that is freed.
        self._hollow: list[torch.UntypedStorage] = []
        self._trim = _find_malloc_trim() if device.type == "cpu" else None
        self._backwards = 0
        # Keys of persistent tensors: see `storage_keys`.
        self._persistent: set[int] = set()
        self.transients: WeakValueDictionary[int, TransientStorage] = WeakValueDictionary()

    def unreadable_storage(self, num_bytes: int, error: str) -> torch.UntypedStorage:
        """Returns a storage object without memory. Access to it raises ``error``, if torch can."""
        if _set_access_error is None:
            return empty_storage(self.device)
        # The storage has its full size, so that views can be created; access to them is an error.
        made = torch._C._construct_storage_from_data_pointer(0, self.device, num_bytes)
        storage: torch.UntypedStorage = made  # type: ignore[assignment]
        _set_access_error(storage._cdata, error)
        return storage

    def persistent(
        self, numel: int, dtype: torch.dtype, role: str, *, sent: bool = False
    ) -> torch.Tensor:
        """Returns a 1-D tensor of zeros that exists as long as the engine.

        Args:
            numel: Number of elements.
            dtype: The dtype.
            role: The role in the ledger.
            sent: Whether collectives use the tensor.
        """
        self.ledger.add(role, numel * dtype.itemsize)
        tensor = zeros(numel, dtype, self.device)
        self._persistent.update(storage_keys(tensor))
        return tensor

    def unregister(self, tensor: torch.Tensor, role: str) -> None:
        """Subtract a persistent tensor from the ledger, before it is deleted."""
        self.ledger.add(role, -tensor.nbytes)
        self._persistent.difference_update(storage_keys(tensor))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Returns whether ``tensor`` is over a storage of this object, with or without memory."""
        keys = storage_keys(tensor)
        return any(key in self._persistent or key in self.transients for key in keys)

    def book_elsewhere(self, holder: object, place: str, role: str, tensor: torch.Tensor) -> None:
        """Count memory at another place than the device, as long as ``holder`` is alive."""
        held = self.elsewhere.setdefault(place, Counter())
        held[role] += tensor.nbytes
        weakref.finalize(holder, held.subtract, {role: tensor.nbytes}).atexit = False
        backend.current().booked_elsewhere(tensor, place)

    def transient(
        self, numel: int, dtype: torch.dtype, role: str, *, read_error: str | None = None
    ) -> TransientStorage:
        """Returns a storage whose memory is allocated and freed repeatedly. It has no memory yet.

        Either fill and free all storages of one ``role`` on one lane, or fill each of them after
        compute's earlier work, and free it after compute has finished with it.

        Args:
            numel, dtype, role: See :class:`TransientStorage`.
            read_error: The error that a read raises before compute has waited for the writes: see
                [Note: Unread memory]. None: there are no separate readers.
        """
        return TransientStorage(self, numel, dtype, role, read_error=read_error)

    def lasting(self, numel: int, dtype: torch.dtype, role: str) -> TransientStorage:
        """Returns a storage whose memory is returned to torch when it is freed, and not kept
        idle."""
        return TransientStorage(self, numel, dtype, role, is_kept_idle=False)

    def begin_unit(self) -> None:
        """Declare that transient storages made afterwards belong to the next unit."""

    def end_backward(self, *, step_is_over: bool = False) -> None:
        """Return freed pages to the system, once in many calls. See [Note: Freed pages].

        Args:
            step_is_over: Whether the last backward of the step has ended. If so, idle memory is
                freed.
        """
        if step_is_over:
            self.release_idle()
        self._backwards += 1
        if self._trim is not None and self._backwards % BACKWARDS_PER_TRIM == 0:
            self._trim(0)

    def release_idle(self) -> None:
        """Free idle memory."""
        self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of transient memory that no storage uses."""
        return sum(size * len(blocks) for size, blocks in self._idle.items())

    def fill(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """Allocate idle or new memory for ``storage``, which must have none."""
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
        """Allocate new memory for ``storage``, which must have none."""
        storage.resize_(num_bytes)

    def free(self, storage: torch.UntypedStorage, num_bytes: int, role: str) -> None:
        """Free the memory that :meth:`fill` has allocated for ``storage``."""
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
    """Swap the sizes of two storages under ``FakeTensorMode``, as a swap of their memory would.

    torch does not swap storages of different sizes, and operations on fake tensors over an empty
    storage set its size.
    """
    sizes = first.nbytes(), second.nbytes()
    first.resize_(sizes[1])
    second.resize_(sizes[0])


def _find_malloc_trim() -> Callable[[int], int] | None:
    """Returns glibc's function ``malloc_trim``, or None with another C library."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def resize_foreign(tensor: torch.Tensor, num_bytes: int) -> None:
    """Resize the storage of a tensor that other code has allocated. No ledger counts it.

    On CUDA the current stream must be the one that computes with the tensor.

    Args:
        tensor: A tensor at any offset of the storage.
        num_bytes: Size of the storage in bytes. 0 frees its memory.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


class TransientStorage:
    """A storage object whose memory is allocated and freed repeatedly.

    See [Note: Transient storage]. On CUDA, :meth:`fill` and :meth:`free` must run on one stream.

    Args:
        memory: The memory manager of the engine.
        numel: Number of elements.
        dtype: Dtype of the elements.
        role: The role in the ledger.
        is_kept_idle: Whether freed memory is kept idle within a step.
        read_error: The error that a read raises before compute has waited for the writes: see
            [Note: Unread memory]. None: there are no separate readers.

    Attributes:
        numel, dtype, num_bytes: Number of elements, their dtype, and the size in bytes.
        filled: Whether the storage has memory.
        is_exposed: Whether tensors of readers have the memory, and tensors of writers have none.
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
        # The storage starts without memory. Views can only be made while it is filled.
        self._written = self._read = empty_storage(memory.device)
        self.is_exposed = False
        if read_error is not None and memory.can_withhold and self.num_bytes:
            self._read = memory.unreadable_storage(self.num_bytes, read_error)
            memory.transients[self._read._cdata] = self
        memory.transients[self._written._cdata] = self

    def fill(self) -> None:
        """Allocate uninitialised memory, unless the storage has memory."""
        if not self.filled:
            if self._is_kept_idle:
                self._memory.fill(self._written, self.num_bytes, self._role)
            else:
                self._written.resize_(self.num_bytes)
                self._memory.ledger.add(self._role, self.num_bytes)
            self.filled = True

    def free(self) -> None:
        """Free the memory, if the storage has any."""
        if self.filled:
            if self.is_exposed:
                self.withdraw()
            if not self._is_kept_idle:
                self._written.resize_(0)
                self.leave()
                return
            self._memory.free(self._written, self.num_bytes, self._role)
            self.filled = False

    def leave(self) -> None:
        """Leave the memory to the tensors over it. The ledger no longer counts it.

        The storage cannot be used again.
        """
        if self.filled:
            self._memory.ledger.add(self._role, -self.num_bytes)
            self.filled = False

    def expose(self) -> None:
        """Move the memory to the tensors of readers. Compute must have waited for the writes."""
        if not self.is_exposed and self._read is not self._written:
            self.is_exposed = True
            _swap(self._read, self._written)

    def withdraw(self) -> None:
        """Move the memory from the tensors of readers to those of writers."""
        if self.is_exposed:
            self.is_exposed = False
            _swap(self._read, self._written)

    @property
    def _storage(self) -> torch.UntypedStorage:
        """The storage object that has the memory, if there is any."""
        return self._read if self.is_exposed else self._written

    @property
    def key(self) -> int:
        """The key of the storage that tensors of readers are over; see :func:`storage_keys`."""
        key: int = self._read._cdata
        return key

    @property
    def num_uses(self) -> int:
        """Current number of tensors over the storage, and of other references to it."""
        count: int = torch._C._storage_Use_Count(self._read._cdata)
        return count

    @contextmanager
    def while_filled(self) -> Iterator[TransientStorage]:
        """Context in which the storage has memory, to make views over it."""
        self.fill()
        try:
            yield self
        finally:
            self.free()

    def view(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns a contiguous tensor over the elements from ``offset``, with its own version
        counter.

        The tensor is for readers if the memory is exposed, else for operations that write it. The
        storage must have memory during this call; the tensor stays valid when it is freed.
        """
        assert self._storage.nbytes() >= self.num_bytes, (
            "view() was called while the storage has no memory"
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
