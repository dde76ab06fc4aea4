"""Experts' biases, moved towards an even load without a loss for it.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
(arXiv:2408.15664): ``bias += rate * sign(mean count - count)``, by the names of Megatron-Core's
router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fsdp_engine.devices import memory
from fsdp_engine.devices.collectives import all_reduce_

# Counts in these dtypes are summed in fp32; others (integers) in fp64, which holds them exactly.
_NARROW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Router:
    """A module that steers tokens to experts by a bias, and counts them.

    Attributes:
        name: of the module.
        bias: shape ``(experts,)``.
        counts: tokens of this rank since the last update, shape ``(experts,)``.
    """

    name: str
    bias: Tensor
    counts: Tensor


def router_of(name: str, module: nn.Module | None) -> Router | None:
    """The router that ``module`` is; None if its ``expert_bias`` is None or missing.

    Raises:
        ValueError: ``expert_bias`` and ``local_tokens_per_expert`` do not fit each other.
    """
    bias = getattr(module, "expert_bias", None)
    if bias is None:
        return None
    counts = getattr(module, "local_tokens_per_expert", None)
    if bias.ndim != 1 or counts is None or counts.shape != bias.shape:
        found = None if counts is None else tuple(counts.shape)
        raise ValueError(
            f"{name}: expected expert_bias and local_tokens_per_expert of one shape, (experts,); "
            f"found {tuple(bias.shape)} and {found}"
        )
    return Router(name, bias, counts)


@torch.no_grad()
def update_expert_biases(
    routers: Sequence[Router], group: ProcessGroup | None, rate: float, device: torch.device
) -> None:
    """Move all biases by the counts of the whole group, in one all-reduce, and zero the counts."""
    all_counts = [router.counts for router in routers]
    narrow = all(counts.dtype in _NARROW for counts in all_counts)
    dtype = torch.float32 if narrow else torch.float64
    sizes = [counts.numel() for counts in all_counts]
    message = memory.empty(sum(sizes), dtype, device)
    sums = message.split(sizes)
    torch._foreach_copy_(list(sums), all_counts)
    all_reduce_(message, group)
    for router, counts in zip(routers, sums, strict=True):
        offset = torch.sign(counts.mean() - counts)
        router.bias.add_(offset.to(router.bias.dtype), alpha=rate)
    torch._foreach_zero_(all_counts)
