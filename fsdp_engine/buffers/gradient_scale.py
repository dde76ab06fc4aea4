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
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.config import DistributedDataParallelConfig


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


def scaled_copy(source: Tensor, out: Tensor, factor: float) -> None:
    """``out = source * factor``, computed in the wider of their dtypes."""
    if factor == 1.0:
        out.copy_(source)
    elif source.dtype.itemsize >= out.dtype.itemsize:
        torch.mul(source, factor, out=out)
    else:
        out.copy_(source).mul_(factor)
