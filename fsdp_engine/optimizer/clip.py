"""Norm and clipping of all gradients, on this rank's flat shards: one reduction, no host wait.

[Note: Accuracy of the norm]
On CPU ``vector_norm`` adds up a whole tensor in a few fp32 accumulators: the norm of 2.4 million
elements is 4e-5 too small, that of 1e8 elements 1.1 %. So each shard is viewed as rows of 4,096
elements, whose norms are right to 1e-6, and the norms of the rows are combined in fp64:
3e-9 for 1e8 elements, at the same speed (30 ms; fp64 throughout takes 670 ms and a copy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.devices.collectives import all_reduce_

_WHAT = "the norm of gradients"
_ROW = 4096


def total_norm(
    shards: Sequence[Tensor],
    norm_type: float,
    group: ProcessGroup | None,
    device: torch.device,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """The p-norm over all elements of all ranks' shards.

    Args:
        shards: this rank's reduced gradients, 1-D, each element on one rank of ``group``; padding
            is zero.
        norm_type: p; ``math.inf`` for the largest magnitude.
        group: the ranks over which the elements are spread; None if this rank has them all.
        device: where the result lives.
        copies: how many ranks of ``group`` hold the elements of each shard. None: one each.

    Returns:
        A 0-d fp32 tensor (fp64 for fp64 gradients), the same on every rank of ``group``.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf; found {norm_type!r}")
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in shards) else torch.float32
    norms = [
        _local_norm(shard, norm_type, dtype) * count ** (-1.0 / norm_type)
        for shard, count in zip(shards, copies or [1] * len(shards), strict=True)
        if shard.numel()
    ]
    if not norms:
        norms = [torch.zeros((), dtype=torch.float64, device=device)]
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(dtype)
    if math.isinf(norm_type):
        return all_reduce_(local, group, "max", what=_WHAT)
    return all_reduce_(local.pow(norm_type), group, what=_WHAT).pow(1.0 / norm_type)


def _local_norm(shard: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The p-norm of one shard as a 0-d fp64 tensor: see [Note: Accuracy of the norm].

    Args:
        shard: 1-D.
        norm_type: p.
        dtype: of the sums within a row.
    """
    in_rows = shard.numel() // _ROW * _ROW
    norms = torch.linalg.vector_norm(shard[:in_rows].view(-1, _ROW), norm_type, 1, dtype=dtype)
    if in_rows < shard.numel():
        rest = torch.linalg.vector_norm(shard[in_rows:], norm_type, dtype=dtype)
        norms = torch.cat([norms, rest.view(1)])
    return torch.linalg.vector_norm(norms, norm_type, dtype=torch.float64)


def clip_(shards: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the shards in place so that a total norm of ``norm`` becomes at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: ``min(1, max_norm / (norm + 1e-6))``.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shard in shards:
        shard.mul_(factor.to(shard.dtype))
