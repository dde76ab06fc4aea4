"""What is submitted to reduce one buffer's gradients, put together once.

Axes that cut gradients are reduced in every microbatch, from the staged line into what accumulates;
the others on the last one, in place. What the last microbatch reduces goes through a copy if the
wire has another dtype. Where ranks sum in a wider dtype than they send, only what is summed is sent
narrow: the sums are not rounded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_engine.buffers.gradient_memory import GradientMemory
from fsdp_engine.buffers.gradient_scale import GradientScale
from fsdp_engine.buffers.redistribute import Machinery, Reduction, copy, redistribute
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.devices.lane import Chain
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True)
class ReductionChains:
    """Of one buffer.

    Attributes:
        overwriting: of every microbatch whose sums are the first; empty where gradients are whole.
        adding: of every other one.
        last: of the last microbatch; empty where every axis cuts gradients.
    """

    overwriting: Chain
    adding: Chain
    last: Chain


def make_chains(
    spec: BufferSpec,
    machinery: Machinery,
    scale: GradientScale,
    last_axes: Sequence[Axis],
    memory: GradientMemory,
    accum: ShardedBuffer,
) -> ReductionChains:
    """Chains over ``memory``, all of which is there; ``last_axes``: reduced on the last
    microbatch only, innermost first."""
    dtypes = spec.kind.dtypes
    chains = ReductionChains(Chain(), Chain(), Chain())
    how = Reduction(
        spec.label,
        spec.tag,
        AXIS_BELOW_DEPTH[: spec.grad_depth],
        into=accum,
        dtype=dtypes.reduce,
        average=scale.average,
        boost=scale.boost,
    )
    if memory.staging is not None and memory.line is not None:
        for chain, accumulate in ((chains.overwriting, False), (chains.adding, True)):
            each = replace(how, accumulate=accumulate)
            redistribute(chain, machinery, memory.line, 0, spec.grad_depth, each)
    depths, lane = (spec.grad_depth, spec.optim_depth), machinery.lanes.inner_reduce
    last, sent = replace(how, over=last_axes, into=None), memory.sent
    if sent is None or dtypes.reduce != dtypes.comm:
        redistribute(chains.last, machinery, accum, *depths, replace(last, wire=sent))
    else:
        copy(chains.last, lane, spec.label, accum.tensor, sent.tensor, scale.boost)
        redistribute(chains.last, machinery, sent, *depths, last)
        parts = sent.narrow(spec.optim_depth), accum.narrow(spec.optim_depth)
        copy(chains.last, lane, spec.label, *parts, 1.0 / scale.boost)
    if memory.handed is not None:
        reduced = accum.narrow(spec.optim_depth)
        copy(chains.last, lane, spec.label, reduced, memory.handed.tensor, 1.0)
    return chains
