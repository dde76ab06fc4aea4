"""Tensor and sequence parallelism in plain torch [Shoeybi et al., 2019; Korthikanti et al., 2022].

The blocks of :class:`~gpt.GPT` stay as they are; only their linears are replaced. The two linears
of attention, and of an MLP, are a pair. Within a pair each tensor rank has the whole sequence,
between pairs it has its own part:

    own part  -> column-parallel ->  own heads (own hidden units)  -> row-parallel ->  own part
              gather                 whole sequence                   reduce-scatter

Embeddings, norms, biases after a reduce-scatter, the head and the loss work on a rank's own part of
the sequence. Their parameters are replicated on all tensor ranks, and each rank computes a partial
gradient, of its own part. The parameters are marked ``sequence_parallel``, so that
``finalize_model_grads`` sums their gradients over tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from gpt import GPT, Block, GPTConfig, Linear

# A target that is not counted.
IGNORED = -100


class _GatherSequence(torch.autograd.Function):
    """All-gather of the sequence. Its backward is a reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed_part(grads[0], ctx.group), None


class _ReduceScatterSequence(torch.autograd.Function):
    """Reduce-scatter of the sequence. Its backward is an all-gather of the gradient."""

    @staticmethod
    def forward(ctx: Any, addend: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed_part(addend, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.group), None


def _gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _summed_part(addend: Tensor, group: ProcessGroup) -> Tensor:
    if group.size() == 1:
        return addend
    parts = [part.contiguous() for part in addend.chunk(group.size(), dim=1)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=group)
    return own


def mark_as_partial(params: Iterable[nn.Parameter]) -> None:
    """Mark replicated parameters whose gradients are summed over tensor ranks."""
    for param in params:
        param.sequence_parallel = True  # type: ignore[attr-defined]


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear: ``[batch, seq / ranks, in]`` to ``[batch, seq, own out]``.

    Args:
        whole: The full linear, of which this rank takes rows of the weight and of the bias.
        group: The tensor ranks.
        num_stacked: Number of linears that are concatenated in ``whole``. Each is sharded.
    """

    def __init__(self, whole: Linear, group: ProcessGroup, num_stacked: int = 1) -> None:
        super().__init__()
        self.group = group
        layout = {"stacked": num_stacked, "ranks": group.size()}
        weights = rearrange(
            whole.weight.detach(), "(stacked ranks out) i -> ranks (stacked out) i", **layout
        )
        biases = rearrange(
            whole.bias.detach(), "(stacked ranks out) -> ranks (stacked out)", **layout
        )
        self.weight = nn.Parameter(weights[group.rank()].clone())
        self.bias = nn.Parameter(biases[group.rank()].clone())

    def forward(self, own: Tensor) -> Tensor:
        return F.linear(_GatherSequence.apply(own, self.group), self.weight, self.bias)  # type: ignore[no-untyped-call]


class RowParallelLinear(nn.Module):
    """Row-parallel linear: ``[batch, seq, own in]`` to ``[batch, seq / ranks, out]``.

    Args:
        whole: The full linear, of which this rank takes columns of the weight, and the bias.
        group: The tensor ranks.
    """

    def __init__(self, whole: Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        weights = whole.weight.detach().chunk(group.size(), dim=1)
        self.weight = nn.Parameter(weights[group.rank()].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        mark_as_partial([self.bias])

    def forward(self, x: Tensor) -> Tensor:
        # The bias is added after the sum. Otherwise every rank would add it.
        addend = F.linear(x, self.weight)
        total: Tensor = _ReduceScatterSequence.apply(addend, self.group)  # type: ignore[no-untyped-call]
        return total + self.bias


class TensorParallelGPT(GPT):
    """This rank's part of a GPT. Its parameters have the names of the full model.

    The full model is initialized first and then sharded, so that any number of tensor ranks begins
    with the same weights, if their random states are the same.

    Args:
        config: Sizes of the full model.
        group: The tensor ranks.

    Raises:
        ValueError: the ranks do not divide the heads or the sequence.
    """

    def __init__(self, config: GPTConfig, group: ProcessGroup) -> None:
        for name in ("num_heads", "sequence_length"):
            if getattr(config, name) % group.size():
                raise ValueError(
                    f"{name}: expected a multiple of the {group.size()} tensor ranks; "
                    f"found {getattr(config, name)}"
                )
        super().__init__(config)
        self.group = group
        mark_as_partial(self.parameters())  # those of the linears below are then replaced
        for block in self.blocks:
            assert isinstance(block, Block)
            attention, mlp = block.attention, block.mlp
            attention.num_heads //= group.size()
            qkv = ColumnParallelLinear(attention.qkv, group, num_stacked=3)
            block.set_submodule("attention.qkv", qkv)
            block.set_submodule("attention.out", RowParallelLinear(attention.out, group))
            block.set_submodule("mlp.up", ColumnParallelLinear(mlp.up, group))
            block.set_submodule("mlp.down", RowParallelLinear(mlp.down, group))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """Cross-entropy, summed over this rank's part of the sequences, in nats.

        Args:
            tokens: int64 ``[batch, seq]``, whole sequences of ``config.sequence_length``.
            targets: of the same shape; ``IGNORED`` at positions without a loss.
        """
        place, size = self.group.rank(), self.group.size()
        positions = torch.arange(tokens.shape[1], device=tokens.device).chunk(size)[place]
        own = tokens.chunk(size, dim=1)[place]
        x = self.token_embedding(own) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        own_targets = targets.chunk(size, dim=1)[place]
        return F.cross_entropy(
            logits.flatten(0, 1), own_targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
