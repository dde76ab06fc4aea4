"""The weights of one buffer, from main shards up to full compute parameters.

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
is a chain of operations that is put together once, when the tower is built. Each plane of the codec
([Note: Planes] in ``codecs/base.py``) has a wire and a full buffer; one refresh serves all planes,
and what is unsharded is what the next use asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.buffers.ascent import Ascent
from fsdp_engine.buffers.passage import Lender, Passage
from fsdp_engine.buffers.sharded_buffer import Ladder, ShardedBuffer
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.devices.lanes import Chain, Lanes, Ticket
from fsdp_engine.devices.memory import Memory, TransientStorage, alias
from fsdp_engine.layout import Layout
from fsdp_engine.strategies import AXIS_BELOW_DEPTH


class Plane:
    """One plane of a buffer's weights.

    Attributes:
        wire: what persists of its bytes, at the depth of PARAM; None: nothing does.
        storage: the memory of its full parameters, if that comes and goes.
        target: its full parameters.
        params: the same, one tensor for each.
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
        self.unshard: Chain | None = None
        self.holds = storage is None


class WeightTower:
    """See the module docstring.

    Attributes:
        main: main weights at the depth of OPTIM. Its tensor has a version counter of its own, so
            that in-place edits are told from gathers into the same memory.
        params: full compute parameters, in their own shapes. Their memory comes and goes when
            ``reshards``. Those of the first plane.
        num_planes: see [Note: Planes] in ``codecs/base.py``.
        reshards: whether full parameters are transient.
        needs_refresh: whether a change of main weights has to travel or be cast before use.
    """

    def __init__(
        self,
        label: str,
        params: Sequence[nn.Parameter],
        layout: Layout,
        ladder: Ladder,
        lanes: Lanes,
        memory: Memory,
        codec: ParamCodec,
        main_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        optim_depth: int,
        param_depth: int,
        tag: int,
        lend: Lender | None = None,
    ) -> None:
        self._label = label
        self._ladder = ladder
        self._lanes = lanes
        self.codec = codec
        self._layout = layout
        self._optim_depth = optim_depth
        self._param_depth = param_depth
        self._at = ladder.mesh.coordinate
        self.reshards = param_depth > 0
        self.num_planes = codec.num_planes
        self._wire_full: TransientStorage | None = None
        full_dtype = compute_dtype if codec.decodes else codec.wire_dtype
        self._planes = [self._make_plane(memory, full_dtype) for _ in range(codec.num_planes)]
        self.params = self._planes[0].params
        # Of the usual one plane, put together once.
        self._only_target: Sequence[Tensor] | None = (
            (self._planes[0].target.tensor,) if self.num_planes == 1 else None
        )
        if codec.is_identity:
            assert self._planes[0].wire is not None
            main = alias(self._planes[0].wire.narrow(optim_depth))
        else:
            main = memory.persistent(self._numel(optim_depth), main_dtype, "main")
        self.main = ShardedBuffer(layout, self._at, optim_depth, main)
        if codec.decodes:
            wire_full = self._wire_full = memory.transient(layout.numel, codec.wire_dtype, "full")
            wire_full.fill()
            flat = wire_full.view(0, (layout.numel,))
            self._decoded_from = ShardedBuffer(layout, self._at, 0, flat)
        codec.prepare(params, self._pieces(), self._split_groups(), ladder.mesh.device)
        persists = self._planes[0].wire is not None or not self.reshards
        self.needs_refresh = persists and not (codec.is_identity and optim_depth == param_depth)
        ascent = Ascent(label, self.main, codec, ladder, lanes, tag)
        self._refresh = self._make_refresh(ascent) if self.needs_refresh else None
        self._passage: Passage | None = None
        if lend is not None and not self.reshards and optim_depth > 0:
            lines = [plane.target for plane in self._planes]
            self._passage = Passage(ascent, lines, memory, lend)
        for plane in self._planes:
            if self.reshards:
                plane.unshard = self._make_unshard(ascent, plane)
        for storage in (self._wire_full, *(plane.storage for plane in self._planes)):
            if storage is not None:
                storage.drain()
        # Compared with the version of `main` to find out whether the wire is out of date.
        self._seen_version = -1

    def _make_plane(self, memory: Memory, full_dtype: torch.dtype) -> Plane:
        """Its memory. Transient memory is there for now: views need some when they are made."""
        layout, codec, depth = self._layout, self.codec, self._param_depth
        wire = None
        # What persists at depth 0 is the decoded weights, not the wire.
        persists = codec.is_identity or codec.encodes_once or self._optim_depth > depth
        if (persists or not self.reshards) and (self.reshards or not codec.decodes):
            sent = self._optim_depth > 0
            flat = memory.persistent(self._numel(depth), codec.wire_dtype, "model", sent=sent)
            wire = ShardedBuffer(layout, self._at, depth, flat)
        storage = None
        if self.reshards:
            storage = memory.transient(layout.numel, full_dtype, "full")
            storage.fill()
            target = ShardedBuffer(layout, self._at, 0, storage.view(0, (layout.numel,)))
            params = [storage.view(slot.offset, slot.shape) for slot in layout.slots]
        else:
            target = wire or ShardedBuffer(
                layout, self._at, 0, memory.persistent(layout.numel, full_dtype, "model")
            )
            params = [alias(target.full(i)) for i in range(len(layout.slots))]
        return Plane(wire, storage, target, params)

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
    def num_wires(self) -> int:
        """Gathers that bring all planes up to date."""
        return 1 if self._passage is not None else self.num_planes

    @property
    def is_current(self) -> bool:
        """Whether gathered weights, if there are any, equal the main weights."""
        return self._seen_version == self.main.tensor._version

    def mark_stale(self) -> None:
        """Main weights changed in a way that their version counter does not show."""
        self._seen_version = -1

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """What modules compute with in place of ``param``, the user's parameter ``index``."""
        return self.codec.bind(param, [plane.params[index] for plane in self._planes])

    def holds(self, planes: Sequence[int]) -> bool:
        """Whether the full parameters of all these planes are there, or on their way."""
        return all(self._planes[plane].holds for plane in planes)

    def gather(self, after: Sequence[Ticket], planes: Sequence[int] = (0,)) -> list[Ticket]:
        """Bring full parameters up to date; returns what to wait for.

        Args:
            after: when their memory may be written.
            planes: which the next use reads.
        """
        tickets: list[Ticket] = []
        version = self.main.tensor._version
        if version != self._seen_version:
            for plane in self._planes:
                plane.holds = not self.reshards
            if self._passage is not None:
                tickets.append(self._passage.refresh(after))
            elif self._refresh is not None:
                if not self.reshards:
                    after = (*after, *self._fill(self._optim_depth, self._wire_full))
                elif self.codec.needs_whole_line:
                    storages = [plane.storage for plane in self._planes]
                    after = (*after, *self._fill(self._optim_depth, *storages))
                tickets.append(self._refresh.run(after))
                after = (*after, *tickets)
            self._seen_version = version
        for number in planes if self.num_planes > 1 else (0,):
            plane = self._planes[number]
            if not plane.holds:
                assert plane.unshard is not None
                filled = self._fill(self._param_depth, plane.storage, self._wire_full)
                tickets.append(plane.unshard.run((*after, *filled)))
                plane.holds = True
        return tickets

    def gathered(self, *, for_backward: bool) -> None:
        """Compute has waited for the gather.

        Args:
            for_backward: of what backward reads.
        """
        if self._wire_full is not None and self._wire_full.filled:
            self._drain(self._wire_full)
        if self._passage is not None:
            self._passage.finish()
        if self.codec.needs_whole_line:
            for plane in self._planes:
                if not plane.holds and plane.storage is not None and plane.storage.filled:
                    self._drain(plane.storage)  # it was there to be encoded into
        self.codec.after_gather(for_backward=for_backward or not self.reshards)

    def release(self, planes: Sequence[int] | None = None) -> None:
        """Take the full parameters' memory away, once compute is done with it.

        Args:
            planes: of these planes; None: all there is.
        """
        waits = True
        for plane in self._planes if planes is None else [self._planes[n] for n in planes]:
            storage = plane.storage
            plane.holds = storage is None
            if storage is not None and storage.filled:
                if waits:
                    waits = False
                    if planes is None:
                        self.codec.before_release()
                    self._lanes.inner_gather.wait(self._lanes.compute.record())
                self._drain(storage)
        if planes is None and self._wire_full is not None and self._wire_full.filled:
            self._drain(self._wire_full)

    def touch(self) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        reads = self._only_target
        if reads is None:
            reads = [plane.target.tensor for plane in self._planes if plane.holds]
        self._lanes.compute.access(reads=reads)

    def _fill(self, from_depth: int, *storages: TransientStorage | None) -> tuple[Ticket, ...]:
        """Memory for a climb from ``from_depth``; returns what the climb has to come after."""
        lane = self._lanes.inner_gather
        present = [storage for storage in storages if storage is not None]
        for storage in present:
            if not storage.filled:
                lane.manage(f"allocate {self._label}", storage.fill, storage)
        # From depth 2 the climb starts on another lane than the one that the memory comes on.
        return (lane.record(),) if present and from_depth == 2 else ()

    def _drain(self, storage: TransientStorage) -> None:
        self._lanes.inner_gather.manage(f"free {self._label}", storage.drain, storage)

    def _make_refresh(self, ascent: Ascent) -> Chain:
        """From main shards to what persists of the compute weights."""
        chain, depths = Chain(), (self._optim_depth, self._param_depth)
        first = self._planes[0]
        if self.codec.needs_whole_line:
            wires = [plane.wire for plane in self._planes if plane.wire is not None]
            ascent.encode_in_whole_lines(chain, [plane.target for plane in self._planes], wires)
            for wire in wires:
                ascent.climb(chain, wire, *depths, None)
        elif first.wire is not None:
            ascent.climb(chain, first.wire, *depths, ascent.encode_into)
        else:
            ascent.climb(chain, self._decoded_from, *depths, ascent.encode_into)
            ascent.decode(chain, self._decoded_from, first.target, first.params)
        return chain

    def _make_unshard(self, ascent: Ascent, plane: Plane) -> Chain:
        """From what persists of the compute weights, else from main shards, to the full ones."""
        chain = Chain()
        source = plane.wire.tensor if plane.wire is not None else ascent.encode_into
        target = self._decoded_from if self.codec.decodes else plane.target
        ascent.climb(chain, target, self._param_depth, 0, source)
        if self.codec.decodes:
            ascent.decode(chain, target, plane.target, plane.params)
        return chain

    def _numel(self, depth: int) -> int:
        start, stop = self._layout.range(depth, self._at)
        return stop - start

    def _pieces(self) -> list[Piece]:
        base, _ = self._layout.range(self._optim_depth, self._at)
        pieces = []
        for index, slot in enumerate(self._layout.slots):
            low, high = self._layout.tensor_range(index, self._optim_depth, self._at)
            pieces.append(Piece(index, low, high, max(slot.offset + low - base, 0)))
        return pieces

    def _split_groups(self) -> list[ProcessGroup]:
        axes = AXIS_BELOW_DEPTH[: self._optim_depth]
        comms = [self._ladder.comms[axis].gather for axis in axes]
        return [comm.group for comm in comms if comm is not None]
