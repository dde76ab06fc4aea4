"""Weights that travel as values and are encoded whole, through memory that is lent.

A codec with two planes would send both wherever full weights persist, behind a message of amaxes.
Where gradients are whole, too, their memory is free between a step and the next backward, and large
enough for the weights in their nominal dtype:

    main[OPTIM] --cast--> lent[OPTIM] --gather--> lent, full --encode, both planes--> wires, full

One gather and no amaxes: every rank finds the scales from whole weights, and so the same bytes. In
the lent memory zeros are left behind, as gradients may be added to. If gradients are still wanted
(a forward before ``zero_grad``), the values go through memory of their own: what is sent is the
same, so ranks may differ in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp_engine.buffer import Ladder, ShardedBuffer
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.collectives import Steps
from fsdp_engine.lanes import Chain, Lanes, Ticket
from fsdp_engine.memory import Memory, TransientStorage
from fsdp_engine.strategies import AXIS_BELOW_DEPTH

# A line of whole gradients as one of that dtype; None while gradients need it.
Lender = Callable[[torch.dtype], Tensor | None]


class Passage:
    """See the module docstring.

    Args:
        label: of the buffer, for people.
        main: main weights.
        targets: the full lines, which persist, of all planes.
        codec: has a ``values_dtype``.
        ladder, lanes, memory: as for the tower.
        lend: memory to go through.
        tag: tells its messages from others in flight.
    """

    def __init__(
        self,
        label: str,
        main: ShardedBuffer,
        targets: Sequence[ShardedBuffer],
        codec: ParamCodec,
        ladder: Ladder,
        lanes: Lanes,
        memory: Memory,
        lend: Lender,
        tag: int,
    ) -> None:
        assert codec.values_dtype is not None
        self._label = label
        self._main = main
        self._targets = targets
        self._codec = codec
        self._dtype = codec.values_dtype
        self._ladder = ladder
        self._lanes = lanes
        self._lend = lend
        self._tag = tag
        layout = main.layout
        self._own: TransientStorage = memory.transient(layout.numel, self._dtype, "full")
        with self._own.while_filled() as own:
            self._through_own = self._make_chain(own.view(0, (layout.numel,)), is_lent=False)
        self._through_lent: Chain | None = None

    def refresh(self, after: Sequence[Ticket]) -> Ticket:
        """Bring full weights up to date."""
        lent = self._lend(self._dtype)
        if lent is None:
            lane = self._lanes.inner_gather
            lane.manage(f"allocate {self._label}", self._own.fill, self._own)
            return self._through_own.run((*after, lane.record()))
        if self._through_lent is None:
            self._through_lent = self._make_chain(lent, is_lent=True)
        # Lending may have allocated it, with zeros, just now.
        return self._through_lent.run((*after, self._lanes.compute.record()))

    def finish(self) -> None:
        """Compute has waited for the refresh."""
        if self._own.filled:
            lane = self._lanes.inner_gather
            lane.manage(f"free {self._label}", self._own.drain, self._own)

    def _make_chain(self, line: Tensor, *, is_lent: bool) -> Chain:
        chain, main, lanes = Chain(), self._main, self._lanes
        values = ShardedBuffer(main.layout, main.at, 0, line)
        part = values.narrow(main.depth)

        def cast() -> Steps:
            part.copy_(main.tensor)
            yield from ()

        def encode() -> Steps:
            yield from self._codec.encode_whole(line, offsets)
            if is_lent:
                line.zero_()

        chain.add(
            lanes.inner_gather, f"cast {self._label}", cast, reads=[main.tensor], writes=[part]
        )
        for depth in range(main.depth - 1, -1, -1):
            axis = AXIS_BELOW_DEPTH[depth]
            chain.add(
                lanes.gather(axis),
                f"all-gather of values of {self._label} over the {axis.value} axis",
                lambda depth=depth: self._ladder.climb(values, depth, None, self._tag),  # type: ignore[misc]
                reads=[values.narrow(depth + 1)],
                writes=[values.narrow(depth)],
            )
        offsets = [slot.offset for slot in main.layout.slots]
        written = [line] if is_lent else []
        chain.add(
            lanes.inner_gather,
            f"encode {self._label}",
            encode,
            reads=[line],
            writes=[*written, *(target.tensor for target in self._targets), *self._codec.state],
        )
        return chain
