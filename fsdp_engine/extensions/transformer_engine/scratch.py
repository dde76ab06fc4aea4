"""Gathers of full weights through the memory of gradients.

[Note: Gathers through scratch memory]
If full weights persist, a codec with two encodings would all-reduce amaxes, and then gather both
encodings. If gradients are not sharded either, their memory is unused between a step and the next
backward, and large enough for the weights in their nominal dtype:

    main[OPTIM] --cast--> scratch[OPTIM] --gather--> scratch --encode, both encodings--> wires, full

This takes one gather and no reduction of amaxes: every rank computes the scales from full weights,
and so the same bytes. Afterwards the memory of gradients is zeroed, because gradients may be added
to it. If the memory contains gradients (a forward before ``zero_grad``), separate memory is used.
The collectives are the same in both cases, so ranks may differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.sharded_buffer import BufferContext, Gather, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain, Ticket
from fsdp_engine.memory.allocator import TransientStorage, alias


class ThroughScratch:
    """Gathers full weights through memory of gradients. See the module docstring.

    Args:
        spec, context: The spec and context of the buffer.
        codec: The codec of the buffer, a ``TransformerEngineCodec``.
        main: The main weights.
        targets: The full parameters of all encodings, as flat tensors, which persist.
        buffer: The buffer whose gradients' memory is used.
    """

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: Any,
        main: ShardedBuffer,
        targets: Sequence[Tensor],
        buffer: ParamAndGradBuffer,
    ) -> None:
        self._spec = spec
        self._context = context
        self._codec = codec
        self._main = main
        self._targets = targets
        self._buffer = weakref.ref(buffer)
        numel = spec.layout.numel
        self._own: TransientStorage = context.memory.transient(numel, codec.nominal, "full")
        with self._own.while_filled() as own:
            self._through_own = self._make_chain(own.view(0, (numel,)), is_own=True)
        self._accumulation: Tensor | None = None
        self._through_gradients = Chain()

    def refresh(self) -> Ticket:
        """Start to gather and encode the full weights; returns the ticket of the last operation."""
        memory, compute = self._memory_of_gradients(), self._context.lanes.compute
        if memory is None:
            compute.manage(f"allocate {self._spec.label}", self._own.fill, self._own)
            return self._through_own.run((compute.record(),))
        if memory is not self._accumulation:
            self._accumulation = memory
            line = alias(memory.view(self._codec.nominal)[: self._spec.layout.numel])
            self._through_gradients = self._make_chain(line, is_own=False)
        # Wait for compute, which may have just allocated and zeroed the memory.
        return self._through_gradients.run((compute.record(),))

    def finish(self) -> None:
        """Free separate memory after compute has waited for the refresh."""
        if self._own.filled:
            compute = self._context.lanes.compute
            compute.manage(f"free {self._spec.label}", self._own.free, self._own)

    def _memory_of_gradients(self) -> Tensor | None:
        """Returns the memory of full gradients if it is large enough and contains no gradients;
        otherwise None."""
        buffer = self._buffer()
        assert buffer is not None
        grads = buffer.grads
        if grads is None or grads.writes_to_staging or not buffer.published.are_cleared:
            return None
        if self._spec.kind.dtypes.main_grad.itemsize < self._codec.nominal.itemsize:
            return None
        return grads.accumulation(zero=False).accum.tensor

    def _make_chain(self, line: Tensor, *, is_own: bool) -> Chain:
        chain, spec, main, codec = Chain(), self._spec, self._main, self._codec
        offsets = [slot.offset for slot in spec.layout.slots]

        def cast(parts: Sequence[Tensor]) -> Steps:
            parts[0].copy_(main.tensor)
            yield from ()

        def encode() -> Steps:
            yield from codec.encode_whole(line, offsets)
            if not is_own:
                line.zero_()

        values = ShardedBuffer(spec.layout, main.at, 0, line)
        how = Gather(spec.label, spec.tag, cast, reads=[main.tensor], writes=[*codec.state])
        values.gather(chain, self._context, main.depth, 0, how)
        chain.add(
            self._context.lanes.inner_gather,
            f"encode {spec.label}",
            encode,
            reads=[line],
            writes=[*([] if is_own else [line]), *self._targets, *codec.state],
        )
        return chain
