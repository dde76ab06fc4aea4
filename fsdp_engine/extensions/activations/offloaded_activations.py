"""Offload of blocks' activations to host memory between forward and backward.

[Note: Offloaded activations]
Autograd's ``saved_tensors_hooks`` see each tensor that the forward of a block saves. When the
forward returns, one operation on the lane "activations out" copies the saved tensors to pinned
memory. For each storage it copies the range of bytes that saved tensors span, only once even if
several tensors or several blocks save it. These tensors are kept and not copied: parameters and
other memory of the engine (full parameters are freed anyway), buffers of the block, tensors on
other devices, tensor subclasses, and ranges shorter than ``min_bytes``.

    compute            f0   f1   f2   f3         b3   b2   b1   b0
    activations out         o0   o1   o2   o3
    activations in                               i2   i1   i0

The memory of a block is held until compute has waited for its copy, so that no kernel reuses it
earlier. With ``record_stream`` the time of reuse, and the peak, would depend on the device. After
each block, compute waits for the oldest copies while more than ``in_flight`` bytes are held. Memory
that is still held when backward starts (by default the last block's) is used without a copy.

The backward of a block starts when autograd unpacks the first of its tensors. Then the memory of
the block that ran before it in backward is freed, compute waits for the copy of this block's
memory, and copies for the next blocks start, up to ``in_flight`` bytes but at least for one block.
A chain of weak references stores the order. Memory is allocated on compute's stream, so that it
reuses the memory of freed activations: each copy waits for the work that was submitted to compute
before, and compute waits for each copy before the memory is freed. The end of a backward frees the
memory of all blocks. After ``retain_graph=True`` another backward copies again.

With such hooks torch does not detect that a saved tensor was changed in place, so this module
compares versions. For this it keeps a tensor that shares the version counter of the saved tensor,
but not the memory of a tensor that is copied.

Host memory is reused by size. The next copy to it starts after the last copy from it has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine import backend
from fsdp_engine.comm.copy_lanes import make_copy_lanes
from fsdp_engine.comm.lanes import GradientStream, Lane, Steps, Ticket
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.activations.checkpointing import (
    SELECTIVE,
    Recompute,
    WrappedForward,
)
from fsdp_engine.extensions.activations.host_pool import HostPool
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import HOST
from fsdp_engine.memory.host_memory import HostBlock
from fsdp_engine.options import check_count
from fsdp_engine.runtime.inputs import version_of
from fsdp_engine.runtime.not_compiled import compiled_within, not_compiled
from fsdp_engine.runtime.passes import in_backward
from fsdp_engine.units.blocks import find_blocks
from fsdp_engine.units.build import EngineSetup, Resources

OFFLOAD = "offload"
# The role of the host memory in ledgers.
_ROLE = "activations"
# Classes of the tensors that are moved. Tensors are fake in a simulation.
_PLAIN = (Tensor, FakeTensor)
# Copied ranges start at multiples of this number of bytes, like memory of allocators. So tensors
# keep their alignment, by which kernels are selected.
_ALIGNMENT = 512
# The offload of each model between the preparation and the start of its engine.
_PREPARED: MutableMapping[nn.Module, ActivationOffload] = WeakIdKeyDictionary()


@dataclass(frozen=True)
class OffloadActivations(EngineExtension):
    """Keeps the tensors that blocks save for backward in pinned host memory until backward. On a
    CPU it changes nothing. See ``docs/internals/offload.md``.

    Attributes:
        in_flight: Bytes on the device in addition to those of the current block: activations whose
            copy to the host is not done, or that were copied back for backward. Unless it is 0, at
            least one block is copied back in advance. None: the largest number of bytes that any
            block has copied so far.
        min_bytes: Ranges of fewer bytes stay on the device. Copying the default number of bytes
            takes as long (19 us at 55 GB/s) as the host takes to submit the copy.

    Raises:
        TypeError, ValueError: A number is not an integer, or is negative.
    """

    in_flight: int | None = None
    min_bytes: int = 2**20

    def __post_init__(self) -> None:
        for name in ("in_flight", "min_bytes"):
            value = getattr(self, name)
            if value is not None or name == "min_bytes":
                check_count(name, value, 0)

    def check(self, setup: EngineSetup) -> None:
        """See the base class.

        Raises:
            ValueError: ``Recompute`` is used as well.
        """
        if any(isinstance(each, Recompute) for each in setup.settings.extensions):
            raise ValueError(
                "extensions: expected fe.OffloadActivations or fe.Recompute; found both"
            )

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """Wrap the blocks of the model."""
        if backend.current().runs_ahead(resources.memory.device):
            moves = ActivationOffload(resources.memory, resources.lanes.compute, self)
            moves.install(find_blocks(setup.model, setup.units))
            _PREPARED[setup.model] = moves

    def start(self, engine: Engine) -> None:
        """Register the offload, so that ``engine.reset()`` ends copies after an exception."""
        if (moves := _PREPARED.pop(engine.model, None)) is not None:
            engine.parts.append(moves)


def from_argument(value: object) -> list[EngineExtension]:
    """Returns the extensions that the deprecated argument ``checkpointing`` of ``fe.shard``
    selects.

    Raises:
        ValueError: ``value`` is not a valid argument.
    """
    if value is False:
        return []
    if isinstance(value, OffloadActivations):
        return [value]
    if (recompute := Recompute.of(value)) is not None:
        return [recompute]
    if value != OFFLOAD:
        raise ValueError(
            f"checkpointing: expected True, False, {SELECTIVE!r}, {OFFLOAD!r}, fe.Recompute or "
            f"fe.OffloadActivations; found {value!r}"
        )
    return [OffloadActivations()]


class View(NamedTuple):
    """Layout of a tensor over a storage; ``start`` is in bytes."""

    dtype: torch.dtype
    start: int
    shape: Sequence[int]
    strides: Sequence[int]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Returns the layout of ``tensor``."""
        start = int(tensor.storage_offset()) * tensor.itemsize
        return cls(tensor.dtype, start, tensor.shape, tensor.stride())

    @property
    def end(self) -> int:
        """Offset of the byte after the last one."""
        if 0 in self.shape:
            return self.start
        pairs = zip(self.shape, self.strides, strict=True)
        last = sum((size - 1) * stride for size, stride in pairs)
        return self.start + (last + 1) * self.dtype.itemsize


class _Moved:
    """A range of bytes of a storage that is copied to the host and, for backward, to the device.

    Args:
        tensor: A tensor over the storage.
        start, num_bytes: The range of bytes.
        pool: The pool for the host memory.

    Attributes:
        num_bytes: Number of bytes of the range.
        host: The bytes on the host.
        last_copy: The last copy from or to the host memory, by this or an earlier user of it.
        bytes: The bytes on the device. None: they are on the host only.
        is_restored: Whether ``bytes`` were copied back from the host.
        pending: The copy for which compute must wait before it reads or frees ``bytes``.
        num_users: Number of pending copies to the host and of calls in backward that need
            ``bytes``.
    """

    def __init__(self, tensor: Tensor, start: int, num_bytes: int, pool: HostPool) -> None:
        self.last_copy: Ticket | None
        self._block, self.last_copy = pool.take(num_bytes)
        self._pool = pool
        storage = tensor.untyped_storage()
        # While this weak reference exists, no other storage gets the address of this one.
        self._storage = StorageWeakRef(storage)
        self._start, self.num_bytes = start, num_bytes
        self._version = version_of(tensor)
        self.host = self._block.bytes[:num_bytes]
        self.bytes: Tensor | None = allocator.tensor_over(
            storage, torch.uint8, tensor.device, start, (num_bytes,), (1,)
        )
        self.is_restored = False
        self.pending: Ticket | None = None
        self.num_users = 0

    def __del__(self) -> None:
        if hasattr(self, "_pool"):  # False if the pool raised an exception.
            self._pool.put(self._block, self.last_copy)

    def holds(self, start: int, end: int, version: int) -> bool:
        """Returns whether this object contains bytes ``start`` to ``end`` at this version."""
        is_within = self._start <= start and end <= self._start + self.num_bytes
        return is_within and version == self._version

    def restore(self, device: torch.device) -> None:
        """Allocate uninitialised memory on ``device``."""
        self.bytes = allocator.empty(self.num_bytes, torch.uint8, device)
        self.is_restored = True

    def view(self, view: View) -> Tensor:
        """Returns a tensor over the bytes on the device."""
        assert self.bytes is not None
        start = view.start - self._start if self.is_restored else view.start
        return allocator.tensor_over(
            self.bytes.untyped_storage(),
            view.dtype,
            self.bytes.device,
            start // view.dtype.itemsize,
            view.shape,
            view.strides,
        )


class _Call:
    """One forward of a block.

    Args:
        number, name: Number and name of the block.
        device: The device of the block.

    Attributes:
        number, name: Number and name of the block.
        stream: The stream on which the block computes and its memory is allocated.
        moved: The ranges of saved tensors that are moved.
        own: The ranges of ``moved`` that no earlier call has moved.
        num_bytes: Number of bytes of ``own``.
        previous: Reference to the previous call; see :meth:`find_previous`.
    """

    __slots__ = ("__weakref__", "moved", "name", "num_bytes", "number", "own", "previous", "stream")

    def __init__(self, number: int, name: str, device: torch.device) -> None:
        self.number, self.name = number, name
        self.stream = GradientStream(device)
        self.stream.begin()
        self.moved: list[_Moved] = []
        self.own: list[_Moved] = []
        self.num_bytes = 0
        self.previous: weakref.ref[_Call] | None = None

    def find_previous(self) -> _Call | None:
        """Returns the previous call in the same forward of the model if its backward is pending."""
        return None if self.previous is None else self.previous()


class _Saved:
    """A tensor that autograd has saved.

    Attributes:
        tensor: Shares the version counter of the saved tensor, and its memory unless it is moved.
        version: Version of the tensor when it was saved.
        moved: The moved range that contains the bytes. None: the tensor is not moved.
        call: The call that saved the tensor, if it is moved.
        view: Layout over the original storage, if the tensor is moved.
    """

    __slots__ = ("call", "moved", "tensor", "version", "view")

    def __init__(self, tensor: Tensor) -> None:
        self.version = version_of(tensor)
        # Without `detach` there may be a cycle: tensor, autograd node, this object.
        self.tensor = tensor.detach()
        self.moved: _Moved | None = None
        self.call: _Call | None = None
        self.view: View | None = None

    def move(self, call: _Call, moved: _Moved) -> None:
        """Drop the memory of the tensor, whose bytes are part of ``moved``."""
        self.view = View.of(self.tensor)
        self.call, self.moved = call, moved
        allocator.forget_memory(self.tensor)

    def check(self) -> None:
        """Check that the tensor was not changed in place.

        Raises:
            RuntimeError: The tensor was changed in place.
        """
        if (found := version_of(self.tensor)) != self.version:
            shape = tuple(self.tensor.shape if self.view is None else self.view.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: expected a tensor of shape {shape} that a block has saved at "
                f"version {self.version}; found it at version {found}"
            )


def _copy(pairs: Iterable[tuple[Any, Any]]) -> Steps:
    """Operation that copies the second tensor of each pair to the first."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    yield from ()


class ActivationOffload:
    """Moves the activations of an engine's blocks. See [Note: Offloaded activations].

    Args:
        memory: The memory manager of the engine.
        compute: The compute lane of the engine.
        options: The options of the user.

    Attributes:
        lanes: The lanes for copies to the device and from it.
        pool: The pool of host memory.
    """

    def __init__(
        self, memory: allocator.Memory, compute: Lane, options: OffloadActivations
    ) -> None:
        self._memory = memory
        self._compute = compute
        self._options = options
        self.lanes = lanes = make_copy_lanes(memory.device, "activations")
        self._into, self._out = lanes

        def drain() -> None:
            for lane in lanes:
                lane.drain()

        def book(block: HostBlock) -> None:
            memory.book_elsewhere(block, HOST, _ROLE, block.bytes)

        self.pool = HostPool(drain, book)
        self._by_storage: WeakValueDictionary[int, _Moved] = WeakValueDictionary()
        self._most_of_a_call = 0
        self._last: weakref.ref[_Call] | None = None
        # `_leaving`: calls whose memory is held until it is copied, oldest first. `_arrived`: calls
        # whose activations are on the device for backward, and whether this backward has started.
        self._leaving: dict[_Call, None] = {}
        self._arrived: dict[_Call, bool] = {}
        self._backward = -1

    def install(self, blocks: dict[str, nn.Module]) -> None:
        """Replace the forwards of these modules, which are given in module order."""
        for number, (name, module) in enumerate(blocks.items()):
            # A compiled module computes in `_compiled_call_impl`. Replacing its forward instead
            # would let the compiler trace the hooks of autograd.
            is_compiled = module._compiled_call_impl is not None
            called = "_compiled_call_impl" if is_compiled else "forward"
            own = vars(module).get(called)
            setattr(module, called, OffloadedForward(module, own, self, number, name))

    @compiled_within
    def run(
        self,
        module: nn.Module,
        number: int,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns the result of ``function``, a forward of the block ``module``."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # The hooks are also set in a checkpoint's recomputation. Without them the checkpoint would
        # count more saved tensors than in its forward, and raise an error.
        is_recomputed = in_backward()
        if not is_recomputed:
            self._end_backward()  # An exception may have interrupted a backward.
        saved: list[_Saved] = []

        def pack(tensor: Tensor) -> _Saved:
            saved.append(_Saved(tensor))
            return saved[-1]

        try:
            with saved_tensors_hooks(pack, self._unpack):
                output = function(*args, **kwargs)
            if not is_recomputed:
                self._move(_Call(number, name, self._memory.device), module, saved)
        finally:
            saved.clear()  # Autograd keeps `pack`, and with it this list.
        return output

    def drain(self) -> list[Exception]:
        """Free device memory that has been held since an exception in forward or backward. Returns
        no errors."""
        self._end_backward()
        while self._leaving:
            self._leave(next(iter(self._leaving)))
        self._last = None
        return []

    # Forward.

    @property
    def _in_flight(self) -> int:
        given = self._options.in_flight
        return self._most_of_a_call if given is None else given

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in _PLAIN
            and tensor.device.type == self._memory.device.type
            and tensor.layout is torch.strided
            and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
            and bool(allocator.storage_keys(tensor))
            and not self._memory.owns(tensor)
        )

    @not_compiled
    @torch.no_grad()
    def _move(self, call: _Call, module: nn.Module, saved: Sequence[_Saved]) -> None:
        """Offload the tensors that ``call``, a finished forward of ``module``, has saved."""
        buffers = {key for each in module.buffers() for key in allocator.storage_keys(each)}
        by_storage: dict[int, list[_Saved]] = {}
        for each in saved:
            if self._may_move(each.tensor):
                [key] = allocator.storage_keys(each.tensor)
                if key not in buffers:
                    by_storage.setdefault(key, []).append(each)
        moves = []
        for key, group in by_storage.items():
            if (moved := self._moved(call, key, group)) is not None:
                call.moved.append(moved)
                moves.append((key, group, moved))
        if not moves:
            return
        before = self._last() if self._last is not None else None
        # A smaller number means that another forward of the model has started.
        if before is not None and before.number <= call.number:
            call.previous = self._last
        self._last = weakref.ref(call)
        if call.own:
            self._take_out(call)
        for key, group, moved in moves:
            self._by_storage[key] = moved
            for each in group:
                each.move(call, moved)
        while sum(each.num_bytes for each in self._leaving) > self._in_flight:
            self._leave(next(iter(self._leaving)))

    def _moved(self, call: _Call, key: int, group: Sequence[_Saved]) -> _Moved | None:
        """Returns the moved range for tensors over one storage; None if they stay on the device."""
        views = [View.of(each.tensor) for each in group]
        start = min(view.start for view in views) // _ALIGNMENT * _ALIGNMENT
        end = max(view.end for view in views)
        if end - start < max(self._options.min_bytes, 1):
            return None
        tensor = group[0].tensor
        before = self._by_storage.get(key)
        if before is not None and before.holds(start, end, version_of(tensor)):
            return before
        call.own.append(_Moved(tensor, start, end - start, self.pool))
        return call.own[-1]

    def _take_out(self, call: _Call) -> None:
        """Start to copy the own ranges of ``call`` to the host."""
        call.num_bytes = sum(each.num_bytes for each in call.own)
        self._most_of_a_call = max(self._most_of_a_call, call.num_bytes)
        self._submit(self._out, call, call.own)
        for each in call.own:
            each.num_users += 1
        self._leaving[call] = None

    def _leave(self, call: _Call) -> None:
        del self._leaving[call]
        self._free(call, call.own)

    def _free(self, call: _Call, moved: Sequence[_Moved]) -> None:
        """Free the memory of ``moved`` that no other call uses. Compute waits for copies from and
        to this memory first, so that no kernel reuses it earlier."""
        unused = []
        for each in moved:
            each.num_users -= 1
            if not each.num_users:
                unused.append(each)
        with call.stream.entered():
            self._wait(unused)
            for each in unused:
                each.bytes = None

    def _submit(self, lane: Lane, call: _Call, moved: Sequence[_Moved]) -> None:
        """Copy ``moved`` on ``lane``, after the work submitted to compute and after earlier copies
        from and to the same host memory."""
        is_out = lane is self._out
        pairs = [(each.host, each.bytes) if is_out else (each.bytes, each.host) for each in moved]
        # Wait one by one: for several tickets of one stream, a lane waits only for the last given.
        for ticket in dict.fromkeys(each.last_copy for each in moved):
            if ticket is not None:
                lane.wait(ticket)
        label = f"{'take' if is_out else 'bring'} {call.name}"
        ticket = lane.submit(label, partial(_copy, pairs), after=[self._compute.record()])
        for each in moved:
            each.last_copy = each.pending = ticket

    def _wait(self, moved: Sequence[_Moved]) -> None:
        for ticket in dict.fromkeys(each.pending for each in moved):
            if ticket is not None:
                self._compute.wait(ticket)
        for each in moved:
            each.pending = None

    # Backward.

    def _unpack(self, saved: _Saved) -> Tensor:
        saved.check()
        if saved.call is None or saved.moved is None or saved.view is None:
            return saved.tensor
        if not self._arrived.get(saved.call):
            self._begin(saved.call)
        return saved.moved.view(saved.view)

    @torch.no_grad()
    def _begin(self, call: _Call) -> None:
        """Start the backward of ``call``: free earlier memory and prefetch the next blocks."""
        for other, has_begun in list(self._arrived.items()):
            if has_begun:
                del self._arrived[other]
                self._free(other, other.moved)
        self._bring(call)
        self._arrived[call] = True
        with call.stream.entered():
            self._wait([each for each in call.moved if each.is_restored])
        if not in_backward():
            return
        if (backward := torch._C._current_graph_task_id()) != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        ahead, following = 0, call.find_previous()
        while following is not None and self._in_flight:
            if ahead and ahead + following.num_bytes > self._in_flight:
                break
            self._bring(following)
            ahead += following.num_bytes
            following = following.find_previous()

    def _bring(self, call: _Call) -> None:
        """Start to copy the ranges of ``call`` that are not on the device."""
        if call in self._arrived:
            return
        self._arrived[call] = False
        for each in call.moved:
            each.num_users += 1
        if call in self._leaving:
            del self._leaving[call]
            for each in call.own:
                each.num_users -= 1
        missing = [each for each in call.moved if each.bytes is None]
        if not missing:
            return
        with call.stream.entered():
            for each in missing:
                each.restore(self._memory.device)
            self._submit(self._into, call, missing)

    def _end_backward(self) -> None:
        """Free the memory of all blocks after a backward."""
        self._backward = -1
        for call in list(self._arrived):
            del self._arrived[call]
            self._free(call, call.moved)


class OffloadedForward(WrappedForward):
    """A forward whose activations are offloaded.

    Args:
        module, own: See :class:`~.checkpointing.WrappedForward`.
        offload: The object that moves the activations.
        number, name: Number and name of the block.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        offload: ActivationOffload,
        number: int,
        name: str,
    ) -> None:
        super().__init__(module, own)
        self._offload = offload
        self._number, self._name = number, name

    @compiled_within
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._offload.run
        return run(self._module, self._number, self._name, self.original, args, kwargs)
