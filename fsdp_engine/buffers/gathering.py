"""Gathers of a whole buffer outside of the schedule, from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fsdp_engine.buffers.redistribute import Gather, Machinery, redistribute
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.devices import memory as mem
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lane import Chain

# Of their messages; buffers' own tags start above it.
MAIN_TAG = 1


def gathered(
    spec: BufferSpec, machinery: Machinery, label: str, own: Tensor, into: Tensor | None
) -> ShardedBuffer:
    """Gather the full buffer of which ``own`` is this rank's part, and wait. Collective.

    Args:
        spec, machinery: of the buffer.
        label: of the gather, in messages.
        own: this rank's part, 1-D, at the depth of the optimizer.
        into: memory for the result, 1-D, in whose dtype parts are sent; None: allocated, with the
            dtype of ``own``.
    """
    source: Tensor | Callable[[Tensor], Steps] = own
    if into is None:
        into = mem.empty(spec.layout.numel, own.dtype, own.device)
    else:

        def cast(part: Tensor) -> Steps:
            part.copy_(own)
            yield from ()

        source = cast
    target = ShardedBuffer(spec.layout, machinery.ladder.mesh.coordinate, 0, into)
    chain, compute = Chain(), machinery.lanes.compute
    how = Gather(label, MAIN_TAG, source, reads=[own])
    redistribute(chain, machinery, target, spec.optim_depth, 0, how)
    compute.wait(chain.run((compute.record(),)))
    return target
