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
    decoding codec          as for cast, with the full    the full wire while it is decoded
                            compute weights at depth 0
    ======================  ============================  =====================================

*Refreshing* brings wire[PARAM] up to date with main, once after every change of main.
*Unsharding* fills the full buffer, for every use; both are empty where the rungs coincide. Either
is a chain of operations that is put together once, when the tower is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.buffer import Ladder, ShardedBuffer
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.collectives import Steps
from fsdp_engine.lanes import Chain, Lanes, Ticket
from fsdp_engine.layout import Layout
from fsdp_engine.memory import Memory, TransientStorage, alias
from fsdp_engine.strategies import AXIS_BELOW_DEPTH


class WeightTower:
    """See the module docstring.

    Attributes:
        main: main weights at the depth of OPTIM. Its tensor has a version counter of its own, so
            that in-place edits are told from gathers into the same memory.
        params: full compute parameters, in their own shapes. Their memory comes and goes when
            ``reshards``.
        reshards: whether full parameters are transient.
        needs_refresh: whether a change of main weights has to travel or be cast before use.
    """

    def __init__(
        self,
        label: str,
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
    ) -> None:
        self._label = label
        self._ladder = ladder
        self._lanes = lanes
        self.codec = codec
        self._layout = layout
        self._optim_depth = optim_depth
        self._param_depth = param_depth
        self._tag = tag
        self._at = ladder.mesh.coordinate
        self.reshards = param_depth > 0
        self._wire: ShardedBuffer | None = None
        self._full: TransientStorage | None = None
        self._wire_full: TransientStorage | None = None
        # What persists at depth 0 is the decoded weights, not the wire.
        decodes_at_rest = codec.decodes and param_depth == 0
        if (codec.is_identity or optim_depth > param_depth or param_depth == 0) and (
            not decodes_at_rest
        ):
            numel = self._numel(param_depth)
            flat = memory.persistent(numel, codec.wire_dtype, "model", sent=optim_depth > 0)
            self._wire = ShardedBuffer(layout, self._at, param_depth, flat)
        if codec.is_identity:
            assert self._wire is not None
            main = alias(self._wire.narrow(optim_depth))
        else:
            main = memory.persistent(self._numel(optim_depth), main_dtype, "main")
        self.main = ShardedBuffer(layout, self._at, optim_depth, main)

        if self.reshards:
            full = self._full = memory.transient(layout.numel, compute_dtype, "full")
            full.fill()  # for a moment: views need memory when they are made
            self._target = ShardedBuffer(layout, self._at, 0, full.view(0, (layout.numel,)))
            self.params = [full.view(slot.offset, slot.shape) for slot in layout.slots]
        else:
            if decodes_at_rest:
                compute = memory.persistent(layout.numel, compute_dtype, "model")
                self._target = ShardedBuffer(layout, self._at, 0, compute)
            else:
                assert self._wire is not None
                self._target = self._wire
            self.params = [alias(self._target.full(i)) for i in range(len(layout.slots))]
        if codec.decodes:
            wire_full = self._wire_full = memory.transient(layout.numel, codec.wire_dtype, "full")
            wire_full.fill()
            flat = wire_full.view(0, (layout.numel,))
            self._decoded_from = ShardedBuffer(layout, self._at, 0, flat)
        codec.bind(
            [slot.shape for slot in layout.slots],
            self._pieces(),
            self._split_groups(),
            ladder.mesh.device,
        )
        self.needs_refresh = (self._wire is not None or decodes_at_rest) and not (
            codec.is_identity and optim_depth == param_depth
        )
        self._refresh = self._make_refresh() if self.needs_refresh else None
        self._unshard = self._make_unshard() if self.reshards else None
        for storage in (self._full, self._wire_full):
            if storage is not None:
                storage.drain()
        # Compared with the version of `main` to find out whether the wire is out of date.
        self._seen_version = -1

    @property
    def rest_bytes(self) -> int:
        """Bytes held at rest: main weights and whatever persists of the compute weights."""
        persistent = [self.main.tensor, self._wire.tensor if self._wire is not None else None]
        if not self.reshards:
            persistent.append(self._target.tensor)
        storages = {t.untyped_storage().data_ptr(): t for t in persistent if t is not None}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    @property
    def transient_bytes(self) -> int:
        """Bytes of the full parameters while they are there, beyond those at rest."""
        return self._full.num_bytes if self._full is not None else 0

    @property
    def is_current(self) -> bool:
        """Whether gathered weights, if there are any, equal the main weights."""
        return self._seen_version == self.main.tensor._version

    def mark_stale(self) -> None:
        """Main weights changed in a way that their version counter does not show."""
        self._seen_version = -1

    def gather(self, after: Sequence[Ticket]) -> Ticket | None:
        """Bring the full parameters up to date; returns a ticket, None if nothing is to do."""
        ticket: Ticket | None = None
        if self._refresh is not None and not self.is_current:
            if self._unshard is None:
                after = (*after, *self._fill(self._optim_depth, self._wire_full))
            ticket = self._refresh.run(after)
            after = (*after, ticket)
        self._seen_version = self.main.tensor._version
        if self._unshard is not None:
            after = (*after, *self._fill(self._param_depth, self._full, self._wire_full))
            ticket = self._unshard.run(after)
        return ticket

    def gathered(self) -> None:
        """Compute has waited for the gather."""
        if self._wire_full is not None and self._wire_full.filled:
            self._drain(self._wire_full)
        self.codec.after_gather(self.params)

    def release(self) -> None:
        """Take the full parameters' memory away, once compute is done with it."""
        if self._full is not None and self._full.filled:
            self.codec.before_release(self.params)
            self._lanes.inner_gather.wait(self._lanes.compute.record())
            self._drain(self._full)
        if self._wire_full is not None and self._wire_full.filled:
            self._drain(self._wire_full)

    def touch(self) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        self._lanes.compute.access(reads=(self._target.tensor,))

    def _fill(self, from_depth: int, *storages: TransientStorage | None) -> tuple[Ticket, ...]:
        """Memory for a climb from ``from_depth``; returns what the climb has to come after."""
        lane = self._lanes.inner_gather
        present = [storage for storage in storages if storage is not None]
        for storage in present:
            lane.manage(f"allocate {self._label}", storage.fill, storage)
        # From depth 2 the climb starts on another lane than the one that the memory comes on.
        return (lane.record(),) if present and from_depth == 2 else ()

    def _drain(self, storage: TransientStorage) -> None:
        self._lanes.inner_gather.manage(f"free {self._label}", storage.drain, storage)

    def _make_refresh(self) -> Chain:
        """From main shards to what persists of the compute weights."""
        if self._wire is not None:
            chain = Chain()
            self._ascend(chain, self._wire, self._optim_depth, self._param_depth, None)
            return chain
        return self._through_full_wire(self._optim_depth, None)

    def _make_unshard(self) -> Chain:
        """From what persists of the compute weights, else from main shards, to the full ones."""
        source = self._wire.tensor if self._wire is not None else None
        if self.codec.decodes:
            return self._through_full_wire(self._param_depth, source)
        chain = Chain()
        self._ascend(chain, self._target, self._param_depth, 0, source)
        return chain

    def _through_full_wire(self, from_depth: int, source: Tensor | None) -> Chain:
        """Gather into a transient full wire and decode it into the full parameters."""
        chain, wire = Chain(), self._decoded_from
        # Not the parameters themselves: decoding is no in-place change that autograd may see.
        outputs = [alias(param) for param in self.params]
        self._ascend(chain, wire, from_depth, 0, source)
        offsets = [slot.offset for slot in self._layout.slots]

        def decode() -> Steps:
            self.codec.decode(wire.tensor, offsets, outputs)
            yield from ()

        chain.add(
            self._lanes.inner_gather,
            f"decode {self._label}",
            decode,
            reads=[wire.tensor, *self.codec.state],
            writes=[self._target.tensor],
        )
        return chain

    def _ascend(
        self,
        chain: Chain,
        target: ShardedBuffer,
        from_depth: int,
        to_depth: int,
        source: Tensor | None,
    ) -> None:
        """Climb ``target`` depth by depth, each axis on its lane. The first step brings the bytes:
        from ``source``, or (None) encoded from main."""
        main, begin = self.main.tensor, target.narrow(from_depth)

        def encode() -> Steps:
            yield from self.codec.encode(main, begin)

        brought = [main if source is None else source]
        if from_depth == to_depth:
            lane = self._lanes.inner_gather
            writes = [begin, *self.codec.state]
            chain.add(lane, f"encode {self._label}", encode, reads=brought, writes=writes)
            return
        for depth in range(from_depth - 1, to_depth - 1, -1):
            first = depth == from_depth - 1
            axis = AXIS_BELOW_DEPTH[depth]
            chain.add(
                self._lanes.gather(axis),
                f"all-gather of {self._label} over the {axis.value} axis",
                self._climb(target, depth, source, encode if first and source is None else None)
                if first
                else self._climb(target, depth, None, None),
                reads=brought if first else [target.narrow(depth + 1)],
                writes=[target.narrow(depth), *(self.codec.state if first else ())],
            )

    def _climb(
        self,
        target: ShardedBuffer,
        depth: int,
        source: Tensor | None,
        encode: Callable[[], Steps] | None,
    ) -> Callable[[], Steps]:
        if encode is None:
            return lambda: self._ladder.climb(target, depth, source, self._tag)

        def steps() -> Steps:
            yield from encode()
            yield from self._ladder.climb(target, depth, source, self._tag)

        return steps

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
