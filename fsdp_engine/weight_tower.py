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
*Unsharding* fills the full buffer, for every use; both are empty where the rungs coincide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.buffer import Ladder, ShardedBuffer
from fsdp_engine.codecs import ParamCodec, Piece
from fsdp_engine.collectives import Steps
from fsdp_engine.lanes import Lanes, Ticket
from fsdp_engine.layout import Layout
from fsdp_engine.memory import Memory
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


class WeightTower:
    """See the module docstring.

    Attributes:
        main: main weights at the depth of OPTIM. Its tensor has a version counter of its own, so
            that in-place edits are told from gathers into the same memory.
        params: full compute parameters, in their own shapes. Their memory comes and goes when
            ``reshards``.
        reshards: whether full parameters are transient.
    """

    def __init__(
        self,
        label: str,
        layout: Layout,
        ladder: Ladder,
        memory: Memory,
        codec: ParamCodec,
        main_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        optim_depth: int,
        param_depth: int,
        tag: int,
    ) -> None:
        at = ladder.mesh.coordinate
        self._label = label
        self._ladder = ladder
        self._codec = codec
        self._layout = layout
        self._optim_depth = optim_depth
        self._param_depth = param_depth
        self._tag = tag
        self._offsets = [slot.offset for slot in layout.slots]
        self.reshards = param_depth > 0
        self._wire: ShardedBuffer | None = None
        self._wire_full = None

        def held(depth: int) -> int:
            start, stop = layout.range(depth, at)
            return stop - start

        keeps_wire = codec.is_identity or optim_depth > param_depth or param_depth == 0
        if codec.decodes and param_depth == 0:
            keeps_wire = False  # what persists at depth 0 is the decoded weights
        if keeps_wire:
            wire = memory.persistent(held(param_depth), codec.wire_dtype, "model")
            self._wire = ShardedBuffer(layout, at, param_depth, wire)
        if codec.is_identity:
            assert self._wire is not None
            main = _alias(self._wire.narrow(optim_depth))
        else:
            main = memory.persistent(held(optim_depth), main_dtype, "main")
        self.main = ShardedBuffer(layout, at, optim_depth, main)
        if codec.decodes:
            self._wire_full = memory.transient(layout.numel, codec.wire_dtype, "full")

        self._full = None
        if self.reshards:
            self._full = memory.transient(layout.numel, compute_dtype, "full")
            self._full.fill()
            self._full_buffer = ShardedBuffer(
                layout, at, 0, self._full.view(0, (layout.numel,))
            )
            self.params = [self._full.view(s.offset, s.shape) for s in layout.slots]
            self._full.drain()
        else:
            if codec.decodes:
                compute = memory.persistent(layout.numel, compute_dtype, "model")
                self._full_buffer = ShardedBuffer(layout, at, 0, compute)
            else:
                assert self._wire is not None
                self._full_buffer = self._wire
            full = self._full_buffer
            self.params = [_alias(full.full(i)) for i in range(len(layout.slots))]
        codec.bind(
            [slot.shape for slot in layout.slots],
            self._pieces(),
            self._split_groups(),
            ladder.mesh.device,
        )
        # Compared with the version of `main` to find out whether the wire is out of date.
        self._seen_version = -1
        self.needs_refresh = not (codec.is_identity and optim_depth == param_depth) and (
            self._wire is not None or param_depth == 0
        )

    @property
    def rest_bytes(self) -> int:
        """Bytes held at rest: main weights and whatever persists of the compute weights."""
        persistent = [self.main.tensor, self._wire.tensor if self._wire is not None else None]
        if not self.reshards:
            persistent.append(self._full_buffer.tensor)
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

    def gather(self, lanes: Lanes, after: Sequence[Ticket]) -> Ticket | None:
        """Bring the full parameters up to date; returns a ticket, None if nothing is to do."""
        ticket: Ticket | None = None
        if self.needs_refresh and not self.is_current:
            ticket = self._refresh(lanes, after)
        self._seen_version = self.main.tensor._version
        if self._full is not None:
            ticket = self._unshard(lanes, [*after, ticket] if ticket else after)
        return ticket

    def gathered(self) -> None:
        """Compute has waited for the gather."""
        self._codec.after_gather(self.params)

    def release(self, lanes: Lanes) -> None:
        """Take the full parameters' memory away, once compute is done with it."""
        if self._full is not None and self._full.filled:
            lane = lanes.inner_gather
            lane.wait(lanes.compute.record())
            self._codec.before_release(self.params)
            lane.manage(f"free {self._label}", self._full.drain, self._full_buffer.tensor)

    def touch(self, lanes: Lanes) -> None:
        """Tell the compute lane that the model reads the full parameters from here on."""
        lanes.compute.access(reads=(self._full_buffer.tensor,))

    def _refresh(self, lanes: Lanes, after: Sequence[Ticket]) -> Ticket:
        if self._wire is not None:
            target = self._wire
            return self._ascend(
                lanes, after, target, self._optim_depth, self._param_depth, encode=True
            )
        assert self._wire_full is not None
        return self._through_full_wire(lanes, after, source=None, from_depth=self._optim_depth)

    def _unshard(self, lanes: Lanes, after: Sequence[Ticket]) -> Ticket:
        assert self._full is not None
        source = self._wire.tensor if self._wire is not None else None
        lane = lanes.gather(AXIS_BELOW_DEPTH[self._param_depth - 1])
        lanes.inner_gather.manage(
            f"allocate {self._label}", self._full.fill, self._full_buffer.tensor
        )
        if lane is not lanes.inner_gather:
            after = [*after, lanes.inner_gather.record()]
        if self._codec.decodes:
            return self._through_full_wire(lanes, after, source, self._param_depth)
        return self._ascend(
            lanes, after, self._full_buffer, self._param_depth, 0, source, encode=source is None
        )

    def _through_full_wire(
        self, lanes: Lanes, after: Sequence[Ticket], source: Tensor | None, from_depth: int
    ) -> Ticket:
        """Gather into a transient full wire, decode it into the full parameters, drop it."""
        assert self._wire_full is not None
        lane, wire = lanes.inner_gather, self._wire_full
        wire.fill()
        target = ShardedBuffer(
            self._layout, self.main.at, 0, wire.view(0, (self._layout.numel,))
        )
        lane.manage(f"allocate wire of {self._label}", lambda: None, target.tensor)
        ticket = self._ascend(lanes, after, target, from_depth, 0, source, encode=source is None)

        def decode() -> Steps:
            self._codec.decode(target.tensor, self._offsets, self.params)
            wire.drain()
            yield from ()

        return lane.submit(
            f"decode {self._label}",
            decode,
            after=[ticket],
            reads=[target.tensor],
            writes=[self._full_buffer.tensor],
        )

    def _ascend(
        self,
        lanes: Lanes,
        after: Sequence[Ticket],
        target: ShardedBuffer,
        from_depth: int,
        to_depth: int,
        source: Tensor | None = None,
        encode: bool = False,
    ) -> Ticket:
        """Climb ``target`` depth by depth, each axis on its lane. The first step brings the bytes:
        encoded from main, copied from ``source``, or there already (both None and False)."""

        def encode_steps() -> Steps:
            if encode:
                yield from self._codec.encode(self.main.tensor, target.narrow(from_depth))

        ticket: Ticket | None = None
        reads = [self.main.tensor] if encode else [source] if source is not None else []
        if from_depth == to_depth:
            return lanes.inner_gather.submit(
                f"encode {self._label}",
                encode_steps,
                after=after,
                reads=reads,
                writes=[target.narrow(to_depth)],
            )
        for depth in range(from_depth - 1, to_depth - 1, -1):
            first = depth == from_depth - 1
            axis = AXIS_BELOW_DEPTH[depth]

            def climb(depth: int = depth, first: bool = first) -> Steps:
                if first:
                    yield from encode_steps()
                yield from self._ladder.climb(target, depth, source if first else None, self._tag)

            ticket = lanes.gather(axis).submit(
                f"all-gather of {self._label} over the {axis.value} axis",
                climb,
                after=after if ticket is None else [ticket],
                reads=reads if first else [target.narrow(depth + 1)],
                writes=[target.narrow(depth)],
            )
        assert ticket is not None
        return ticket

    def _pieces(self) -> list[Piece]:
        base, _ = self._layout.range(self._optim_depth, self.main.at)
        pieces = []
        for index, slot in enumerate(self._layout.slots):
            low, high = self._layout.tensor_range(index, self._optim_depth, self.main.at)
            pieces.append(Piece(index, low, high, max(slot.offset + low - base, 0)))
        return pieces

    def _split_groups(self) -> list[torch.distributed.ProcessGroup]:
        axes = (Axis.INNER, Axis.OUTER)[: self._optim_depth]
        comms = [self._ladder.comms[axis].gather for axis in axes]
        return [comm.group for comm in comms if comm is not None]


def _alias(tensor: Tensor) -> Tensor:
    """A tensor over the same memory with a version counter of its own."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
