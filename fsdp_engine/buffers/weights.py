"""The weights of one buffer, from main shards to full compute parameters.

    main[OPTIM] --encode--> wire[OPTIM] --gather--> wire[PARAM] --gather--> full

The buffers that are held depend only on the depths of OPTIM and PARAM and on the codec:

    ======================  ============================  =====================================
    case                    at rest                       from gather to free
    ======================  ============================  =====================================
    identity codec          wire[PARAM]; main is a view   full, unless PARAM is full (depth 0)
    cast, PARAM full        main[OPTIM], wire = compute   nothing
    cast, OPTIM at PARAM    main[OPTIM]                   full; main is cast into it
    cast, OPTIM below       main[OPTIM], wire[PARAM]      full
    codec that encodes      main[OPTIM], wire[PARAM]      full
    once, PARAM sharded
    decoding codec          as above, with the full       the full wire while it is decoded
                            compute weights at depth 0
    ======================  ============================  =====================================

*Refreshing* updates wire[PARAM] from main, once after every change of main. *Unsharding* gathers
the full buffer, for every use. Either is empty where both of its buffers are the same, and is a
chain of operations that is built once. Encoding and the first gather are one operation where no
other has to be between them: such a gather takes the encoding as its source (``redistribute.py``).

With ``Offload.main_weights`` main weights lie at a *home* outside of the device's memory, unless
they are a part of compute weights that are kept. Gathers bring them from there:

    identity codec          home --> this rank's part of full
    cast, OPTIM at PARAM    home --cast by the host--> home of compute weights --> part of full
    others; a disk          home --> transient memory --encode--> as above

The second is for host memory: microbatches bring compute weights more often than main weights
change. A disk would write them for that.

Each encoding of the codec ([Note: Encodings] in ``codecs/base.py``) has a wire and a full buffer.
One refresh serves all encodings; only the encodings that the next use reads are unsharded.

[Note: Gathers through scratch memory]
A codec with two encodings would gather both if full weights persist, after an all-reduce of amaxes.
If gradients are not sharded either, their memory is unused between a step and the next backward,
and large enough for the weights in their nominal dtype:

    main[OPTIM] --cast--> scratch[OPTIM] --gather--> scratch --encode, both encodings--> wires, full

One gather and no amaxes: every rank computes the scales from full weights, and so the same bytes.
Afterwards the gradients' memory is filled with zeros, because gradients may be added to it. If the
memory contains gradients (a forward before ``zero_grad``), separate memory is used; the collectives
are the same, so ranks may differ in this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.redistribute import BufferContext, Gather, ShardedBuffer, redistribute
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.codecs.base import ENCODINGS
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain, Lane, Ticket
from fsdp_engine.comm.pending_steps import PendingStep
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory.allocator import TransientStorage, alias, begin_together
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Role, Strategy

if TYPE_CHECKING:
    from fsdp_engine.memory.home import Home

# A line of whole gradients as one of that dtype; None while gradients need it.
Scratch = Callable[[torch.dtype], Tensor | None]


class ThroughScratch:
    """See the module docstring.

    Args:
        spec, context: of the buffer.
        codec: has a ``values_dtype``.
        main: main weights.
        targets: the full lines, which persist, of all encodings.
        scratch: memory to go through.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        main: ShardedBuffer,
        targets: Sequence[ShardedBuffer],
        scratch: Scratch,
    ) -> None:
        assert codec.values_dtype is not None
        self._spec = spec
        self._context = context
        self._codec = codec
        self._main = main
        self._targets = targets
        self._scratch = scratch
        numel = spec.layout.numel
        self._own: TransientStorage = context.memory.transient(numel, codec.values_dtype, "full")
        with self._own.while_filled() as own:
            self._through_own = self._make_chain(own.view(0, (numel,)), is_own=True)
        self._line: Tensor | None = None
        self._through_gradients = Chain()

    def refresh(self) -> Ticket:
        """Bring full weights up to date."""
        assert self._codec.values_dtype is not None
        line, compute = self._scratch(self._codec.values_dtype), self._context.lanes.compute
        if line is None:
            compute.manage(f"allocate {self._spec.label}", self._own.fill, self._own)
            return self._through_own.run((compute.record(),))
        if line is not self._line:
            self._line = line
            self._through_gradients = self._make_chain(line, is_own=False)
        # Their memory may have come, with zeros, just now.
        return self._through_gradients.run((compute.record(),))

    def finish(self) -> None:
        """Compute has waited for the refresh."""
        if self._own.filled:
            compute = self._context.lanes.compute
            compute.manage(f"free {self._spec.label}", self._own.drain, self._own)

    def _make_chain(self, line: Tensor, *, is_own: bool) -> Chain:
        chain, spec, main, codec = Chain(), self._spec, self._main, self._codec
        offsets = [slot.offset for slot in spec.layout.slots]

        def cast(part: Tensor) -> Steps:
            part.copy_(main.tensor)
            yield from ()

        def encode() -> Steps:
            yield from codec.encode_whole(line, offsets)
            if not is_own:
                line.zero_()

        values = ShardedBuffer(spec.layout, main.at, 0, line)
        how = Gather(spec.label, spec.tag, cast, reads=[main.tensor], writes=[*codec.state])
        redistribute(chain, self._context, values, main.depth, 0, how)
        writes = [target.tensor for target in self._targets]
        chain.add(
            self._context.lanes.inner_gather,
            f"encode {spec.label}",
            encode,
            reads=[line],
            writes=[*([] if is_own else [line]), *writes, *codec.state],
        )
        return chain


class Encoding:
    """One encoding of a buffer's weights.

    Attributes:
        wire: the bytes that are kept at rest, at the depth of PARAM; None: none are.
        storage: the memory of its full parameters; None where they are never freed.
        target: its full parameters, for operations that write them.
        read: the same for readers, from when compute has waited for a gather
            ([Note: Unread memory] in ``memory/allocator.py``).
        params: the tensors of ``read``, one for each.
        memory: storages that need memory while ``target`` is gathered.
        unshard: gathers ``target``; None where parameters are not sharded.
    """

    def __init__(
        self,
        wire: ShardedBuffer | None,
        storage: TransientStorage | None,
        target: ShardedBuffer,
        read: ShardedBuffer,
        params: list[Tensor],
    ) -> None:
        self.wire = wire
        self.storage = storage
        self.target = target
        self.read = read
        self.params = params
        self.memory: list[TransientStorage] = [] if storage is None else [storage]
        self.unshard: Chain | None = None


@dataclass(frozen=True)
class FullWire:
    """The full wire while it is decoded: its storage, and the buffer over it."""

    storage: TransientStorage
    line: ShardedBuffer


class Weights:
    """See the module docstring.

    Args:
        spec, context: of the buffer.
        codec: of this buffer alone.
        params: the user's parameters, in the layout's order.
        scratch: memory of gradients that values can be gathered into before they are encoded.
        pending: see [Note: Steps beside forward] in ``comm/pending_steps.py``.

    Attributes:
        pending: the step that compute has not waited for.
        home: where they lie, if that is not the device's memory.
        params: full compute parameters of the first encoding, in their own shapes.
        reshards: whether full parameters are freed between uses.
        needs_refresh: whether a change of main weights has to be sent or cast before use.
        transient_keys: keys (``storage_keys`` of ``memory/allocator.py``) of the full parameters'
            storages that are freed between uses.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        params: Sequence[nn.Parameter],
        pending: PendingStep,
        scratch: Scratch | None = None,
    ) -> None:
        self._spec = spec
        self._allocate_label, self._free_label = f"allocate {spec.label}", f"free {spec.label}"
        self._context = context
        self.codec = codec
        self.pending = pending
        memory, optim_depth = context.memory, spec.optim_depth
        self.reshards = spec.param_depth > 0
        self.home = self._make_home()
        full_dtype = spec.kind.dtypes.compute if codec.decodes else codec.wire_dtype
        self._encodings = [self._make_encoding(full_dtype) for _ in range(codec.num_encodings)]
        self.params = self._encodings[0].params
        # The full parameters that modules read where there is one encoding.
        self._first_target: Sequence[Tensor] = (self._encodings[0].target.tensor,)
        main_dtype, numel = spec.kind.dtypes.main, self._numel(optim_depth)
        self._brought: TransientStorage | None = None
        self._sent_home = self._make_sent_home()
        if self.home is not None:
            main = alias(self.home.bytes.view(main_dtype))
            if self._sent_home is None:
                self._brought = memory.transient(numel, main_dtype, "full")
        elif codec.is_identity:
            assert self._encodings[0].wire is not None
            main = alias(self._encodings[0].wire.narrow(optim_depth))
        else:
            main = memory.persistent(numel, main_dtype, "main")
        self._main = ShardedBuffer(spec.layout, self._at, optim_depth, main)
        self._full_wire = self._make_full_wire() if codec.decodes else None
        codec.prepare(params, self._pieces(), self._split_groups(), memory.device)
        is_cast_by_host = self._sent_home is not None and not codec.is_identity
        persists = self._encodings[0].wire is not None or not self.reshards or is_cast_by_host
        changes = not (codec.is_identity and optim_depth == spec.param_depth)
        self.needs_refresh = persists and changes
        self._refresh = self._make_refresh() if self.needs_refresh else None
        self._through_scratch: ThroughScratch | None = None
        if scratch is not None and not self.reshards and optim_depth > 0:
            lines = [encoding.target for encoding in self._encodings]
            self._through_scratch = ThroughScratch(spec, context, codec, self._main, lines, scratch)
        for encoding in self._encodings:
            if self.reshards:
                encoding.unshard = self._make_unshard(encoding)
                if self._full_wire is not None:
                    encoding.memory.append(self._full_wire.storage)
                if self._brought is not None and encoding.wire is None:
                    encoding.memory.append(self._brought)
        self._storages = [each.storage for each in self._encodings if each.storage is not None]
        self.transient_keys = [storage.key for storage in self._storages]
        for storage in self._storages:
            storage.drain()
        if self._full_wire is not None:
            self._full_wire.storage.drain()
        # Compared with the version of `main` to find out whether the wire is out of date.
        self._seen_version = -1
        self._num_marks = 0

    @property
    def main(self) -> ShardedBuffer:
        """Main weights at the depth of OPTIM; compute waits for a pending step. The tensor has a
        version counter of its own, so that edits in place are distinguished from gathers into the
        same memory."""
        self.pending.finish()
        return self._main

    @property
    def num_encodings(self) -> int:
        """See [Note: Encodings] in ``codecs/base.py``."""
        return len(self._encodings)

    @property
    def rest_bytes(self) -> int:
        """Bytes held at rest: main weights, and compute weights as far as they are kept."""
        persistent = [self._main.tensor] if self.home is None else []
        for encoding in self._encodings:
            if encoding.wire is not None:
                persistent.append(encoding.wire.tensor)
            if not self.reshards:
                persistent.append(encoding.target.tensor)
        storages = {t.untyped_storage().data_ptr(): t for t in persistent}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes of one encoding's full parameters from gather to free, without those at rest."""
        storage = self._encodings[0].storage
        return storage.num_bytes if storage is not None else 0

    @property
    def num_wires(self) -> int:
        """Number of gathers that update all encodings."""
        return 1 if self._through_scratch is not None else self.num_encodings

    @property
    def is_current(self) -> bool:
        """Whether gathered weights, if there are any, equal the main weights."""
        return self._seen_version == self._main.tensor._version

    @torch.no_grad()
    def take_full(self) -> None:
        """Take this rank's part of the full compute weights, which modules have written, into the
        main weights. A main weight stays as it is where the compute weight is its rounded value, so
        that elements which were not written lose no precision."""
        main, own = self.main.tensor, self._encodings[0].read.narrow(self._spec.optim_depth)
        if begin_together(main, own):
            return
        was_current = self.is_current
        written = own.to(main.device)
        changed = main.to(written.dtype) != written
        main.copy_(torch.where(changed, written.to(main.dtype), main))
        if was_current and not self.needs_refresh:
            self._seen_version = main._version  # full weights equal the main weights again

    def mark_stale(self) -> None:
        """Main weights changed in a way that their version counter does not show."""
        self._seen_version = -1
        self._num_marks += 1

    @property
    def changes(self) -> tuple[int, int]:
        """A value that differs from earlier ones if main weights have changed since."""
        return self._main.tensor._version, self._num_marks

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """Returns the parameter that modules compute with in place of ``param``, the user's
        parameter ``index``."""
        return self.codec.bind(param, [encoding.params[index] for encoding in self._encodings])

    def give_back(self) -> None:
        """Remove the memory held at rest from the ledger; it is freed with this object."""
        memory = self._context.memory
        for encoding in self._encodings:
            kept = encoding.wire if encoding.wire is not None or self.reshards else encoding.target
            if kept is not None:
                memory.give_back(kept.tensor, "model")
        if not self.codec.is_identity and self.home is None:
            memory.give_back(self._main.tensor, "main")

    def gather(self, phase: int, held: int, compute_now: Ticket | None = None) -> list[Ticket]:
        """Gather full parameters; returns tickets to wait for.

        Args:
            phase: of the next use: see ``codecs/base.py``.
            held: phases whose full parameters are gathered, or in flight; 0: none.
            compute_now: ticket of the work that compute has so far; None: it is recorded here.
        """
        refreshed: list[Ticket] = []
        stepped = self.pending.tickets
        if self._main.tensor._version != self._seen_version:
            refreshed = self._bring_up_to_date(compute_now)
            held = 0
        if not self.reshards:
            return [*refreshed, *stepped]
        tickets = [*stepped]  # who waits for these and the others has waited for the refresh
        for encoding in self._missing_encodings(phase, held):
            assert encoding.unshard is not None
            after = [*refreshed]
            if self._fill(encoding.memory) or not after:
                after.append(self._context.lanes.compute.record())
            if not refreshed:
                after += stepped
            tickets.append(encoding.unshard.run(after))
        return tickets

    def _bring_up_to_date(self, compute_now: Ticket | None) -> list[Ticket]:
        """Update the compute weights that are kept at rest from the main weights."""
        self._seen_version = self._main.tensor._version
        if self._through_scratch is not None:
            self.pending.finish()  # it reads the gradients
            return [self._through_scratch.refresh()]
        if self._refresh is None:
            return []
        storages: list[TransientStorage] = [] if self._brought is None else [self._brought]
        if not self.reshards:
            storages += [] if self._full_wire is None else [self._full_wire.storage]
        elif self.codec.needs_whole_line:
            storages += self._storages
        if self._fill(storages):
            compute_now = None  # memory that compute has used since
        now = compute_now or self._context.lanes.compute.record()
        return [self._refresh.run((now, *self.pending.tickets))]

    def gathered(self, phases: int, *, for_backward: bool) -> None:
        """Compute has waited for the gather.

        Args:
            phases: whose full parameters are gathered.
            for_backward: a backward reads the gathered parameters.
        """
        self.pending.finish()
        self._drain_staged()
        if self._through_scratch is not None:
            self._through_scratch.finish()
        if self.codec.needs_whole_line:
            self.free_all_but(phases)  # memory that encodings were encoded into
        for storage in self._storages:
            if storage.filled:
                storage.expose()
        self.codec.after_gather(for_backward=for_backward or not self.reshards)

    def release(self) -> None:
        """Free the full parameters once compute is done with them."""
        filled = [storage for storage in self._storages if storage.filled]
        if filled:
            self.codec.before_release()
        for storage in filled:
            self._drain(storage)
        self._drain_staged()

    def free_all_but(self, phases: int) -> None:
        """Free the encodings that no use of ``phases`` reads."""
        kept = self._encodings_of(phases)
        for encoding in self._encodings:
            if encoding.storage is not None and encoding not in kept:
                self._drain(encoding.storage)

    def _encodings_of(self, phases: int) -> Sequence[Encoding]:
        if len(self._encodings) == 1:
            return self._encodings
        return [self._encodings[number] for number in ENCODINGS[phases]]

    def _missing_encodings(self, phase: int, held: int) -> Sequence[Encoding]:
        if not held:
            return self._encodings_of(phase)
        if len(self._encodings) == 1 or not phase & ~held:
            return ()
        return self._encodings_of(phase & ~held)

    def note_access(self, phases: int) -> None:
        """Report to the compute lane that the model reads full parameters from here on.

        Args:
            phases: whose full parameters are gathered.
        """
        reads = self._first_target
        if len(self._encodings) > 1:
            encodings = self._encodings_of(phases) if self.reshards else self._encodings
            reads = [encoding.target.tensor for encoding in encodings]
        self._context.lanes.compute.access(reads=reads)

    def _fill(self, storages: Sequence[TransientStorage]) -> bool:
        """Allocate memory that a chain writes, and withdraw it from readers; returns whether any
        had to be allocated. If so, the chain must be ordered behind the work that compute has so
        far.

        The memory is compute's own, as that of activations, so that either can reuse the other's.
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

    def _drain(self, storage: TransientStorage) -> None:
        """Free its memory. Compute has waited for all writes, and all reads were submitted to
        compute before."""
        if storage.filled:
            compute = self._context.lanes.compute
            compute.manage(self._free_label, storage.drain, storage)

    def _drain_staged(self) -> None:
        """Free what only a gather needs."""
        if self._full_wire is not None:
            self._drain(self._full_wire.storage)
        if self._brought is not None:
            self._drain(self._brought)

    @property
    def _at(self) -> Coordinate:
        return self._context.mesh_communicators.mesh.coordinate

    def _make_encoding(self, full_dtype: torch.dtype) -> Encoding:
        """Make an encoding. Its storage is left filled: views need memory when they are made."""
        layout, codec, depth = self._spec.layout, self.codec, self._spec.param_depth
        memory, at = self._context.memory, self._at
        wire = None
        # At depth 0 the decoded weights are kept at rest, not the wire.
        persists = codec.is_identity or codec.encodes_once or self._spec.optim_depth > depth
        if codec.is_identity and self.home is not None:
            persists = False
        if (persists or not self.reshards) and (self.reshards or not codec.decodes):
            sent = self._spec.optim_depth > 0
            flat = memory.persistent(self._numel(depth), codec.wire_dtype, "model", sent=sent)
            wire = ShardedBuffer(layout, at, depth, flat)
        storage = None
        if self.reshards:
            # A codec may also write through the tensors that modules read.
            error = None if codec.needs_whole_line else read_error(self._spec.label)
            storage = memory.transient(layout.numel, full_dtype, "full", read_error=error)
            storage.fill()
            target = ShardedBuffer(layout, at, 0, storage.view(0, (layout.numel,)))
            storage.expose()
            read = ShardedBuffer(layout, at, 0, storage.view(0, (layout.numel,)))
            params = [storage.view(slot.offset, slot.shape) for slot in layout.slots]
            storage.withdraw()
        else:
            target = read = wire or ShardedBuffer(
                layout, at, 0, memory.persistent(layout.numel, full_dtype, "model")
            )
            params = [alias(target.full(i)) for i in range(len(layout.slots))]
        return Encoding(wire, storage, target, read, params)

    def _make_home(self) -> Home | None:
        offloading = self._context.offloading
        homes = None if offloading is None else offloading.main_weights
        if homes is None or not can_leave_device(self._spec.strategy, self.codec):
            return None
        return homes.make(bytes_of_main(self._spec, self._at), self._context.lanes.drain)

    def _make_sent_home(self) -> Home | None:
        """The home of the bytes that are gathered; None: the device encodes them."""
        spec, codec, offloading = self._spec, self.codec, self._context.offloading
        if self.home is None or codec.is_identity:
            return self.home
        assert offloading is not None
        assert offloading.main_weights is not None
        if not (offloading.casts_at_home and is_cast_at_home(spec.strategy, codec)):
            return None
        num_bytes = self._numel(spec.param_depth) * codec.wire_dtype.itemsize
        return offloading.main_weights.make(num_bytes, self._context.lanes.drain)

    def _encoded(self) -> Gather:
        """A gather of main weights, encoded by a codec of one encoding."""
        spec, codec, main, home = self._spec, self.codec, self._main.tensor, self.home
        if home is None:
            return encoded(spec, codec, self._main)
        if (sent := self._sent_home) is not None:

            def bring(part: Tensor) -> Steps:
                return sent.bring(part.view(torch.uint8))

            return Gather(spec.label, spec.tag, bring, reads=[sent.bytes])
        assert self._brought is not None
        with self._brought.while_filled():
            brought = self._brought.view(0, (self._brought.numel,))
            brought_bytes = brought.view(torch.uint8)

        def bring_and_encode(wire: Tensor) -> Steps:
            yield from home.bring(brought_bytes)
            yield from codec.encode(brought, (wire,))

        writes = [brought, *codec.state]
        return Gather(spec.label, spec.tag, bring_and_encode, reads=[main], writes=writes)

    def _make_full_wire(self) -> FullWire:
        layout = self._spec.layout
        storage = self._context.memory.transient(layout.numel, self.codec.wire_dtype, "full")
        storage.fill()
        line = ShardedBuffer(layout, self._at, 0, storage.view(0, (layout.numel,)))
        return FullWire(storage, line)

    def _make_refresh(self) -> Chain:
        """From main shards to the compute weights that are kept at rest."""
        chain, spec = Chain(), self._spec
        lane, depths = self._context.lanes.encode, (spec.optim_depth, spec.param_depth)
        first = self._encodings[0]
        if self._sent_home is not None:
            sent = self._sent_home.bytes.view(self.codec.wire_dtype)
            cast = partial(self.codec.encode, self._main.tensor, (sent,))
            chain.add(lane, f"encode {spec.label}", cast, reads=[self._main.tensor], writes=[sent])
            return chain
        how = self._encoded()
        if self.codec.needs_whole_line:
            wires = [(each.target, each.wire) for each in self._encodings if each.wire is not None]
            encode_in_whole_lines(chain, lane, spec.label, self.codec, self._main, wires)
            for _, wire in wires:
                there = Gather(spec.label, spec.tag)
                redistribute(chain, self._context, wire, *depths, there)
        elif first.wire is not None:
            redistribute(chain, self._context, first.wire, *depths, how)
        else:
            assert self._full_wire is not None
            redistribute(chain, self._context, self._full_wire.line, *depths, how)
            self._decode(chain, first)
        return chain

    def _make_unshard(self, encoding: Encoding) -> Chain:
        """From the compute weights that are kept at rest, else from main shards, to the full
        ones."""
        chain, spec = Chain(), self._spec
        how = self._encoded()
        if encoding.wire is not None:
            how = Gather(spec.label, spec.tag, encoding.wire.tensor)
        line = self._full_wire.line if self._full_wire is not None else encoding.target
        redistribute(chain, self._context, line, spec.param_depth, 0, how)
        if self._full_wire is not None:
            self._decode(chain, encoding)
        return chain

    def _decode(self, chain: Chain, encoding: Encoding) -> None:
        assert self._full_wire is not None
        lane, target = self._context.lanes.inner_gather, encoding.target
        decode(chain, lane, self._spec.label, self.codec, self._full_wire.line, target)

    def _numel(self, depth: int) -> int:
        start, stop = self._spec.layout.range(depth, self._at)
        return stop - start

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


def read_error(label: str) -> str:
    """The error of a function that reads full parameters without the engine's knowledge."""
    return (
        f"{label}: expected its full parameters to be read within its forward, or in its backward "
        "after a gradient of a tensor that its forward returned, or kept in an attribute or an "
        "argument; found a function that reads them at another time, when they are sharded or "
        "their all-gather is in flight. Return the tensor that the loss uses from forward, or keep "
        "the unit unsharded until its backward (options.keeps_after_forward of engine.units)"
    )


def bytes_of_main(spec: BufferSpec, at: Coordinate) -> int:
    """Bytes of main weights on the rank at ``at``."""
    start, stop = spec.layout.range(spec.optim_depth, at)
    return (stop - start) * spec.kind.dtypes.main.itemsize


def can_leave_device(strategy: Strategy, codec: ParamCodec) -> bool:
    """Whether main weights can lie elsewhere: they are no part of compute weights that are kept."""
    if codec.is_identity:
        return strategy.depth(Role.OPTIM) == strategy.depth(Role.PARAM) > 0
    return not codec.needs_whole_line and codec.num_encodings == 1


def check_leaves_device(
    strategy: Strategy, codec: ParamCodec, main: torch.dtype, of: str = ""
) -> None:
    """Check that trainable main weights can lie in host memory beside an accelerator.

    Args:
        main: their dtype.
        of: "of" and their unit, for the error.

    Raises:
        ValueError: they would stay on the accelerator, and their gradients would not.
    """
    if not can_leave_device(strategy, codec):
        named = f" {of}" if of else ""
        raise ValueError(
            f"offload.main_weights: expected main weights{named} that are no part of compute "
            "weights on the device: the level optim_grads_params, or another param_dtype; found "
            f"{strategy} with both in {main}"
        )


def is_cast_at_home(strategy: Strategy, codec: ParamCodec) -> bool:
    """Whether compute weights lie at a home in host memory, too, beside main weights there."""
    encodes = codec.is_identity or codec.encodes_once or codec.decodes
    return not encodes and strategy.depth(Role.OPTIM) == strategy.depth(Role.PARAM)


def encoded(spec: BufferSpec, codec: ParamCodec, main: ShardedBuffer) -> Gather:
    """A gather of main weights, encoded by a codec of one encoding."""

    if codec.is_identity:
        return Gather(spec.label, spec.tag)  # main weights are sent from where they are

    def encode(wire: Tensor) -> Steps:
        return codec.encode(main.tensor, (wire,))

    return Gather(spec.label, spec.tag, encode, reads=[main.tensor], writes=[*codec.state])


def encode_in_whole_lines(
    chain: Chain,
    lane: Lane,
    label: str,
    codec: ParamCodec,
    main: ShardedBuffer,
    lines: Sequence[tuple[ShardedBuffer, ShardedBuffer]],
) -> None:
    """Encode every encoding into this rank's part of its full line, of which all may be
    overwritten, and copy the part to where it is kept at rest, if that is another buffer.

    Args:
        lines: for each encoding the full line, and the buffer that keeps this rank's part.
    """
    parts = [line.narrow(main.depth) for line, _ in lines]
    copies = [
        (kept.narrow(main.depth), part)
        for (line, kept), part in zip(lines, parts, strict=True)
        if kept is not line
    ]

    def encode() -> Steps:
        yield from codec.encode(main.tensor, parts)
        for kept, part in copies:
            kept.copy_(part)

    writes = [*(line.tensor for line, _ in lines), *(kept for kept, _ in copies), *codec.state]
    chain.add(lane, f"encode {label}", encode, reads=[main.tensor], writes=writes)


def decode(
    chain: Chain,
    lane: Lane,
    label: str,
    codec: ParamCodec,
    wire: ShardedBuffer,
    target: ShardedBuffer,
) -> None:
    """Decode a full wire into full parameters, whose buffer is ``target``."""
    # Not the parameters themselves: autograd would count decoding as a change in place.
    outputs = [alias(target.full(index)) for index in range(len(target.layout.slots))]
    offsets = [slot.offset for slot in wire.layout.slots]

    def steps() -> Steps:
        codec.decode(wire.tensor, offsets, outputs)
        yield from ()

    reads = [wire.tensor, *codec.state]
    chain.add(lane, f"decode {label}", steps, reads=reads, writes=[target.tensor])
