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
    once, PARAM cut
    decoding codec          as above, with the full       the full wire while it is decoded
                            compute weights at depth 0
    ======================  ============================  =====================================

*Refreshing* updates wire[PARAM] from main, once after every change of main. *Unsharding* gathers
the full buffer, for every use. Either is empty where both of its buffers are the same, and is a
chain of operations that is built once. Encoding and the first gather are one operation where no
other has to be between them: such a gather takes the encoding as its source (``redistribute.py``).

Each plane of the codec ([Note: Planes] in ``codecs/base.py``) has a wire and a full buffer. One
refresh serves all planes; only the planes that the next use reads are unsharded.

Weights that travel as values and are encoded whole, through scratch memory.

A codec with two planes would send both wherever full weights persist, behind a message of amaxes.
Where gradients are whole, too, their memory is free between a step and the next backward, and large
enough for the weights in their nominal dtype:

    main[OPTIM] --cast--> scratch[OPTIM] --gather--> scratch --encode, both planes--> wires, full

One gather and no amaxes: every rank finds the scales from whole weights, and so the same bytes. In
the gradients' memory zeros are left behind, as gradients may be added to. If gradients are still
wanted (a forward before ``zero_grad``), the values go through memory of their own: what is sent is
the same, so ranks may differ in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.redistribute import Gather, Machinery, ShardedBuffer, redistribute
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.codecs.base import PLANES
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lane import Chain, Lane, Ticket
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory.allocator import TransientStorage, alias
from fsdp_engine.strategies import AXIS_BELOW_DEPTH

# A line of whole gradients as one of that dtype; None while gradients need it.
Scratch = Callable[[torch.dtype], Tensor | None]


class ThroughScratch:
    """See the module docstring.

    Args:
        spec, machinery: of the buffer.
        codec: has a ``values_dtype``.
        main: main weights.
        targets: the full lines, which persist, of all planes.
        scratch: memory to go through.
    """

    def __init__(
        self,
        spec: BufferSpec,
        machinery: Machinery,
        codec: ParamCodec,
        main: ShardedBuffer,
        targets: Sequence[ShardedBuffer],
        scratch: Scratch,
    ) -> None:
        assert codec.values_dtype is not None
        self._spec = spec
        self._machinery = machinery
        self._codec = codec
        self._main = main
        self._targets = targets
        self._scratch = scratch
        numel = spec.layout.numel
        self._own: TransientStorage = machinery.memory.transient(numel, codec.values_dtype, "full")
        with self._own.while_filled() as own:
            self._through_own = self._make_chain(own.view(0, (numel,)), is_own=True)
        self._line: Tensor | None = None
        self._through_gradients = Chain()

    def refresh(self) -> Ticket:
        """Bring full weights up to date."""
        assert self._codec.values_dtype is not None
        line, compute = self._scratch(self._codec.values_dtype), self._machinery.lanes.compute
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
            compute = self._machinery.lanes.compute
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
        redistribute(chain, self._machinery, values, main.depth, 0, how)
        writes = [target.tensor for target in self._targets]
        chain.add(
            self._machinery.lanes.inner_gather,
            f"encode {spec.label}",
            encode,
            reads=[line],
            writes=[*([] if is_own else [line]), *writes, *codec.state],
        )
        return chain


class Plane:
    """One plane of a buffer's weights.

    Attributes:
        wire: the bytes that are kept at rest, at the depth of PARAM; None: none are.
        storage: the memory of its full parameters; None where they are never freed.
        target: its full parameters.
        params: the same, one tensor for each.
        memory: storages that need memory while ``target`` is gathered.
        unshard: gathers ``target``; None where parameters are not sharded.
    """

    def __init__(
        self,
        wire: ShardedBuffer | None,
        storage: TransientStorage | None,
        target: ShardedBuffer,
        params: list[Tensor],
    ) -> None:
        self.wire = wire
        self.storage = storage
        self.target = target
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
        spec, machinery: of the buffer.
        codec: of this buffer alone.
        params: the user's parameters, in the layout's order.
        scratch: memory of gradients that values can be gathered into before they are encoded.

    Attributes:
        main: main weights at the depth of OPTIM. Its tensor has a version counter of its own, so
            that edits in place are distinguished from gathers into the same memory.
        params: full compute parameters of the first plane, in their own shapes.
        reshards: whether full parameters are freed between uses.
        needs_refresh: whether a change of main weights has to be sent or cast before use.
    """

    def __init__(
        self,
        spec: BufferSpec,
        machinery: Machinery,
        codec: ParamCodec,
        params: Sequence[nn.Parameter],
        scratch: Scratch | None = None,
    ) -> None:
        self._spec = spec
        self._machinery = machinery
        self.codec = codec
        memory, optim_depth = machinery.memory, spec.optim_depth
        self.reshards = spec.param_depth > 0
        full_dtype = spec.kind.dtypes.compute if codec.decodes else codec.wire_dtype
        self._planes = [self._make_plane(full_dtype) for _ in range(codec.num_planes)]
        self.params = self._planes[0].params
        # The full parameters that modules read where there is one plane.
        self._first_target: Sequence[Tensor] = (self._planes[0].target.tensor,)
        if codec.is_identity:
            assert self._planes[0].wire is not None
            main = alias(self._planes[0].wire.narrow(optim_depth))
        else:
            main = memory.persistent(self._numel(optim_depth), spec.kind.dtypes.main, "main")
        self.main = ShardedBuffer(spec.layout, self._at, optim_depth, main)
        self._full_wire = self._make_full_wire() if codec.decodes else None
        codec.prepare(params, self._pieces(), self._split_groups(), memory.device)
        persists = self._planes[0].wire is not None or not self.reshards
        changes = not (codec.is_identity and optim_depth == spec.param_depth)
        self.needs_refresh = persists and changes
        self._refresh = self._make_refresh() if self.needs_refresh else None
        self._through_scratch: ThroughScratch | None = None
        if scratch is not None and not self.reshards and optim_depth > 0:
            lines = [plane.target for plane in self._planes]
            self._through_scratch = ThroughScratch(
                spec, machinery, codec, self.main, lines, scratch
            )
        for plane in self._planes:
            if self.reshards:
                plane.unshard = self._make_unshard(plane)
                if self._full_wire is not None:
                    plane.memory.append(self._full_wire.storage)
        for storage in (self._decoded_storage, *(plane.storage for plane in self._planes)):
            if storage is not None:
                storage.drain()
        # Compared with the version of `main` to find out whether the wire is out of date.
        self._seen_version = -1
        self._num_marks = 0

    @property
    def num_planes(self) -> int:
        """See [Note: Planes] in ``codecs/base.py``."""
        return len(self._planes)

    @property
    def rest_bytes(self) -> int:
        """Bytes held at rest: main weights, and compute weights as far as they are kept."""
        persistent = [self.main.tensor]
        for plane in self._planes:
            if plane.wire is not None:
                persistent.append(plane.wire.tensor)
            if not self.reshards:
                persistent.append(plane.target.tensor)
        storages = {t.untyped_storage().data_ptr(): t for t in persistent}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes of the full parameters of one plane from gather to free, beyond those at rest."""
        storage = self._planes[0].storage
        return storage.num_bytes if storage is not None else 0

    @property
    def transient_keys(self) -> list[int]:
        """Keys (``storage_keys`` of ``memory/allocator.py``) of the full parameters' storages that
        are freed between uses."""
        return [plane.storage.key for plane in self._planes if plane.storage is not None]

    @property
    def num_wires(self) -> int:
        """Number of gathers that update all planes."""
        return 1 if self._through_scratch is not None else self.num_planes

    @property
    def is_current(self) -> bool:
        """Whether gathered weights, if there are any, equal the main weights."""
        return self._seen_version == self.main.tensor._version

    def mark_stale(self) -> None:
        """Main weights changed in a way that their version counter does not show."""
        self._seen_version = -1
        self._num_marks += 1

    @property
    def changes(self) -> tuple[int, int]:
        """A value that differs from earlier ones if main weights have changed since."""
        return self.main.tensor._version, self._num_marks

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """Returns the parameter that modules compute with in place of ``param``, the user's
        parameter ``index``."""
        return self.codec.bind(param, [plane.params[index] for plane in self._planes])

    def give_back(self) -> None:
        """Remove the memory held at rest from the ledger; it is freed with this object."""
        memory = self._machinery.memory
        for plane in self._planes:
            kept = plane.wire if plane.wire is not None or self.reshards else plane.target
            if kept is not None:
                memory.give_back(kept.tensor, "model")
        if not self.codec.is_identity:
            memory.give_back(self.main.tensor, "main")

    def gather(self, phase: int, held: int, compute_now: Ticket | None = None) -> list[Ticket]:
        """Gather full parameters; returns tickets to wait for.

        Args:
            phase: of the next use: see ``codecs/base.py``.
            held: phases whose full parameters are gathered, or in flight; 0: none.
            compute_now: ticket of the work that compute has so far; None: it is recorded here.
        """
        tickets: list[Ticket] = []
        if self.main.tensor._version != self._seen_version:
            tickets = self._bring_up_to_date(compute_now)
            held = 0
        if not self.reshards:
            return tickets
        refreshed = tuple(tickets)
        for plane in self._missing_planes(phase, held):
            assert plane.unshard is not None
            after = refreshed
            if self._fill(plane.memory) or not after:
                after = (*after, self._machinery.lanes.compute.record())
            tickets.append(plane.unshard.run(after))
        return tickets

    def _bring_up_to_date(self, compute_now: Ticket | None) -> list[Ticket]:
        """Update the compute weights that are kept at rest from the main weights."""
        self._seen_version = self.main.tensor._version
        if self._through_scratch is not None:
            return [self._through_scratch.refresh()]
        if self._refresh is None:
            return []
        storages: list[TransientStorage | None] = []
        if not self.reshards:
            storages = [self._decoded_storage]
        elif self.codec.needs_whole_line:
            storages = [plane.storage for plane in self._planes]
        if self._fill([storage for storage in storages if storage is not None]):
            compute_now = None  # memory that compute has used since
        return [self._refresh.run((compute_now or self._machinery.lanes.compute.record(),))]

    def gathered(self, phases: int, *, for_backward: bool) -> None:
        """Compute has waited for the gather.

        Args:
            phases: whose full parameters are gathered.
            for_backward: a backward reads what was gathered last.
        """
        self._drain_full_wire()
        if self._through_scratch is not None:
            self._through_scratch.finish()
        if self.codec.needs_whole_line:
            self.free_all_but(phases)  # memory that planes were encoded into
        self.codec.after_gather(for_backward=for_backward or not self.reshards)

    def release(self) -> None:
        """Free the full parameters once compute is done with them."""
        storages = [plane.storage for plane in self._planes if plane.storage is not None]
        if any(storage.filled for storage in storages):
            self.codec.before_release()
        for storage in storages:
            self._drain(storage)
        self._drain_full_wire()

    def free_all_but(self, phases: int) -> None:
        """Free the planes that no use of ``phases`` reads."""
        kept = self._planes_of(phases)
        for plane in self._planes:
            if plane.storage is not None and plane not in kept:
                self._drain(plane.storage)

    def _planes_of(self, phases: int) -> Sequence[Plane]:
        if len(self._planes) == 1:
            return self._planes
        return [self._planes[number] for number in PLANES[phases]]

    def _missing_planes(self, phase: int, held: int) -> Sequence[Plane]:
        if not held:
            return self._planes_of(phase)
        if len(self._planes) == 1 or not phase & ~held:
            return ()
        return self._planes_of(phase & ~held)

    def note_access(self, phases: int) -> None:
        """Report to the compute lane that the model reads full parameters from here on.

        Args:
            phases: whose full parameters are gathered.
        """
        reads = self._first_target
        if len(self._planes) > 1:
            planes = self._planes_of(phases) if self.reshards else self._planes
            reads = [plane.target.tensor for plane in planes]
        self._machinery.lanes.compute.access(reads=reads)

    def _fill(self, storages: Sequence[TransientStorage]) -> bool:
        """Allocate memory that a chain writes; returns whether any had to be allocated. If so, the
        chain must be ordered behind the work that compute has so far.

        The memory is compute's own, as that of activations, so that either can reuse the other's.
        """
        allocates = False
        for storage in storages:
            if not storage.filled:
                allocates = True
                compute = self._machinery.lanes.compute
                compute.manage(f"allocate {self._spec.label}", storage.fill, storage)
        return allocates

    def _drain(self, storage: TransientStorage) -> None:
        """Free its memory. Compute has waited for what was written there, and everything that
        reads it was submitted to compute before."""
        if storage.filled:
            compute = self._machinery.lanes.compute
            compute.manage(f"free {self._spec.label}", storage.drain, storage)

    def _drain_full_wire(self) -> None:
        if self._full_wire is not None:
            self._drain(self._full_wire.storage)

    @property
    def _at(self) -> Coordinate:
        return self._machinery.ladder.mesh.coordinate

    @property
    def _decoded_storage(self) -> TransientStorage | None:
        return self._full_wire.storage if self._full_wire is not None else None

    def _make_plane(self, full_dtype: torch.dtype) -> Plane:
        """Make a plane. Its storage is left filled: views need memory when they are made."""
        layout, codec, depth = self._spec.layout, self.codec, self._spec.param_depth
        memory, at = self._machinery.memory, self._at
        wire = None
        # At depth 0 the decoded weights are kept at rest, not the wire.
        persists = codec.is_identity or codec.encodes_once or self._spec.optim_depth > depth
        if (persists or not self.reshards) and (self.reshards or not codec.decodes):
            sent = self._spec.optim_depth > 0
            flat = memory.persistent(self._numel(depth), codec.wire_dtype, "model", sent=sent)
            wire = ShardedBuffer(layout, at, depth, flat)
        storage = None
        if self.reshards:
            storage = memory.transient(layout.numel, full_dtype, "full")
            storage.fill()
            target = ShardedBuffer(layout, at, 0, storage.view(0, (layout.numel,)))
            params = [storage.view(slot.offset, slot.shape) for slot in layout.slots]
        else:
            target = wire or ShardedBuffer(
                layout, at, 0, memory.persistent(layout.numel, full_dtype, "model")
            )
            params = [alias(target.full(i)) for i in range(len(layout.slots))]
        return Plane(wire, storage, target, params)

    def _make_full_wire(self) -> FullWire:
        layout = self._spec.layout
        storage = self._machinery.memory.transient(layout.numel, self.codec.wire_dtype, "full")
        storage.fill()
        line = ShardedBuffer(layout, self._at, 0, storage.view(0, (layout.numel,)))
        return FullWire(storage, line)

    def _make_refresh(self) -> Chain:
        """From main shards to the compute weights that are kept at rest."""
        chain, spec = Chain(), self._spec
        lane, depths = self._machinery.lanes.encode, (spec.optim_depth, spec.param_depth)
        first = self._planes[0]
        how = encoded(spec, self.codec, self.main)
        if self.codec.needs_whole_line:
            wires = [(each.target, each.wire) for each in self._planes if each.wire is not None]
            encode_in_whole_lines(chain, lane, spec.label, self.codec, self.main, wires)
            for _, wire in wires:
                there = Gather(spec.label, spec.tag)
                redistribute(chain, self._machinery, wire, *depths, there)
        elif first.wire is not None:
            redistribute(chain, self._machinery, first.wire, *depths, how)
        else:
            assert self._full_wire is not None
            redistribute(chain, self._machinery, self._full_wire.line, *depths, how)
            self._decode(chain, first)
        return chain

    def _make_unshard(self, plane: Plane) -> Chain:
        """From the compute weights that are kept at rest, else from main shards, to the full
        ones."""
        chain, spec = Chain(), self._spec
        how = encoded(spec, self.codec, self.main)
        if plane.wire is not None:
            how = Gather(spec.label, spec.tag, plane.wire.tensor)
        line = self._full_wire.line if self._full_wire is not None else plane.target
        redistribute(chain, self._machinery, line, spec.param_depth, 0, how)
        if self._full_wire is not None:
            self._decode(chain, plane)
        return chain

    def _decode(self, chain: Chain, plane: Plane) -> None:
        assert self._full_wire is not None
        lane, target = self._machinery.lanes.inner_gather, (plane.target, plane.params)
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
        comms = [self._machinery.ladder.comms[axis].gather for axis in axes]
        return [comm.group for comm in comms if comm is not None]


def encoded(spec: BufferSpec, codec: ParamCodec, main: ShardedBuffer) -> Gather:
    """A gather of main weights, encoded by a codec of one plane."""

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
    """Encode every plane into this rank's part of its full line, of which all may be overwritten,
    and copy the part to where it is kept at rest, if that is another buffer.

    Args:
        lines: for each plane the full line, and the buffer that keeps this rank's part.
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
    target: tuple[ShardedBuffer, Sequence[Tensor]],
) -> None:
    """Decode a full wire into full parameters; ``target``: their buffer, and one tensor each."""
    line, params = target
    # Not the parameters themselves: autograd would count decoding as a change in place.
    outputs = [alias(param) for param in params]
    offsets = [slot.offset for slot in wire.layout.slots]

    def steps() -> Steps:
        codec.decode(wire.tensor, offsets, outputs)
        yield from ()

    reads = [wire.tensor, *codec.state]
    chain.add(lane, f"decode {label}", steps, reads=reads, writes=[line.tensor])
