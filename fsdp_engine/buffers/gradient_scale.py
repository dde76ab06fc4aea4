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

import torch
from torch import Tensor


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
