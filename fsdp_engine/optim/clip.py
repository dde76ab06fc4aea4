"""Norm and clipping of all gradients on flat shards, with one all-reduce and without a host sync.

``flat_dtensor/norms.py`` describes the accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.flat_dtensor.norms import real_dtype, slice_norm

_OPERATION = "the norm of gradients"


def total_norm(
    shards: Sequence[Tensor],
    norm_type: float,
    group: ProcessGroup | None,
    device: torch.device,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """Compute the p-norm over all elements of all ranks' shards. Collective.

    Args:
        shards: This rank's reduced gradients, 1-D. Padding must be zero.
        norm_type: The order p, or ``math.inf`` for the largest magnitude.
        group: The ranks over which the elements are sharded. None: this rank holds all of them.
        device: The device of the result if this rank holds no elements. Otherwise the result is on
            the device of the shards.
        copies: Number of ranks of ``group`` that hold the elements of each shard. None: 1 for each.

    Returns:
        A 0-d fp32 tensor (fp64 for fp64 and complex128 gradients), the same on every rank of
        ``group``.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf; found {norm_type!r}")
    is_wide = any(real_dtype(shard.dtype) == torch.float64 for shard in shards)
    dtype = torch.float64 if is_wide else torch.float32
    norms = [
        slice_norm(shard, norm_type, dtype) * count ** (-1.0 / norm_type)
        for shard, count in zip(shards, copies or [1] * len(shards), strict=True)
        if shard.numel()
    ]
    if not norms:
        device = shards[0].device if shards else device  # as on ranks with elements
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if math.isinf(norm_type):
        from fsdp_engine.flat_dtensor.full_reductions import extreme_over

        return extreme_over(local.to(dtype), () if group is None else (group,), "max", _OPERATION)
    # In fp32 the power of a norm could overflow or become zero.
    total = all_reduce_(local.pow(norm_type), group, what=_OPERATION)
    return total.pow(1.0 / norm_type).to(dtype)


def clip_(shards: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the shards in place so that a total norm of ``norm`` becomes at most ``max_norm``.

    The factor is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    for shard in shards:
        shard.mul_(factor.to(real_dtype(shard.dtype)))
