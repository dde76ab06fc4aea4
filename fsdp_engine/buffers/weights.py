"""The weights of one buffer, from main shards to full compute parameters.

    main[OPTIM] --encode--> wire[OPTIM] --gather--> wire[PARAM] --gather--> full

What is held depends only on the depths of OPTIM and PARAM and on the codec:

    ======================  ============================  =====================================
    case                    persistent                    transient
    ======================  ============================  =====================================
    identity codec          wire[PARAM]; main is a view   full, unless PARAM is full (depth 0)
    cast, PARAM full        main[OPTIM], wire = compute   nothing
    cast, OPTIM at PARAM    main[OPTIM]                   full; main is cast straight into it
    cast, OPTIM below       main[OPTIM], wire[PARAM]      full
    codec that encodes      main[OPTIM], wire[PARAM]      full
    once, PARAM cut
    decoding codec          as above, with the full       the full wire while it is decoded
                            compute weights at depth 0
    ======================  ============================  =====================================

*Refreshing* brings wire[PARAM] up to date with main, once after every change of main.
*Unsharding* fills the full buffer, for every use; both are empty where the rungs coincide. Either
is a chain of operations that is put together once. Each plane of the codec
([Note: Planes] in ``codecs/base.py``) has a wire and a full buffer; one refresh serves all planes,
and what is unsharded is what the next use asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.encoding import decode, encode_in_whole_lines, encoded
from fsdp_engine.buffers.redistribute import Gather, Machinery, redistribute
from fsdp_engine.buffers.scratch import Scratch, ThroughScratch
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.codecs.phase import PLANES
from fsdp_engine.devices.lane import Chain, Ticket
from fsdp_engine.devices.memory import TransientStorage, alias
from fsdp_engine.layout import Coordinate
from fsdp_engine.strategies import AXIS_BELOW_DEPTH


class Plane:
    """One plane of a buffer's weights.

    Attributes:
        wire: what persists of its bytes, at the depth of PARAM; None: nothing does.
        storage: the memory of its full parameters, if that comes and goes.
        target: its full parameters.
        params: the same, one tensor for each.
        memory: what has to have memory while ``target`` is filled.
        unshard: brings ``target`` up to date; None where nothing is cut.
        holds: ``target`` has, or will have when its gather is done, the weights as they are;
            always, where nothing is cut.
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
        self.holds = storage is None


@dataclass(frozen=True)
class FullWire:
    """The full wire while it is decoded: its memory, and the line in it."""

    storage: TransientStorage
    line: ShardedBuffer


class Weights:
    """See the module docstring.

    Args:
        spec, machinery: of the buffer.
        codec: of its own.
        params: the user's, in the layout's order.
        scratch: memory of gradients that the codec's values may go through.

    Attributes:
        main: main weights at the depth of OPTIM. Its tensor has a version counter of its own, so
            that in-place edits are told from gathers into the same memory.
        params: full compute parameters, in their own shapes. Their memory comes and goes when
            ``reshards``. Those of the first plane.
        reshards: whether full parameters are transient.
        needs_refresh: whether a change of main weights has to travel or be cast before use.
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
        # What a usual gather fills, put together once.
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
        """Bytes held at rest: main weights and whatever persists of the compute weights."""
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
        """Bytes of the full parameters of one plane while they are there, beyond those at rest."""
        storage = self._planes[0].storage
        return storage.num_bytes if storage is not None else 0

    @property
    def transient_keys(self) -> list[int]:
        """Keys (``storage_keys`` of ``devices/memory.py``) of the full parameters' storages that
        are freed between uses."""
        return [plane.storage.key for plane in self._planes if plane.storage is not None]

    @property
    def num_wires(self) -> int:
        """Gathers that bring all planes up to date."""
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
        """Another value than before: main weights have changed, or were said to have."""
        return self.main.tensor._version, self._num_marks

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """What modules compute with in place of ``param``, the user's parameter ``index``."""
        return self.codec.bind(param, [plane.params[index] for plane in self._planes])

    def give_back(self) -> None:
        """Of no use any more: what is held at rest is not booked any more, and goes with it."""
        memory = self._machinery.memory
        for plane in self._planes:
            kept = plane.wire if plane.wire is not None or self.reshards else plane.target
            if kept is not None:
                memory.give_back(kept.tensor, "model")
        if not self.codec.is_identity:
            memory.give_back(self.main.tensor, "main")

    def holds(self, phase: int) -> bool:
        """Whether the full parameters that a use of ``phase`` reads are there, or on their way."""
        return all(plane.holds for plane in self._planes_of(phase))

    def gather(self, phase: int, compute_now: Ticket | None = None) -> list[Ticket]:
        """Bring full parameters up to date; returns what to wait for.

        Args:
            phase: of the next use: see ``codecs/phase.py``.
            compute_now: what compute has been given so far, if that was recorded.
        """
        tickets: list[Ticket] = []
        if self.main.tensor._version != self._seen_version:
            tickets = self._bring_up_to_date(compute_now)
        refreshed = tuple(tickets)
        for plane in self._planes_of(phase):
            if not plane.holds:
                assert plane.unshard is not None
                after = refreshed
                if self._fill(plane.memory) or not after:
                    after = (*after, self._machinery.lanes.compute.record())
                tickets.append(plane.unshard.run(after))
                plane.holds = True
        return tickets

    def _bring_up_to_date(self, compute_now: Ticket | None) -> list[Ticket]:
        """What persists of the compute weights follows the main weights."""
        self._seen_version = self.main.tensor._version
        for plane in self._planes:
            plane.holds = not self.reshards
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

    def gathered(self, *, for_backward: bool) -> None:
        """Compute has waited for the gather.

        Args:
            for_backward: of what backward reads.
        """
        self._drain_full_wire()
        if self._through_scratch is not None:
            self._through_scratch.finish()
        if self.codec.needs_whole_line:
            for plane in self._planes:
                if not plane.holds and plane.storage is not None and plane.storage.filled:
                    self._drain(plane.storage)  # it was there to be encoded into
        self.codec.after_gather(for_backward=for_backward or not self.reshards)

    def release(self) -> None:
        """Take the full parameters' memory away, once compute is done with it."""
        self._release(self._planes, self.codec.before_release)
        self._drain_full_wire()

    def keep_only(self, phase: int) -> None:
        """Of what is there for the other half of a step take the memory away."""
        kept = self._planes_of(phase)
        self._release([plane for plane in self._planes if plane not in kept], None)

    def _release(self, planes: Sequence[Plane], before: Callable[[], None] | None) -> None:
        """``before``: is called before anything goes."""
        for plane in planes:
            storage = plane.storage
            plane.holds = storage is None
            if storage is not None and storage.filled:
                if before is not None:
                    before()
                    before = None
                self._drain(storage)

    def _planes_of(self, phase: int) -> Sequence[Plane]:
        if len(self._planes) == 1:
            return self._planes
        return [self._planes[number] for number in PLANES[phase]]

    def note_access(self) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        reads = self._first_target
        if len(self._planes) > 1:
            reads = [plane.target.tensor for plane in self._planes if plane.holds]
        self._machinery.lanes.compute.access(reads=reads)

    def _fill(self, storages: Sequence[TransientStorage]) -> bool:
        """Memory that a chain writes, which has to come after what compute was given so far;
        returns whether any had to be allocated.

        Compute's own, as that of activations, so that either is allocated where the other was.
        """
        allocates = False
        for storage in storages:
            if not storage.filled:
                allocates = True
                compute = self._machinery.lanes.compute
                compute.manage(f"allocate {self._spec.label}", storage.fill, storage)
        return allocates

    def _drain(self, storage: TransientStorage) -> None:
        """Compute has waited for what was written into it, and what computes with it was given to
        compute before."""
        compute = self._machinery.lanes.compute
        compute.manage(f"free {self._spec.label}", storage.drain, storage)

    def _drain_full_wire(self) -> None:
        if self._full_wire is not None and self._full_wire.storage.filled:
            self._drain(self._full_wire.storage)

    @property
    def _at(self) -> Coordinate:
        return self._machinery.ladder.mesh.coordinate

    @property
    def _decoded_storage(self) -> TransientStorage | None:
        return self._full_wire.storage if self._full_wire is not None else None

    def _make_plane(self, full_dtype: torch.dtype) -> Plane:
        """Its memory. Transient memory is there for now: views need some when they are made."""
        layout, codec, depth = self._spec.layout, self.codec, self._spec.param_depth
        memory, at = self._machinery.memory, self._at
        wire = None
        # What persists at depth 0 is the decoded weights, not the wire.
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
        """From main shards to what persists of the compute weights."""
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
        """From what persists of the compute weights, else from main shards, to the full ones."""
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
