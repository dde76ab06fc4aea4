"""What gradients are multiplied with on their way (``gradients.py``).

[Note: Averaging]
Every rank contributes its mean loss; the result is the gradient of the mean over all ranks. The
factor ``1 / (ranks * extra divisor)`` is applied there and nowhere else: while gradients are
written, or (``average_in_collective``) the ranks' part of it by the collectives, axis by axis.
Without ``gradient_reduce_div_fusion`` what is not the collectives' part is a pass of its own, just
before gradients travel for the first time.

[Note: fp16 on the wire]
Divided by many ranks, small gradients would be zeros in fp16; not divided, sums of large ones would
be infinite. So what travels in fp16 is divided by about the root of that divisor beforehand, by the
rest after it was summed: it is larger by ``boost``, a power of two, wherever it lies in a buffer of
the wire's. (PyTorch's FSDP divides in the same two parts.) Gradients that are kept in fp16 and
accumulated whole have no such buffer: they are divided once, beforehand.

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

Where gradients are sent in another dtype, what is reduced would be rounded each time. There it is
kept beside the accumulation buffer instead: see [Note: Gradients between backwards] in
``published_gradients.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.buffers.redistribute import Ladder
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True)
class GradientScale:
    """What the gradients of one buffer are multiplied with, where.

    Attributes:
        alpha: as they are written.
        factor: the same for products: a tensor where it must not be rounded with the gradient's
            own dtype, since of one element it takes part in type promotion.
        later: by a pass of its own before they travel; 1.0: there is none.
        boost: how much larger they are in memory of the wire's.
        average: the collectives do the ranks' part.
        num_ranks: the number of ranks, or what users divide by instead.
    """

    alpha: float
    factor: float | Tensor
    later: float
    boost: float
    average: bool
    num_ranks: float


def gradient_scale(
    spec: BufferSpec,
    config: DistributedDataParallelConfig,
    num_ranks: float,
    device: torch.device,
) -> GradientScale:
    """See [Note: Averaging]. ``num_ranks``: or what users divide by instead."""
    dtypes, average = spec.kind.dtypes, config.average_in_collective
    divisor = spec.kind.extra_divisor * (1 if average else num_ranks)
    larger = boost(divisor, dtypes.comm)
    scale = (larger if spec.grad_depth > 0 else 1.0) / divisor
    alpha, later = (scale, 1.0) if config.gradient_reduce_div_fusion else (1.0, scale)
    factor: float | Tensor = alpha
    # A power of two is exact in any dtype.
    if math.frexp(alpha)[0] != 0.5 and dtypes.compute != dtypes.main_grad:
        factor = torch.tensor([alpha], dtype=torch.float32, device=device)
    return GradientScale(alpha, factor, later, larger, average, num_ranks)


def boost(divisor: float, wire: torch.dtype) -> float:
    """How much larger gradients are in memory of the wire's, which are to be divided by
    ``divisor``. See [Note: fp16 on the wire]; 1.0 for other wires."""
    return max(1.0, 2.0 ** round(math.log2(divisor) / 2)) if wire == torch.float16 else 1.0


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
