"""What is reduced becomes a summand once more.

[Note: Reducing again]
A backward after the last reduction adds to what is reduced. Along axes that cut gradients that is
what every microbatch does. Along the others gradients are accumulated whole and reduced once more,
so what is reduced must come out of that as it went in: of it each rank keeps the range it owns,
zeros the rest, and

- where the axis is reduced and cut, nobody else has anything there: the sum is what was kept;
- where it is all-reduced, all n ranks have the same: each keeps 1/n of it;
- what collectives or a later pass divide is multiplied beforehand.

Worked example, 4 ranks at level "optim": 8.0 is reduced, and gradients 4, 0, 4, 8 follow. They are
written as 1, 0, 1, 2; the owner has 8.0 beside its own, and the sum is 12.0 = 8.0 + the mean, 4.0.
At "no_shard" each rank has 2.0 beside its own, and the sum is the same. It takes no memory.

Where a wire has another dtype than the gradients, what is reduced would be rounded each time. There
it is held apart instead: see [Note: What became of gradients] in ``shown_gradients.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.buffers.gradient_scale import GradientScale
from fsdp_engine.buffers.redistribute import Ladder
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


def kept_factor(
    ladder: Ladder, axes: Sequence[Axis], spec: BufferSpec, scale: GradientScale
) -> float:
    """What is reduced times this, reduced again, is the same.

    Args:
        ladder: of the mesh.
        axes: along which gradients are reduced once more.
        spec: of the buffer.
        scale: what its gradients are multiplied with.
    """
    # Of what is staged, a later pass multiplies only what comes.
    factor = 1.0 if spec.grad_depth > 0 else 1.0 / scale.later
    for axis in axes:
        comm = ladder.comms[axis].reduce
        assert comm is not None
        is_cut = spec.optim_depth > AXIS_BELOW_DEPTH.index(axis)
        if is_cut and scale.average:
            factor *= comm.size
        elif not is_cut and not scale.average:
            factor /= comm.size
    return factor


def keep_owned(accum: ShardedBuffer, optim_depth: int, factor: float) -> None:
    """Multiply the part at ``optim_depth`` with ``factor``, and zero the rest, in place."""
    whole, own = accum.tensor, accum.narrow(optim_depth)
    start = own.storage_offset() - whole.storage_offset()
    whole[:start].zero_()
    whole[start + own.numel() :].zero_()
    if factor != 1.0:
        own.mul_(factor)
