"""Gathers outside the schedule: the whole of what each rank has its optimizer's part of."""

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
    """Of a buffer, the whole line of which ``own`` is this rank's part; waits. Collective.

    Args:
        spec, machinery: of the buffer.
        label: what it is, for people.
        own: this rank's part, at the depth of the optimizer.
        into: memory for it, 1-D, in whose dtype it travels; None: some of its own, like ``own``.
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
