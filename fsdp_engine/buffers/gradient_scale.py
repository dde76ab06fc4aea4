"""The factors by which gradients are multiplied between autograd and the optimizer.

[Note: Averaging]
Each rank computes the gradient of its own mean loss. The optimizer gets the gradient of the mean of
these losses over all ranks. The factor ``1 / (ranks * extra divisor)`` is applied once, while
gradients are written. With ``average_in_collective``, the collectives divide by the size of each
axis, and only the extra divisor is applied while gradients are written. With
``scale_while_copying=False`` (Megatron-Core's ``gradient_reduce_div_fusion=False``), a separate
pass before the first reduction applies the factor instead.

Products are rounded only once, to the dtype in which they are written. They are not rounded to the
gradient's dtype first: in fp16, gradients below 2**-15 would underflow when divided by 1,024 ranks,
even if sums are computed in fp32.

[Note: Gradients in fp16]
In fp16, small gradients would underflow if they were divided by many ranks, and sums of large
gradients would overflow if they were not divided. So gradients that are sent in fp16 are divided by
about the square root of the divisor before the reduction, and by the rest after it. In a buffer of
the communication dtype they are therefore larger than the optimizer's gradients by the factor
``boost``, a power of two. (PyTorch's FSDP divides in the same two parts.) Gradients that are
accumulated unsharded in fp16 have no such buffer: they are divided once, before the reduction.

[Note: Reducing again]
A backward after the last reduction adds to gradients that are already reduced. Along axes over
which gradients are sharded, every microbatch does this anyway. Along the other axes, the sum of
reduced and new gradients is reduced once more, and this must not change the reduced part. So each
rank keeps the range of reduced gradients that it owns, and zeros the rest:

- If gradients are sharded along the axis after the reduction, the other ranks have zeros in that
  range, so its sum over ranks is the range itself.
- If they are all-reduced along the axis, all n ranks have the same range, so each keeps 1/n of it.
- The range is multiplied by the factors by which collectives or a later pass will divide.

Worked example, 4 ranks at level "optim": the reduced gradient is 8.0, and new gradients are 4, 0, 4
and 8. They are written as 1, 0, 1 and 2. One rank adds its summand to 8.0, so the sum is 12.0 =
8.0 + 4.0, the mean of the new ones. At "no_shard" each rank adds its summand to 2.0, and the sum is
the same. This needs no additional memory.

Where gradients are sent in another dtype, each further reduction would round reduced gradients
again. There they are kept outside of the accumulation buffer instead: see [Note: Gradients between
backwards] in ``published_gradients.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_engine.buffers.sharded_buffer import MeshCommunicators, ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.options import Options
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True)
class GradientScale:
    """The factors of one buffer's gradients.

    Attributes:
        alpha: The factor that is applied while gradients are written.
        factor: ``alpha`` as an operand of products. It is a 1-D tensor where products must not be
            rounded to the gradient's dtype, because 1-D tensors take part in type promotion.
        later: The factor of a separate pass before the first reduction; 1.0: there is no such pass.
        boost: The factor by which gradients in a buffer of the communication dtype are larger than
            those that the optimizer gets.
        average: Whether the collectives divide by the number of ranks.
        num_ranks: The divisor of sums over ranks: the number of ranks, or the user's number.
    """

    alpha: float
    factor: float | Tensor
    later: float
    boost: float
    average: bool
    num_ranks: float


def gradient_scale(
    spec: BufferSpec,
    options: Options,
    num_ranks: float,
    device: torch.device,
) -> GradientScale:
    """Returns the factors of a buffer: see [Note: Averaging].

    Args:
        spec: The dtypes, the depths and the extra divisor of the buffer.
        options: The options of the engine.
        num_ranks: The divisor of sums over ranks: the number of ranks, or the user's number.
        device: The device of the gradients.
    """
    dtypes, average = spec.kind.dtypes, options.average_in_collective
    divisor = spec.kind.extra_divisor * (1 if average else num_ranks)
    larger = boost(divisor, dtypes.comm)
    scale = (larger if spec.grad_depth > 0 else 1.0) / divisor
    alpha, later = (scale, 1.0) if options.scale_while_copying else (1.0, scale)
    written = dtypes.comm if spec.grad_depth > 0 else dtypes.main_grad
    factor: float | Tensor = alpha
    if not _is_rounded_once(alpha, dtypes.compute, written):
        wide = torch.promote_types(dtypes.compute, written)
        factor = torch.tensor([alpha], dtype=wide, device=device)
    return GradientScale(alpha, factor, later, larger, average, num_ranks)


def _is_rounded_once(factor: float, dtype: torch.dtype, written: torch.dtype) -> bool:
    """Returns whether the product of a gradient in ``dtype`` and the number ``factor`` is rounded
    only when it is written in the dtype ``written``. Torch computes such a product in ``dtype``."""
    if factor == 1.0 or dtype == written or dtype.itemsize > written.itemsize:
        return True
    # A power of two changes only the exponent. The range of exponents of fp16 is smaller than that
    # of bf16 and fp32, so a product in fp16 could underflow before it is cast to these.
    is_power_of_two = math.frexp(factor)[0] == 0.5
    return is_power_of_two and torch.finfo(dtype).tiny <= torch.finfo(written).tiny


def boost(divisor: float, comm: torch.dtype) -> float:
    """Returns the factor by which gradients in the communication dtype ``comm`` are larger than
    the optimizer's, which are divided by ``divisor``. 1.0 unless ``comm`` is fp16. See
    [Note: Gradients in fp16]."""
    return max(1.0, 2.0 ** round(math.log2(divisor) / 2)) if comm == torch.float16 else 1.0


def kept_factor(
    mesh_communicators: MeshCommunicators,
    axes: Sequence[Axis],
    spec: BufferSpec,
    scale: GradientScale,
) -> float:
    """Returns the factor for reduced gradients that makes another reduction leave them unchanged.
    See [Note: Reducing again].

    Args:
        mesh_communicators: The communicators of the mesh.
        axes: The axes along which gradients are reduced once more.
        spec: The depths of the buffer.
        scale: The factors of the buffer's gradients.
    """
    # Where gradients are sharded, the later pass scales only the staging buffer.
    factor = 1.0 if spec.grad_depth > 0 else 1.0 / scale.later
    for axis in axes:
        comm = mesh_communicators.comms[axis].reduce
        assert comm is not None
        is_sharded = spec.optim_depth > AXIS_BELOW_DEPTH.index(axis)
        if is_sharded and scale.average:
            factor *= comm.size
        elif not is_sharded and not scale.average:
            factor /= comm.size
    return factor


def keep_owned(accum: ShardedBuffer, optim_depth: int, factor: float) -> None:
    """Multiply this rank's range at ``optim_depth`` by ``factor``, and zero the rest of ``accum``,
    in place."""
    full, own = accum.tensor, accum.narrow(optim_depth)
    start = own.storage_offset() - full.storage_offset()
    full[:start].zero_()
    full[start + own.numel() :].zero_()
    if factor != 1.0:
        own.mul_(factor)
