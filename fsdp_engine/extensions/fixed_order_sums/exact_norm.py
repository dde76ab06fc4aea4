"""The 2-norm of sharded gradients, with the same bits for every way in which they are sharded.

The square of an fp32 number is an integer of 48 bits times a power of two. Integers that belong to
the same power are summed as 64-bit integers, whose sums do not depend on the order (Demmel and
Nguyen, "Parallel Reproducible Summation", use bins of floating-point numbers in the same way). One
all-reduce sums the bins of all ranks. Each rank then adds the bins, as fp64, in the order of their
powers. Nothing is rounded before that, so the norm is more accurate than one from fp64 sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.memory import allocator
from fsdp_engine.optim.clip import total_norm

_BITS = 24  # bits of the significand of an fp32 number, and of each half of its square
_LOWEST = -148  # the exponent that `frexp` returns for the smallest fp32 number
_NUM_BINS = 128 - _LOWEST + 1
_MOST_AT_ONCE = 2**18  # elements, each of which takes about 50 bytes within a call


def exact_norm(
    shards: Sequence[Tensor],
    norm_type: float,
    group: ProcessGroup | None,
    device: torch.device,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """Compute the norm of fp32 gradients, see the module docstring. Collective.

    Args:
        shards, norm_type, group, device: See :func:`~fsdp_engine.optim.clip.total_norm`.
        copies: Must be None: ``FixedOrderSums`` refuses models that need another value.

    Raises:
        ValueError: ``norm_type`` is neither 2 nor inf.
    """
    assert copies is None
    if math.isinf(norm_type) and norm_type > 0:
        # A maximum does not depend on the order.
        return total_norm(shards, norm_type, group, device)
    if norm_type != 2:
        raise ValueError(f"norm_type: expected 2 or inf with FixedOrderSums; found {norm_type!r}")
    # The rows have the upper and the lower halves of squares, in one bin for each exponent. The
    # last bin counts the elements that are infinite (first row) or NaN (second row).
    device = shards[0].device if shards else device  # offloaded gradients are on the host
    bins = allocator.zeros(2 * (_NUM_BINS + 1), torch.int64, device).view(2, -1)
    for shard in shards:
        for piece in shard.reshape(-1).split(_MOST_AT_ONCE):
            _add_squares(bins, piece)
    return _root(all_reduce_(bins, group, what="the norm of gradients"))


def _add_squares(bins: Tensor, values: Tensor) -> None:
    finite = values.isfinite()
    bins[0, -1] += values.isinf().sum()
    bins[1, -1] += values.isnan().sum()
    significand, exponent = torch.frexp(values.double().masked_fill_(~finite, 0.0))
    whole = significand.mul_(2.0**_BITS).long()
    squares = whole * whole
    places = exponent.long().sub_(_LOWEST)  # zeros have exponent 0, and add nothing
    bins[0].index_add_(0, places, squares >> _BITS)
    bins[1].index_add_(0, places, squares & (2**_BITS - 1))


def _root(bins: Tensor) -> Tensor:
    num_infinite, num_nan = bins[:, -1].unbind()
    powers = torch.arange(_NUM_BINS, dtype=torch.float64, device=bins.device)
    powers = torch.exp2(2 * (powers + _LOWEST - _BITS))
    upper, lower = bins[:, :-1].double().unbind()
    total = ((upper * 2.0**_BITS + lower) * powers).sum()
    total = total.masked_fill(num_infinite > 0, math.inf).masked_fill(num_nan > 0, math.nan)
    return total.sqrt().float()
