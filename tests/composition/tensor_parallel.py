"""A model that torch's tensor parallelism has sharded, and the same unsharded model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

LENGTH = 8


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(
        self, width: int = 12, hidden: int = 20, words: int = 24, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, -2).float(), tokens.roll(-1, -1).flatten())


# Meshes by default process group; each call of the pool has its own group.
_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, DeviceMesh]] = (
    weakref.WeakKeyDictionary()
)


def mesh_of(sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """One mesh for each shape. DTensor's caches keep the first of several equal meshes, even across
    calls of the pool. So equal meshes need process groups of the same names in all calls."""
    assert dist.group.WORLD is not None
    known = _MESHES.setdefault(dist.group.WORLD, {})
    key = (*sizes, *names)
    if key not in known:
        known[key] = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    return known[key]


def cut(model: Model, tp: DeviceMesh, *, sequence: bool = False, tied: bool = False) -> Model:
    """Linears by columns and rows, embedding by rows, head by columns. With ``sequence`` the norms
    are DTensors, too, whose gradients are partial sums."""
    # The activation between the linears stays a DTensor: if it were plain, torch would guess the
    # global size.
    up = ColwiseParallel(use_local_output=False)
    inner: dict[str, Any] = {"up": up, "down": RowwiseParallel()}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if sequence:
        inner = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, inner)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def tokens_for(step: int, micro: int, rank: int, words: int = 20) -> Tensor:
    """One data-parallel rank's microbatch."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, words, (2, LENGTH), generator=generator)
