"""Updates of routers' expert biases for load balancing without an auxiliary loss.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"
(arXiv:2408.15664): ``bias += rate * sign(mean count - count)``, with the attribute names of
Megatron-Core's router.
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
    """A module that routes tokens to experts with a bias, and counts the tokens of each expert.

    Attributes:
        name: of the module.
        bias: shape ``(experts,)``.
        counts: this rank's tokens per expert since the last update, shape ``(experts,)``.
    """

    name: str
    bias: Tensor
    counts: Tensor


def router_of(name: str, module: nn.Module | None) -> Router | None:
    """``module`` as a router; None if its ``expert_bias`` is None or missing.

    Raises:
        ValueError: ``expert_bias`` and ``local_tokens_per_expert`` differ in shape.
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
    """Update all biases from the counts of all ranks of the group in one all-reduce, and zero the
    counts.

    Args:
        routers: in the same order on all ranks.
        group: ranks whose counts are summed. None: this rank only.
        rate: absolute change of a bias per update.
        device: of the biases and counts.
    """
    all_counts = [router.counts for router in routers]
    narrow = all(counts.dtype in _NARROW for counts in all_counts)
    dtype = torch.float32 if narrow else torch.float64
    sizes = [counts.numel() for counts in all_counts]
    buffer = memory.empty(sum(sizes), dtype, device)
    sums = buffer.split(sizes)
    torch._foreach_copy_(list(sums), all_counts)
    all_reduce_(buffer, group)
    for router, counts in zip(routers, sums, strict=True):
        offset = torch.sign(counts.mean() - counts)
        router.bias.add_(offset.to(router.bias.dtype), alpha=rate)
    torch._foreach_zero_(all_counts)
