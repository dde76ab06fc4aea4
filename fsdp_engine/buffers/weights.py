"""The weights of one buffer, from main shards to full compute parameters.

    main[OPTIM] --encode--> wire[PARAM] --gather--> full

``main`` are the main weights, ``wire`` the encoded weights that are sent, and ``full`` the gathered
compute weights. OPTIM and PARAM are the depths of the optimizer state and of the parameters. These
depths and the codec determine which weights are held between uses. There is a class for each case,
which :func:`make_weights` chooses. A codec can have a class of its own.

    ======================  ============================  ====================================
    case                    held between uses             allocated from gather to free
    ======================  ============================  ====================================
    OPTIM equals PARAM,     main[OPTIM]                   full; main is encoded into it:
    and is sharded                                        :class:`GatheredWeights`
    identity codec          wire[PARAM]; main is a view   full, if PARAM is sharded:
                                                          :class:`IdentityWeights`
    cast                    main[OPTIM], wire[PARAM]      full, if PARAM is sharded:
                                                          :class:`KeptWeights`
    ======================  ============================  ====================================

*Refreshing* updates wire[PARAM] from main, once after every change of main. *Unsharding* gathers
the full buffer, for every use. Each is a chain of operations that is built once. If no other
operation must run between a cast and the first gather, both are one operation: the gather has the
codec's function as its source (``sharded_buffer.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.placement import MainShard
from fsdp_engine.buffers.sharded_buffer import BufferContext, Gather, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.comm.lanes import Chain, Ticket
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory.allocator import TransientStorage, alias, begin_together
from fsdp_engine.strategies import AXIS_BELOW_DEPTH


class FullParams(NamedTuple):
    """The full parameters of a buffer, and their memory.

    Attributes:
        storages: The storage that is freed between uses; empty if full parameters are kept.
        target: The buffer for operations that write full parameters.
        read: The buffer for readers. It has memory after compute has waited for a gather
            ([Note: Unread memory] in ``memory/allocator.py``).
        params: The tensors of ``read``, one for each parameter.
    """

    storages: Sequence[TransientStorage]
    target: ShardedBuffer
    read: ShardedBuffer
    params: Sequence[Tensor]


class Weights:
    """Base class of the weights of a buffer. See the module docstring.

    Subclasses implement :meth:`_make_wire`, :meth:`_make_refresh` and :meth:`_make_unshard`.

    Args:
        spec: The layout, the dtypes and the depths of the buffer.
        context: The communicators, the lanes and the memory of the engine.
        codec: The codec of this buffer, which no other buffer uses.
        params: The user's parameters, in the layout's order.
        pending: The pending optimizer step of the buffer.

    Attributes:
        codec, pending: See the arguments.
        main_shard: The shard of the main weights.
        params: The full compute parameters in their own shapes.
        reshards: Whether full parameters are freed between uses.
        needs_refresh: Whether each change of main weights requires a refresh before the next use.
        num_gathers: Number of gathers that provide all weights for a forward and its backward.
        unit_class: The class of units with such weights; None: :class:`~.runtime.unit.Unit`.
        transient_keys: The keys (``storage_keys`` of ``memory/allocator.py``) of storages of full
            parameters that are freed between uses.
    """

    num_gathers = 1
    unit_class: Any = None
    # Whether the codec also writes full parameters through the tensors that modules read.
    _is_written_by_params = False

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        params: Sequence[nn.Parameter],
        pending: PendingStep,
    ) -> None:
        self._spec = spec
        self._allocate_label, self._free_label = f"allocate {spec.label}", f"free {spec.label}"
        self._context = context
        self.codec = codec
        self.pending = pending
        self.reshards = spec.param_depth > 0
        # Tensors that are held between uses, in addition to main_shard.
        self._kept: list[Tensor] = []
        self._wire = self._make_wire()
        self._full = self._make_full(self._wire)
        self.params = self._full.params
        self._storages = list(self._full.storages)
        self.main_shard = self._make_main()
        self._main = self.main_shard.buffer
        codec.prepare(params, self._pieces(), self._split_groups(), context.memory.device)
        # Storages that only a gather needs. They are allocated before its chain runs, and freed
        # when compute has waited for it.
        self._refresh_memory = list(self.main_shard.memory)
        self._unshard_memory: list[TransientStorage] = []
        self._refresh = self._make_refresh()
        self.needs_refresh = bool(self._refresh)
        self._unshard = self._make_unshard() if self.reshards else Chain()
        staged = {id(each): each for each in (*self._refresh_memory, *self._unshard_memory)}
        self._staged = list(staged.values())
        self._unshard_memory += self._storages
        self.transient_keys = [storage.key for storage in self._storages]
        self._reads = [self._full.target.tensor]
        for storage in (*self._storages, *self._staged):
            if storage.filled:
                storage.free()
        # The version of `main` that compute weights were last updated from.
        self._seen_version = -1
        self._num_marks = 0

    @property
    def main(self) -> ShardedBuffer:
        """The main weights at the depth of OPTIM. Reading this makes compute wait for a pending
        optimizer step."""
        self.pending.finish()
        return self._main

    @property
    def rest_bytes(self) -> int:
        """Bytes that are held between uses: main weights, and compute weights that are kept."""
        persistent = (*self._kept, *self.main_shard.persistent)
        storages = {t.untyped_storage().data_ptr(): t for t in persistent}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes that are allocated for full parameters from gather to free."""
        return sum(storage.num_bytes for storage in self._full.storages)

    @property
    def is_current(self) -> bool:
        """Whether compute weights, if there are any, are up to date with the main weights."""
        return self._seen_version == self._main.tensor._version

    def belong_to(self, buffer: Any) -> None:
        """Called when the :class:`~.param_and_grad_buffer.ParamAndGradBuffer` of these weights,
        ``buffer``, has been built."""

    def check_written(self, name: str) -> None:
        """Check that values which forward has written into full parameters can become main weights.

        Args:
            name: The name of a parameter that was written.

        Raises:
            RuntimeError: The codec cannot decode such values.
        """

    @property
    def can_be_written(self) -> bool:
        """Whether forward may write full parameters. False: :meth:`check_written` raises."""
        return True

    @torch.no_grad()
    def take_full(self) -> None:
        """Copy this rank's shard of full compute weights, which modules have written, into the main
        weights. Where a compute weight equals the rounded main weight, the main weight is kept, so
        that elements which were not written lose no precision."""
        main, own = self.main.tensor, self._full.read.narrow(self._spec.optim_depth)
        if begin_together(main, own):
            return
        was_current = self.is_current
        written = own.to(main.device)
        changed = main.to(written.dtype) != written
        main.copy_(torch.where(changed, written.to(main.dtype), main))
        if was_current and not self.needs_refresh:
            self._seen_version = main._version  # compute weights equal the main weights

    def mark_stale(self) -> None:
        """Record a change of main weights that does not increase their version counter."""
        self._seen_version = -1
        self._num_marks += 1

    @property
    def changes(self) -> tuple[int, int]:
        """A value that changes whenever main weights change."""
        return self._main.tensor._version, self._num_marks

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """Returns the full parameter that replaces the user's parameter ``param`` in modules."""
        return self.codec.bind(param, [self.params[index]])

    def unregister(self) -> None:
        """Remove the memory that is held between uses from the ledger. It is freed with this
        object."""
        for tensor in self._kept:
            self._context.memory.unregister(tensor, "model")
        self.main_shard.unregister()

    def gather(self, compute_now: Ticket | None = None, *, is_held: bool = False) -> list[Ticket]:
        """Issue the gather of full parameters. Returns the tickets to wait for.

        Args:
            compute_now: A ticket of all work that compute was given so far; None: this method
                records one.
            is_held: The parameters are gathered already. They are gathered again only if main
                weights have changed.
        """
        refreshed: list[Ticket] = []
        stepped = self.pending.tickets
        if self._main.tensor._version != self._seen_version:
            refreshed = self._bring_up_to_date(compute_now)
            is_held = False
        if not self.reshards:
            return [*refreshed, *stepped]
        # The gather follows the refresh, so the ticket of the refresh is not needed.
        return [*stepped, *self._start_gathers(refreshed, stepped, is_held=is_held)]

    def _start_gathers(
        self, refreshed: Sequence[Ticket], stepped: Sequence[Ticket], *, is_held: bool
    ) -> Sequence[Ticket]:
        """Issue the missing gathers of full parameters. Returns their tickets.

        Args:
            refreshed: The ticket of a refresh, which gathers must follow; empty: no refresh.
            stepped: The tickets of a pending optimizer step. A refresh waits for them. Without a
                refresh, the gathers must wait for them.
            is_held: The parameters are gathered already.
        """
        if is_held:
            return ()
        return (self._start_gather(self._unshard, self._unshard_memory, refreshed, stepped),)

    def _start_gather(
        self,
        chain: Chain,
        memory: Sequence[TransientStorage],
        refreshed: Sequence[Ticket],
        stepped: Sequence[Ticket],
    ) -> Ticket:
        after = [*refreshed]
        if self._fill(memory) or not after:
            after.append(self._context.lanes.compute.record())
        if not refreshed:
            after += stepped
        return chain.run(after)

    def _bring_up_to_date(self, compute_now: Ticket | None) -> list[Ticket]:
        """Issue the refresh of compute weights that are held between uses. Returns its ticket, or
        an empty list if there is nothing to refresh."""
        self._seen_version = self._main.tensor._version
        if not self.needs_refresh:
            return []
        if self._fill(self._refresh_memory):
            compute_now = None  # compute may have used the memory after this ticket was recorded
        now = compute_now or self._context.lanes.compute.record()
        return [self._refresh.run((now, *self.pending.tickets))]

    def gathered(self) -> None:
        """Make full parameters readable. Called when compute has waited for the gather."""
        if self.pending.tickets:
            self.pending.finish()
        for storage in self._staged:
            self._free(storage)
        for storage in self._storages:
            if storage.filled:
                storage.expose()
        if self.codec.follows_gathers:
            self.codec.after_gather()

    def release(self) -> None:
        """Free the full parameters. All reads of them must have been submitted to compute."""
        filled = [storage for storage in self._storages if storage.filled]
        if filled and self.codec.follows_gathers:
            self.codec.before_release()
        for storage in (*filled, *self._staged):
            self._free(storage)

    def note_access(self) -> None:
        """Declare on the compute lane that the model reads full parameters from now on."""
        self._context.lanes.compute.access(reads=self._reads)

    def _fill(self, storages: Sequence[TransientStorage]) -> bool:
        """Allocate memory that a chain writes, or, if it is allocated, withdraw it from readers.
        Returns whether any memory was allocated. If so, the chain must follow all work that compute
        was given so far.

        The memory is allocated and freed on the compute lane, like that of the model, so that the
        weights and the model can reuse each other's memory.
        """
        allocates = False
        for storage in storages:
            if not storage.filled:
                allocates = True
                compute = self._context.lanes.compute
                compute.manage(self._allocate_label, storage.fill, storage)
            else:
                storage.withdraw()
        return allocates

    def _free(self, storage: TransientStorage) -> None:
        """Free the memory of ``storage``. Compute must have waited for all writes, and all reads
        must have been submitted to compute."""
        if storage.filled:
            compute = self._context.lanes.compute
            compute.manage(self._free_label, storage.free, storage)

    @property
    def _at(self) -> Coordinate:
        return self._context.mesh_communicators.mesh.coordinate

    @property
    def _full_dtype(self) -> torch.dtype:
        """The dtype of full parameters."""
        return self.codec.wire_dtype

    def _make_wire(self) -> ShardedBuffer | None:
        """Allocate the encoded weights that are held between uses; None: there are none."""
        raise NotImplementedError

    def _make_refresh(self) -> Chain:
        """Build the chain from main shards to the compute weights that are held between uses.
        Empty: there are none, or they are the main weights."""
        raise NotImplementedError

    def _make_unshard(self) -> Chain:
        """Build the chain to full parameters, from the compute weights that are held between uses,
        or from main shards if there are none. Storages that the chain needs in addition to those of
        full parameters are added to ``_unshard_memory``."""
        raise NotImplementedError

    def _make_main(self) -> MainShard:
        main: MainShard = self._context.placement.make_main(self._spec, self._context, self.codec)
        return main

    def _keep(self, numel: int, dtype: torch.dtype, *, sent: bool = False) -> Tensor:
        """Allocate a tensor that is held between uses."""
        self._kept.append(self._context.memory.persistent(numel, dtype, "model", sent=sent))
        return self._kept[-1]

    def _make_kept_wire(self) -> ShardedBuffer:
        spec = self._spec
        start, stop = spec.layout.range(spec.param_depth, self._at)
        flat = self._keep(stop - start, self.codec.wire_dtype, sent=spec.optim_depth > 0)
        return ShardedBuffer(spec.layout, self._at, spec.param_depth, flat)

    def _make_full(self, wire: ShardedBuffer | None) -> FullParams:
        """Allocate full parameters. Their storage is left filled, because views can only be created
        over allocated memory.

        Args:
            wire: The encoded weights that are held between uses. If parameters are not sharded,
                these are the full parameters.
        """
        layout, at, dtype = self._spec.layout, self._at, self._full_dtype
        if not self.reshards:
            target = wire or ShardedBuffer(layout, at, 0, self._keep(layout.numel, dtype))
            params = [alias(target.full(i)) for i in range(len(layout.slots))]
            return FullParams((), target, target, params)
        error = None if self._is_written_by_params else read_error(self._spec.label)
        storage = self._context.memory.transient(layout.numel, dtype, "full", read_error=error)
        storage.fill()
        target = ShardedBuffer(layout, at, 0, storage.view(0, (layout.numel,)))
        storage.expose()
        read = ShardedBuffer(layout, at, 0, storage.view(0, (layout.numel,)))
        params = [storage.view(slot.offset, slot.shape) for slot in layout.slots]
        storage.withdraw()
        return FullParams((storage,), target, read, params)

    def _pieces(self) -> list[Piece]:
        layout, depth, at = self._spec.layout, self._spec.optim_depth, self._at
        base, _ = layout.range(depth, at)
        pieces = []
        for index, slot in enumerate(layout.slots):
            low, high = layout.tensor_range(index, depth, at)
            pieces.append(Piece(index, low, high, max(slot.offset + low - base, 0)))
        return pieces

    def _split_groups(self) -> list[ProcessGroup]:
        axes = AXIS_BELOW_DEPTH[: self._spec.optim_depth]
        comms = [self._context.mesh_communicators.comms[axis].gather for axis in axes]
        return [comm.group for comm in comms if comm is not None]


class GatheredWeights(Weights):
    """Only main weights are held between uses. Each gather encodes and sends them."""

    def _make_wire(self) -> None:
        return None

    def _make_refresh(self) -> Chain:
        return self.main_shard.prepare()

    def _make_unshard(self) -> Chain:
        chain, depth = Chain(), self._spec.param_depth
        self._unshard_memory += self.main_shard.memory
        how = self.main_shard.source()
        self._full.target.gather(chain, self._context, depth, 0, how)
        return chain


class KeptWeights(Weights):
    """Compute weights are held between uses, in addition to main weights."""

    _wire: ShardedBuffer

    def _make_wire(self) -> ShardedBuffer:
        return self._make_kept_wire()

    def _make_refresh(self) -> Chain:
        chain, spec = Chain(), self._spec
        how = self._refreshing()
        self._wire.gather(chain, self._context, spec.optim_depth, spec.param_depth, how)
        return chain

    def _refreshing(self) -> Gather:
        return self.main_shard.source()

    def _make_unshard(self) -> Chain:
        chain, spec = Chain(), self._spec
        how = Gather(spec.label, spec.tag, self._wire.tensor)
        self._full.target.gather(chain, self._context, spec.param_depth, 0, how)
        return chain


class IdentityWeights(KeptWeights):
    """Main weights are a view of the compute weights that are held between uses."""

    def _make_main(self) -> MainShard:
        main = alias(self._wire.narrow(self._spec.optim_depth))
        return MainShard(self._spec, self._context, self.codec, main)

    def _refreshing(self) -> Gather:
        return Gather(self._spec.label, self._spec.tag)  # main weights are already in place


def make_weights(
    spec: BufferSpec,
    context: BufferContext,
    codec: ParamCodec,
    params: Sequence[nn.Parameter],
    pending: PendingStep,
) -> Weights:
    """Returns the weights of a buffer, of the class for its depths and its codec."""
    kind: type[Weights] | None = codec.weights_class
    if kind is None:
        if spec.optim_depth == spec.param_depth > 0:
            kind = GatheredWeights
        else:
            kind = IdentityWeights if codec.is_identity else KeptWeights
    return kind(spec, context, codec, params, pending)


def read_error(label: str) -> str:
    """Returns the error message for functions that read full parameters at a time when they are
    not gathered."""
    return (
        f"{label}: expected its full parameters to be read within its forward, or in its backward; "
        "found a function that reads them at another time, when they are sharded or their "
        "all-gather is in flight. The engine gathers them for backward when autograd reaches a "
        "tensor that forward returned, or kept in an attribute or an argument. Let forward return "
        "the tensor that the loss uses, or keep the unit unsharded until its backward (set "
        "options.keeps_after_forward = True for the unit in engine.units)"
    )
