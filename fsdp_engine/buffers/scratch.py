"""Weights that travel as values and are encoded whole, through scratch memory.

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

import torch
from torch import Tensor

from fsdp_engine.buffers.redistribute import Gather, Machinery, redistribute
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lane import Chain, Ticket
from fsdp_engine.devices.memory import TransientStorage

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
