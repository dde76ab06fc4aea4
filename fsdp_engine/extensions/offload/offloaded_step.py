"""Steps of elementwise optimizers whose state, weights or gradients are offloaded, unit by unit.

[Note: Offloaded state]
A *chunk* is device memory for all offloaded tensors of a unit: optimizer state of its parameters,
and the shards of main weights and gradients of its buffers. Each of these is copied from a *home*,
pinned host memory or a range of a file. Homes of state are created with the optimizer, homes of
shards with their buffers. Two trial steps on a parameter of 4,099 zeros, with the hyperparameters
of each group, show which tensors the state has and their dtypes.

The unmodified ``step`` runs once for each chunk ([Note: Steps in chunks] in ``chunked_step.py``),
on a shadow that holds the slices of the chunk and their state on the device. Each row is a lane;
chunk k is copied in (ik), stepped (sk) and copied back (ok):

    state in     i0  i1      i2      i3
    compute          s0      s1      s2      s3
    state out            o0      o1      o2      o3

Weights are copied back with the state; gradients are not. The host waits for the last copies of
weights, since users read parameters at their homes. With ``Offload.overlap_forward``, steps run on
a separate lane instead of "compute", concurrently with the next forward, and chunks are stepped in
the order of units: [Note: Steps beside forward] in ``step_beside_forward.py``.

The device memory of a chunk is allocated when the chunk is copied in, and freed when it is copied
back. Chunk k + 1 is allocated after chunk k - 1 is freed, so at most two chunks are allocated.

Between steps ``optimizer.state`` holds FlatDTensors over homes, which checkpoints read and write.
A value that loading or the user replaces is detected by identity and copied to its home in the next
step. If its dtype differs, the chunk is rebuilt. State that does not have the shape of the slice (a
step counter) is not moved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, MutableMapping, Sequence, ValuesView
from functools import partial
from itertools import chain, count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.comm.pending_steps import PendingStep, finish_pending_steps
from fsdp_engine.extension_list import implementation
from fsdp_engine.extensions.offload.home import Home, HomePart, Homes
from fsdp_engine.extensions.offload.moved_bytes import MovedBytes, Piece
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.extensions.offload.owned_homes import copy_moved
from fsdp_engine.extensions.offload.step_beside_forward import StepBesideForward
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.layout import round_up
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import storage_keys
from fsdp_engine.optim.chunked_step import (
    ChunkedStep,
    called_once,
    entries_of,
    step_in_turn,
    with_closures,
)
from fsdp_engine.optim.shadow import (
    PlainSlot,
    Slices,
    Slot,
    StepHook,
    slice_within,
    step_hook_of,
)
from fsdp_engine.optim.state_format import StateFormat
from fsdp_engine.optim.state_leaves import is_plain
from fsdp_engine.optim.step_listeners import add_step_check

# The role of chunks in the memory ledger.
ROLE = "optimizer"
# The field of `fe.Offload` for optimizer state.
STATE = "optimizer_state"
# State tensors start at multiples of this number of bytes.
_ALIGNMENT = 64
# Attributes of optimizers that `_can_be_pending` does not search for tensors.
_OF_OPTIMIZER = {"defaults", "param_groups", "state"}
# Shape of the parameter in trial steps. It is unusual: a state tensor of the same shape must have
# one element per parameter element. It has more than 4096 elements, up to which some optimizers do
# not quantise.
_TRIAL_SHAPE = (4099,)


class OffloadedBuffer(NamedTuple):
    """The homes of a buffer.

    Attributes:
        params: The sharded parameters of the buffer.
        main: Home of the main weights. None: they are on the device.
        gradients: Home of the gradients. None: they are on the device.
        pending: The buffer's optimizer step for which compute has not waited yet.
    """

    params: Sequence[Tensor]
    main: Home | None
    gradients: HomePart | None
    pending: PendingStep


class _Unit(NamedTuple):
    """A set of parameters that are stepped together.

    Attributes:
        offload: The object that moves the engine's state.
        name: Name for labels and errors.
        number: Number of units that were offloaded before this one.
    """

    offload: Offloading
    name: str
    number: int


class _Registered(NamedTuple):
    """The unit and the buffer of a parameter."""

    unit: _Unit
    buffer: OffloadedBuffer


_number = attrgetter("number")
_OFFLOADS: MutableMapping[Tensor, _Registered] = WeakIdKeyDictionary()
_NUMBERS = count()


def offload_state(
    offload: Offloading, name: str, buffers: Sequence[OffloadedBuffer], num_elements: int
) -> None:
    """Register the parameters of a unit's buffers, so that optimizers step them with ``offload``.

    Copies of the first and the last chunk overlap with no others, so a large unit (an embedding and
    a head) is divided into several chunks of whole parameters. A unit whose main weights or
    gradients are offloaded is one chunk.

    Args:
        offload: The object that moves the engine's state.
        name: Name of the unit for labels and errors.
        buffers: The buffers of trainable parameters.
        num_elements: Maximum number of elements of this rank's shards in a chunk of several
            parameters.
    """
    is_divided = not any(buffer.main or buffer.gradients for buffer in buffers)
    unit, size = _Unit(offload, name, next(_NUMBERS)), 0
    for buffer in buffers:
        # Drop the parameters: within a value they would keep the weak keys of `_OFFLOADS` alive.
        of_param = buffer._replace(params=())
        for param in buffer.params:
            numel = slice_within(param).numel()
            if is_divided and size and size + numel > num_elements:
                unit, size = _Unit(offload, name, next(_NUMBERS)), 0
            size += numel
            _OFFLOADS[param] = _Registered(unit, of_param)
    add_step_check(refuse_offloaded)


def find_offload(optimizer: Optimizer) -> Offloading | None:
    """Returns the object that moves state of the optimizer's parameters; None if none does.

    Raises:
        ValueError: The parameters belong to several engines with an offload.
    """
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    registered = [each for param in params if (each := _OFFLOADS.get(param)) is not None]
    found = {id(each.unit.offload): each.unit.offload for each in registered}
    if len(found) > 1:
        raise ValueError(
            f"optimizer: expected parameters of one engine, since one engine offloads their "
            f"state; found parameters of {len(found)} engines. Make an optimizer for each engine"
        )
    return next(iter(found.values()), None)


def is_offloaded(param: Tensor) -> bool:
    """Returns whether the state of ``param`` is offloaded between steps."""
    registered = _OFFLOADS.get(param)
    return registered is not None and registered.unit.offload.moves(STATE)


def refuse_offloaded(optimizer: Optimizer) -> None:
    """Check, before a step of an optimizer, that it can step offloaded parameters.

    Raises:
        RuntimeError: The state of its parameters is offloaded, and the optimizer was not passed to
            :func:`~fsdp_engine.shard_optimizer`.
    """
    hook = step_hook_of(optimizer, StepHook)
    if hook is not None and hook.takes_moved_state:
        return
    if _OFFLOADS and find_offload(optimizer) is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__}: expected fe.shard_optimizer(optimizer) before its first "
            "step, since the state of its parameters is offloaded; found that it was not called"
        )


class _WorkSlot(Slot):
    """A parameter whose slice is stored at a home. The step uses a copy on the device."""

    def __init__(self, param: FlatDTensor, local: Tensor) -> None:
        self.param = param
        self.local = local
        self.param_local = param.local


class _Chunk(MovedBytes):
    """The offloaded state, main weights and gradients of a unit.

    Args:
        unit: The unit of the parameters.
        params: The parameters of the unit that the optimizer steps.
        dtypes: The dtypes of each parameter's state tensors, by key.
        homes: The factory for homes of state. None: state stays on the device.

    Attributes:
        unit: The unit of the parameters.
        slots: A slot for each parameter.
        slices: The slices of the sharded parameters.
        dtypes: The dtypes of each parameter's state tensors, by key.
        members: By index of a param group, the tensors of the group that this chunk steps.
        kept: For each slot, views of the home by key, as ``optimizer.state`` holds them.
        work: For each slot, views of the device memory by key.
        num_bytes: Number of bytes of the chunk on the device.
        returns_weights: Whether the chunk contains main weights.
        has_state: Whether the optimizer has state of the parameters.
        has_plain: Whether a parameter is not sharded, so that users hold it as a plain tensor.
    """

    def __init__(
        self,
        unit: _Unit,
        params: Sequence[Tensor],
        dtypes: Sequence[dict[Any, torch.dtype]],
        homes: Homes | None,
    ) -> None:
        super().__init__(unit.offload, unit.name)
        self.unit = unit
        self.has_state = False
        self.dtypes = list(dtypes)
        offload = unit.offload
        self._moves_state = homes is not None
        self.members: dict[int, list[Tensor]] = {}
        places: list[dict[Any, tuple[int, torch.dtype]]] = []
        size = 0
        for param, keys in zip(params, dtypes, strict=True):
            places.append({})
            for key, dtype in keys.items():
                places[-1][key] = size, dtype
                size += round_up(slice_within(param).numel() * dtype.itemsize, _ALIGNMENT)
        self._places = places
        if homes is not None:
            home = homes.make(size, offload.state_out.drain)
            self._pieces.append(Piece(home, 0, 0, size, returns=True))
        buffers = _unique_objects(_OFFLOADS[param].buffer for param in params if param in _OFFLOADS)
        self.returns_weights = any(buffer.main is not None for buffer in buffers)
        for buffer in buffers:
            if (main := buffer.main) is not None:
                size = self._add(Piece(main, 0, size, size + len(main.bytes), returns=True))
            if (grads := buffer.gradients) is not None:
                stop = size + grads.num_bytes
                size = self._add(Piece(grads.home, grads.first, size, stop, returns=False))
        self._piece_of = {storage_keys(piece.home.bytes)[0]: piece for piece in self._pieces}
        self.num_bytes = size
        self._storage = offload.memory.transient(size, torch.uint8, ROLE)
        with self._storage.while_filled():
            self._bytes = self._storage.view(0, (size,))
            self.slots = [self._slot(param) for param in params]
            self.work = self._views(self._bytes, lambda slot, key, value: value)
        self.slices = Slices(
            [slot for slot in self.slots if isinstance(slot.param, FlatDTensor)],
            self._gradient if any(not piece.returns for piece in self._pieces) else None,
        )
        state = self._pieces[0].home.bytes if self._moves_state else self._bytes
        self.kept = self._views(state, lambda slot, key, value: slot.to_flat(key, value))
        self._pending = _unique_objects(buffer.pending for buffer in buffers)
        self.has_plain = any(isinstance(slot, PlainSlot) for slot in self.slots)

    def _add(self, piece: Piece) -> int:
        """Add a piece; returns the offset of the next one."""
        self._pieces.append(piece)
        return round_up(piece.stop, _ALIGNMENT)

    def _slot(self, param: Any) -> Slot:
        if not isinstance(param, FlatDTensor):
            return PlainSlot(param)
        if param not in _OFFLOADS or _OFFLOADS[param].buffer.main is None:
            return Slot(param)
        work = self._copy_of(param.local)
        assert work is not None
        return _WorkSlot(param, work)

    def _copy_of(self, local: Tensor) -> Tensor | None:
        """Returns the view of the chunk for a tensor at a home; None if no piece contains it."""
        piece = self._piece_of.get(storage_keys(local)[0])
        if piece is None:
            return None
        first = int(local.storage_offset()) * local.itemsize - piece.first
        return self._view(self._bytes, piece.start + first, local.dtype, local)

    def _gradient(self, index: int, local: Tensor) -> Tensor:
        """Returns the slice of a gradient on the device."""
        found = self._copy_of(local)
        # A gradient that the user has assigned is on the device of the parameter.
        return local.to(self._offload.memory.device) if found is None else found

    def _views(
        self, memory: Tensor, shown: Callable[[Slot, Any, Tensor], Tensor]
    ) -> list[dict[Any, Tensor]]:
        return [
            {
                key: shown(slot, key, self._view(memory, start, dtype, slot.local))
                for key, (start, dtype) in places.items()
            }
            for slot, places in zip(self.slots, self._places, strict=True)
        ]

    @staticmethod
    def _view(memory: Tensor, start: int, dtype: torch.dtype, like: Tensor) -> Tensor:
        piece = memory[start : start + like.numel() * dtype.itemsize]
        # Use a separate version counter: a step in place must not mark the home's views as changed.
        return allocator.alias(piece.view(dtype).view(like.shape))

    @property
    def brings_more_than_state(self) -> bool:
        """Whether the chunk contains main weights or gradients, which need no optimizer state."""
        return len(self._pieces) > self._moves_state

    def moves_state_of(self, slot: Slot) -> bool:
        """Returns whether state of the parameter's shape is offloaded."""
        return self._moves_state and slot.param.ndim > 0

    def check_home(self, place: int, key: Any) -> None:
        """Check that a state tensor of a slot has a home.

        Raises:
            ValueError: The state tensor has no home.
        """
        kept = self.kept[place]
        if self.moves_state_of(self.slots[place]) and key not in kept:
            raise ValueError(
                f"offload.optimizer_state: expected the state {', '.join(map(str, kept))}, which a "
                f"trial step has; found {key!r} as well. Make the optimizer with the "
                "hyperparameters of the one that was saved"
            )

    def large_state(self, place: int, values: dict[Any, Any]) -> dict[Any, Tensor]:
        """Returns the tensors among ``values``, the loaded state of a slot, that have a home.

        Raises:
            ValueError: A tensor of the parameter's shape has no home, or a tensor with a home has
                another shape or slice.
        """
        slot, kept = self.slots[place], self.kept[place]
        shape = slot.param.shape
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == shape:
                self.check_home(place, key)
            if key in kept and value.shape not in (shape, slot.local.shape):
                raise ValueError(
                    f"optimizer: expected the state {key!r} of a parameter in its shape, "
                    f"{tuple(shape)}; found {tuple(value.shape)}"
                )
            if key in kept and isinstance(value, FlatDTensor):
                slot.to_local(key, value)  # Raises if the slice differs.
        return {k: v for k, v in values.items() if k in kept and isinstance(v, Tensor)}

    def start_copies(self) -> None:
        """See :class:`StepChunk`. Copies nothing if there is no state yet."""
        if self.has_state or self.brings_more_than_state:
            super().start_copies()

    def begin_pending(self, ticket: Ticket, held: Sequence[Tensor]) -> None:
        """Record that compute has not waited for the step of this chunk yet.

        Args:
            ticket: The end of the step.
            held: Gradients that the step reads and whose memory is not the engine's.
        """
        for pending in self._pending:
            if isinstance(pending, StepBesideForward):
                pending.begin(ticket)
                pending.hold(*held)

    def finish_pending(self) -> None:
        """Make compute wait for the step."""
        for pending in self._pending:
            pending.finish()


def _in_order(chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """Returns chunks in the order of steps. Neighbours have similar sizes, since one is copied in
    while the other is copied back. The first and the last chunk, whose copies overlap with no
    others, are the smallest."""
    by_size = sorted(chunks, key=attrgetter("num_bytes"))
    return [*by_size[::2], *reversed(by_size[1::2])]


def _unique_objects(objects: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in objects}.values())


def _has_tensors(values: Iterable[Any]) -> bool:
    """Returns whether ``values`` contain tensors, also within nested containers."""
    for each in values:
        if isinstance(each, Tensor):
            return True
        inner = each.values() if isinstance(each, dict) else each
        if isinstance(inner, tuple | list | ValuesView) and _has_tensors(inner):
            return True
    return False


class _ChunkStep(NamedTuple):
    """A submitted step of a chunk.

    Attributes:
        ticket: The end of the step.
        held: Gradients that the step reads and whose memory is not the engine's.
    """

    ticket: Ticket
    held: Sequence[Tensor]


class OffloadedStep(ChunkedStep):
    """Step hooks of an optimizer with offloaded state. See [Note: Offloaded state].

    Args:
        optimizer: An elementwise optimizer.
        offload: The object that moves the state of its parameters.

    Raises:
        ValueError: State tensors are not plain (those of torchao), or a trial step failed.
        OSError: There is too little space on the disk.
    """

    def __init__(self, optimizer: Optimizer, offload: Offloading) -> None:
        if not implementation(StateFormat).of(optimizer).has_plain_tensors:
            raise ValueError(
                f"optimizer: expected state in plain tensors, since it is offloaded between "
                f"steps; found {type(optimizer).__name__}, whose state is quantised"
            )
        self._offload = offload
        self._homes = offload.homes(STATE) if offload.moves(STATE) else None
        super().__init__(optimizer)
        self._chunks: list[_Chunk] = []
        self._slot_of: dict[int, tuple[_Chunk, int]] = {}  # by id of the parameter
        self._others: dict[Any, Any] = {}  # state of parameters without a home, within a step
        self._loaded: list[tuple[Tensor, dict[Any, Any]]] = []
        self._refresh(optimizer)

    def register(self, optimizer: Optimizer) -> None:
        """Register the hooks of the optimizer."""
        super().register(optimizer)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def kept_state(self, param: Tensor, key: Any, dtype: torch.dtype) -> Tensor | None:
        """See :class:`StepHook`. Returns the view of the home for a state tensor."""
        if (found := self._slot_of.get(id(param))) is None:
            return None
        self._offload.wait()
        kept = found[0].kept[found[1]].get(key)
        return kept if kept is not None and kept.dtype == dtype else None

    def check_kept_state(self, param: Tensor, key: Any) -> None:
        """See :class:`StepHook`."""
        if (found := self._slot_of.get(id(param))) is not None:
            chunk, place = found
            chunk.check_home(place, key)

    # Steps.

    def begin(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :class:`StepHook`."""
        self._refresh(optimizer)
        self._refit(optimizer)
        arguments, kwargs = with_closures(args, kwargs, called_once)
        self._shadows.clear()
        self._others = {
            key: value
            for key, value in optimizer.state.items()
            if isinstance(key, Tensor) and id(key) not in self._slot_of
        }
        if self._can_be_pending(optimizer):
            for chunk in self._chunks:
                chunk.slices.wait_for_gradients()
            with self._offload.beside_compute():
                steps = self._step_chunks(optimizer, arguments, kwargs)
            self._begin_pending(steps)
        else:
            finish_pending_steps()
            self._step_chunks(optimizer, arguments, kwargs)
        return (self._without_parameters(optimizer, {}), *arguments), kwargs

    def _step_chunks(
        self, optimizer: Any, arguments: Sequence[Any], kwargs: dict[str, Any]
    ) -> list[_ChunkStep]:
        """Submit the steps of all chunks and their copies."""
        steps: list[_ChunkStep] = []

        def step(chunk: _Chunk) -> None:
            states, local_of = self._brought(optimizer, chunk)
            members = chunk.members
            self._step_members(optimizer, members, states, local_of, arguments, kwargs)
            steps.append(self._take(optimizer, chunk, states))

        for chunk in self._chunks:
            chunk.has_state = any(optimizer.state.get(slot.param) for slot in chunk.slots)
        try:
            step_in_turn([(chunk, partial(step, chunk)) for chunk in self._chunks])
            self._offload.memory.release_idle()  # Backward would not reuse the memory of chunks.
        except BaseException:
            self._abandon()
            raise
        return steps

    def _can_be_pending(self, optimizer: Any) -> bool:
        """Returns whether the step can run concurrently with the next forward.

        It cannot if hyperparameters or attributes contain tensors (a learning rate, the scale of a
        ``GradScaler``), which the user may change before the step has read them.
        """
        memory = self._offload.memory
        if not self._offload.overlaps_forward or memory.is_fixed:
            return False
        groups = (
            value
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        )
        own = (value for key, value in vars(optimizer).items() if key not in _OF_OPTIMIZER)
        return not _has_tensors(chain(groups, own))

    def _begin_pending(self, steps: Sequence[_ChunkStep]) -> None:
        """Record ``steps`` as pending. Compute waits now only for steps of parameters that are
        plain tensors or not offloaded, and for steps that stored tensors outside of the state of
        parameters."""
        for chunk, (ticket, held) in zip(self._chunks, steps, strict=True):
            chunk.begin_pending(ticket, held)
            if chunk.has_plain:
                chunk.finish_pending()
        if self._has_others:
            self._offload.compute.wait(steps[0].ticket)
        if _has_tensors(self._shadows.values):
            self._offload.compute.wait(steps[-1].ticket)

    def finish(self, optimizer: Any) -> None:
        """See :class:`StepHook`."""
        super().finish(optimizer)
        self._others.clear()
        if any(chunk.returns_weights for chunk in self._chunks):
            self._offload.wait()  # Users may read parameters, whose memory is the home.
        # Fused steps do not increment version counters (torch 2.11 to 2.13).
        torch.autograd.graph.increment_version(
            [slot.param_local for chunk in self._chunks for slot in chunk.slots]
        )

    def _brought(self, optimizer: Any, chunk: _Chunk) -> tuple[dict[Any, Any], dict[int, Tensor]]:
        """Returns the state of a chunk on the device, and its slices by ``id`` of the parameter.
        Sets the gradients of the slices."""
        states = entries_of(optimizer)
        states |= self._others
        for slot, kept, work in zip(chunk.slots, chunk.kept, chunk.work, strict=True):
            if state := optimizer.state.get(slot.param):
                states[slot.local] = {
                    key: self._on_device(slot, key, value, kept.get(key), work.get(key))
                    for key, value in state.items()
                }
        chunk.slices.set_gradients()
        return states, {id(slot.param): slot.local for slot in chunk.slots}

    @staticmethod
    def _on_device(slot: Slot, key: Any, value: Any, kept: Any, work: Tensor | None) -> Any:
        """Returns a state value for the step: the chunk's, or a copy if the value was replaced."""
        if work is not None and value is kept:
            return work
        local = slot.to_local(key, value)[1]
        if not isinstance(local, Tensor):
            return local
        if work is not None:
            return work.copy_(local)
        return local.to(slot.local.device) if local.ndim else local

    @torch.no_grad()
    def _take(self, optimizer: Any, chunk: _Chunk, states: dict[Any, Any]) -> _ChunkStep:
        """Take over the state of a chunk after its step, and start to copy it to its homes."""
        transients = self._offload.memory.transients
        held = [
            grad
            for local in chunk.slices.locals
            if (grad := local.grad) is not None and storage_keys(grad)[0] not in transients
        ]
        chunk.slices.clear_gradients()
        chunk.fill()  # No memory is allocated yet if there was no state before.
        for slot, kept, work in zip(chunk.slots, chunk.kept, chunk.work, strict=True):
            if (found := states.pop(slot.local, None)) is not None:
                of_param = optimizer.state.setdefault(slot.param, {})
                self._keep(of_param, chunk, slot, found, kept, work)
        for key, value in states.items():
            if isinstance(key, Tensor) and self._others.get(key) is not value:
                self._others[key] = optimizer.state[key] = value
        chunk.begin_return()
        return _ChunkStep(self._offload.compute.record(), held)

    @staticmethod
    def _keep(
        state: dict[Any, Any],
        chunk: _Chunk,
        slot: Slot,
        found: dict[Any, Any],
        kept: dict[Any, Tensor],
        work: dict[Any, Tensor],
    ) -> None:
        """Move the state ``found`` of a slice after a step into the parameter's ``state``."""
        moved: list[tuple[Tensor, Tensor]] = []
        for key, value in found.items():
            if key in work and isinstance(value, Tensor):
                if value.dtype != work[key].dtype:
                    raise RuntimeError(
                        f"offload.optimizer_state: expected the state {key!r} in "
                        f"{work[key].dtype}, which a trial step has; found {value.dtype}"
                    )
                if value is not work[key]:
                    moved.append((work[key], value))
                found[key] = kept[key]
            elif (
                chunk.moves_state_of(slot)
                and isinstance(value, Tensor)
                and value.ndim
                and value.shape == slot.local.shape
            ):
                raise RuntimeError(
                    f"offload.optimizer_state: expected the state {', '.join(map(str, work))}, "
                    f"which a trial step has; found {key!r} as well after a step"
                )
        slot.keep(state, found)
        if moved:
            copy_moved(*zip(*moved, strict=True))

    def _abandon(self) -> None:
        """Free all chunks after a failed step. The caller raises the error of the step."""
        self._offload.drain()
        for chunk in self._chunks:
            chunk.slices.clear_gradients()
            chunk.abandon()

    # Chunks.

    def _refresh(self, optimizer: Any) -> None:
        """Create chunks for parameters that have none.

        Raises:
            RuntimeError: A parameter was converted.
        """
        self._check_converted()
        if (groups := self._changed_groups(optimizer)) is None:
            return
        self._groups = groups
        by_unit: dict[_Unit, tuple[list[Tensor], list[dict[Any, torch.dtype]]]] = defaultdict(
            lambda: ([], [])
        )
        for group in optimizer.param_groups:
            trials: dict[torch.dtype, dict[Any, torch.dtype]] = {}
            for param in group["params"]:
                registered = _OFFLOADS.get(param)
                if registered is None or id(param) in self._slot_of:
                    continue
                is_moved = registered.buffer.main or registered.buffer.gradients
                if not (param.ndim or is_moved):
                    continue
                if self._homes is not None and param.dtype not in trials:
                    trials[param.dtype] = self._try(optimizer, group, param)
                params, dtypes = by_unit[registered.unit]
                params.append(param)
                dtypes.append(trials.get(param.dtype, {}) if param.ndim else {})
        numbers = {chunk.unit: number for number, chunk in enumerate(self._chunks)}
        for unit in sorted(by_unit, key=_number):
            params, dtypes = by_unit[unit]
            number = numbers.get(unit, len(self._chunks))
            # Parameters of one home must share a chunk: each of two chunks would copy the home, and
            # so overwrite the other's results.
            for chunk in self._chunks[number : number + 1]:
                params = [*(slot.param for slot in chunk.slots), *params]
                dtypes = [*chunk.dtypes, *dtypes]
            self._make_chunk(optimizer, number, unit, params, dtypes)
        if self._offload.overlaps_forward:
            self._chunks.sort(key=lambda chunk: chunk.unit.number)
        else:
            self._chunks = _in_order(self._chunks)
        if not self._chunks:  # Parameters without an offload are stepped with the first chunk.
            self._chunks.append(_Chunk(_Unit(self._offload, "nothing", 0), [], [], self._homes))
        self._assign_members()

    def _refit(self, optimizer: Any) -> None:
        """Rebuild chunks whose state was replaced or loaded in another dtype. The step then uses
        that dtype, as it would without an offload."""
        for number, chunk in enumerate(self._chunks):
            dtypes = [
                {
                    key: getattr(optimizer.state.get(slot.param, {}).get(key), "dtype", dtype)
                    for key, dtype in known.items()
                }
                for slot, known in zip(chunk.slots, chunk.dtypes, strict=True)
            ]
            if dtypes != chunk.dtypes:
                params = [slot.param for slot in chunk.slots]
                self._make_chunk(optimizer, number, chunk.unit, params, dtypes)
                self._assign_members()

    def _make_chunk(
        self,
        optimizer: Any,
        number: int,
        unit: _Unit,
        params: Sequence[Tensor],
        dtypes: Sequence[dict[Any, torch.dtype]],
    ) -> None:
        """Create chunk ``number``, or replace it, and copy existing state to its home."""
        self._offload.wait()
        chunk = _Chunk(unit, params, dtypes, self._homes)
        self._chunks[number : number + 1] = [chunk]
        for place, (slot, kept) in enumerate(zip(chunk.slots, chunk.kept, strict=True)):
            self._slot_of[id(slot.param)] = chunk, place
            self._send_home(optimizer.state, slot, kept)  # Adagrad's constructor creates state.

    def _assign_members(self) -> None:
        """Assign the parameters of each group to the chunk with which they are stepped."""
        groups = self._groups
        for chunk in self._chunks:
            local_of = {id(slot.param): slot.local for slot in chunk.slots}
            members = [[local_of[id(p)] for p in params if id(p) in local_of] for params in groups]
            chunk.members = {index: params for index, params in enumerate(members) if params}
        # Parameters without an offload, and groups without parameters, join the first chunk.
        others = [[p for p in params if id(p) not in self._slot_of] for params in groups]
        self._has_others = any(others)
        first = self._chunks[0]
        first.members = {
            index: [*first.members.get(index, ()), *others[index]]
            for index, params in enumerate(groups)
            if index in first.members or others[index] or not params
        }

    def _check_converted(self) -> None:
        for slices in (chunk.slices for chunk in self._chunks):
            if not slices.are_current:
                slot = next(slot for slot in slices.slots if not slot.is_current)
                raise RuntimeError(
                    f"offload.optimizer_state: expected {slot.param.flat_placement.name or ''} "
                    "as it was when its optimizer was made; found that it was converted. "
                    "Convert the model before the optimizer is made"
                )

    @staticmethod
    @torch.no_grad()
    def _send_home(states: Any, slot: Slot, kept: dict[Any, Tensor]) -> None:
        """Copy the state of a parameter to its home."""
        state = states.get(slot.param, {})
        for key, home in kept.items():
            if (value := state.get(key)) is not None and value is not home:
                slice_within(home).copy_(slot.to_local(key, value)[1])
                state[key] = home

    def _try(
        self,
        optimizer: Any,
        group: dict[str, Any],
        like: Tensor,
    ) -> dict[Any, torch.dtype]:
        """Returns dtypes of the state of ``like`` after two trial steps, by key.

        Raises:
            ValueError: A trial step raised, or its state has another shape or type.
        """
        dtype, device = like.dtype, self._offload.memory.device
        param = torch.nn.Parameter(allocator.zeros(_TRIAL_SHAPE, dtype, device))
        states = entries_of(optimizer)
        for key, value in optimizer.state.get(like, {}).items():
            if isinstance(value, Tensor):
                if value.ndim:
                    value = allocator.zeros(_TRIAL_SHAPE, value.dtype, value.device)
                else:  # Use a constant, whose value is known in a simulation.
                    value = torch.tensor(0, dtype=value.dtype, device=value.device)
            states[param][key] = value
        shadow = self._shadows.make(optimizer, [{**group, "params": [param]}], states, {})
        try:
            devices = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(devices, device_type=device.type):
                for _ in range(2):
                    param.grad = allocator.zeros(_TRIAL_SHAPE, dtype, device)
                    self._shadows.function(shadow)
                self._shadows.function(self._without_parameters(optimizer, {}))
        except Exception as error:
            raise ValueError(
                f"optimizer: expected a step on a parameter of shape {_TRIAL_SHAPE}, from which "
                "the size of its state follows (offload.optimizer_state); found that it raises "
                f"{type(error).__name__}: {error}"
            ) from error
        for key, value in states[param].items():
            is_tensor = isinstance(value, Tensor)
            is_odd = value.numel() != 1 and value.shape != _TRIAL_SHAPE if is_tensor else False
            if is_odd or not (is_tensor or is_plain(value)):
                found = f"shape {tuple(value.shape)}" if is_tensor else type(value).__name__
                raise ValueError(
                    f"optimizer: expected state in tensors of the parameter's shape or of one "
                    "element, or in numbers, since it is offloaded between steps "
                    f"(offload.optimizer_state); found {key!r} of {found} after a step of "
                    f"{type(optimizer).__name__} on a parameter of shape {_TRIAL_SHAPE}"
                )
        return {
            key: value.dtype
            for key, value in states[param].items()
            if isinstance(value, Tensor) and value.shape == _TRIAL_SHAPE
        }

    # Saving and loading.

    def _before_state_dict(self, optimizer: Optimizer) -> None:
        """State dict pre-hook: wait for copies to homes."""
        self._offload.wait()

    def _before_load(self, optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Load pre-hook: take out offloaded state, which torch would move to the device.

        Raises:
            ValueError: See :meth:`_Chunk.large_state`.
        """
        self._refresh(optimizer)
        self._loaded.clear()
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        param_of = dict(zip(saved, params, strict=False))
        rest = {}
        for index, values in state_dict["state"].items():
            param = param_of.get(index)
            found = self._slot_of.get(id(param))
            if param is None or found is None:
                rest[index] = values
                continue
            chunk, place = found
            large = chunk.large_state(place, values)
            rest[index] = {key: value for key, value in values.items() if key not in large}
            self._loaded.append((param, large))
        return {**state_dict, "state": rest}

    @torch.no_grad()
    def _after_load(self, optimizer: Any) -> None:
        """Load post-hook: copy the offloaded state to its homes."""
        self._offload.wait()
        loaded, self._loaded = self._loaded, []
        for param, values in loaded:
            chunk, place = self._slot_of[id(param)]
            optimizer.state.setdefault(param, {}).update(values)
            self._send_home(optimizer.state, chunk.slots[place], chunk.kept[place])
