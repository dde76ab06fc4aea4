"""The factors that gradients are multiplied with, from autograd to the optimizer.

[Note: Averaging]
Every rank contributes its mean loss; the result is the gradient of the mean over all ranks. The
factor ``1 / (ranks * extra divisor)`` is applied once: while gradients are written, or
(``average_in_collective``) the ranks' share of it by the collectives, axis by axis. Without
``gradient_reduce_div_fusion`` the share that collectives do not apply is a separate pass, just
before the first reduction.

Products are rounded to the dtype that they are written in, not to the gradient's own before:
divided by 1,024 ranks in fp16, gradients below 2**-15 would underflow, also where sums are in fp32.

[Note: Gradients in fp16]
Divided by many ranks, small gradients would underflow in fp16; not divided, sums of large ones
would overflow. So gradients that are sent in fp16 are divided by about the root of that divisor
before the reduction, and by the rest after it: in a buffer of the communication dtype they are
larger by ``boost``, a power of two. (PyTorch's FSDP divides in the same two parts.) Gradients that
are accumulated full in fp16 have no such buffer: they are divided once, before the reduction.

[Note: Reducing again]
A backward after the last reduction adds to reduced gradients. Along axes that shard gradients every
microbatch does so. Along the others gradients are accumulated full and reduced once more, so
reduced gradients must be unchanged by that: each rank keeps the range that it owns, zeros the rest,
and

- where the axis is reduced and sharded, the other ranks have zeros there: the sum is that range;
- where it is all-reduced, all n ranks have the same: each keeps 1/n of it;
- it is multiplied by the factors that collectives or a later pass divide by.

Worked example, 4 ranks at level "optim": 8.0 is reduced, and gradients 4, 0, 4, 8 follow. They are
written as 1, 0, 1, 2; one rank has 8.0 beside its own, and the sum is 12.0 = 8.0 + the mean, 4.0.
At "no_shard" each rank has 2.0 beside its own, and the sum is the same. It takes no memory.

Where gradients are sent in another dtype, reduced gradients would be rounded each time. There they
are kept beside the accumulation buffer instead: see [Note: Gradients between backwards] in
``published_gradients.py``.
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
        alpha: applied while gradients are written.
        factor: the same for products: a tensor of one dimension where products must not be rounded
            to the gradient's own dtype, since it takes part in type promotion.
        later: applied by a separate pass before the first reduction; 1.0: there is none.
        boost: The factor of gradients in a buffer of the communication dtype.
        average: the collectives apply the ranks' share.
        num_ranks: the number of ranks, or the number that users divide by instead.
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
        spec, options: The spec and options of the buffer.
        num_ranks: the number of ranks, or the number that users divide by instead.
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
    """Whether a product of a gradient in ``dtype`` with a Python number, which is in ``dtype``,
    loses nothing before it is written in ``written``."""
    if factor == 1.0 or dtype == written or dtype.itemsize > written.itemsize:
        return True
    # A power of two changes the exponent alone; fp16 has fewer of them than bf16 and fp32.
    is_power_of_two = math.frexp(factor)[0] == 0.5
    return is_power_of_two and torch.finfo(dtype).tiny <= torch.finfo(written).tiny


def boost(divisor: float, comm: torch.dtype) -> float:
    """Returns the factor of gradients in a buffer of the communication dtype ``comm`` that are to
    be divided by ``divisor``: see [Note: Gradients in fp16]. 1.0 for other dtypes."""
    return max(1.0, 2.0 ** round(math.log2(divisor) / 2)) if comm == torch.float16 else 1.0


def kept_factor(
    mesh_communicators: MeshCommunicators,
    axes: Sequence[Axis],
    spec: BufferSpec,
    scale: GradientScale,
) -> float:
    """Returns the factor by which reduced gradients are unchanged when they are reduced again.

    Args:
        mesh_communicators: The communicators of the mesh.
        axes: along which gradients are reduced once more.
        spec: The spec of the buffer.
        scale: what its gradients are multiplied with.
    """
    # The later pass multiplies the staging buffer alone.
    factor = 1.0 if spec.grad_depth > 0 else 1.0 / scale.later
    for axis in axes:
        comm = mesh_communicators.comms[axis].reduce
        assert comm is not None
        is_cut = spec.optim_depth > AXIS_BELOW_DEPTH.index(axis)
        if is_cut and scale.average:
            factor *= comm.size
        elif not is_cut and not scale.average:
            factor /= comm.size
    return factor


def keep_owned(accum: ShardedBuffer, optim_depth: int, factor: float) -> None:
    """Multiply the part at ``optim_depth`` with ``factor``, and zero the rest, in place."""
    full, own = accum.tensor, accum.narrow(optim_depth)
    start = own.storage_offset() - full.storage_offset()
    full[:start].zero_()
    full[start + own.numel() :].zero_()
    if factor != 1.0:
        own.mul_(factor)
