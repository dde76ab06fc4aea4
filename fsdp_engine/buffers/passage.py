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

from fsdp_engine.buffers.ascent import Ascent
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lanes import Chain, Ticket
from fsdp_engine.devices.memory import Memory, TransientStorage

# A line of whole gradients as one of that dtype; None while gradients need it.
Lender = Callable[[torch.dtype], Tensor | None]


class Passage:
    """See the module docstring.

    Args:
        ascent: of the buffer, whose codec has a ``values_dtype``.
        targets: the full lines, which persist, of all planes.
        memory: of the engine.
        lend: memory to go through.
    """

    def __init__(
        self, ascent: Ascent, targets: Sequence[ShardedBuffer], memory: Memory, lend: Lender
    ) -> None:
        assert ascent.codec.values_dtype is not None
        self._ascent = ascent
        self._label = ascent.label
        self._lanes = ascent.lanes
        self._targets = targets
        self._dtype = ascent.codec.values_dtype
        self._lend = lend
        layout = ascent.main.layout
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
        chain, ascent = Chain(), self._ascent
        main, codec = ascent.main, ascent.codec
        offsets = [slot.offset for slot in main.layout.slots]

        def cast(part: Tensor) -> Steps:
            part.copy_(main.tensor)
            yield from ()

        def encode() -> Steps:
            yield from codec.encode_whole(line, offsets)
            if is_lent:
                line.zero_()

        values = ShardedBuffer(main.layout, main.at, 0, line)
        ascent.climb(chain, values, main.depth, 0, cast)
        writes = [target.tensor for target in self._targets]
        chain.add(
            self._lanes.inner_gather,
            f"encode {self._label}",
            encode,
            reads=[line],
            writes=[*([line] if is_lent else []), *writes, *codec.state],
        )
        return chain
