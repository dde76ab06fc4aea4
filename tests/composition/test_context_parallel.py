"""Context parallelism: ranks hold parts of each sequence, and share the weights as data-parallel
ranks do.

torch's own ring attention does not run on a CPU (2.11 to 2.13). Here DTensor gathers keys along the
sequence, in forward and backward, between the engine's messages; this sends as many bytes as ring
attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import fsdp_engine as fe
from tests.composition.tensor_parallel import LENGTH, mesh_of
from tests.pool import on_ranks
from tests.scenario import Scenario

WIDTH = 16


class Mixing(nn.Module):
    """Each position reads all keys; ``context``: the ranks that hold parts of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, context: DeviceMesh | None) -> Tensor:
        keys = self.key(x)
        if context is not None:
            spread = DTensor.from_local(keys, context, [Shard(1)], run_check=False)
            # Each rank has a gradient of all keys, from its own queries: these are summed.
            gathered = spread.redistribute(placements=[Replicate()])
            keys = gathered.to_local(grad_placements=[Partial()])
        return x + self.out(torch.tanh(self.query(x)) * keys.mean(1, keepdim=True))


class Model(nn.Module):
    context: DeviceMesh | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Mixing() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, *batch: Tensor) -> Tensor:
        if self.context is not None:
            rank, size = self.context.get_local_rank(), self.context.size()
            batch = tuple(each.chunk(size, 1)[rank] for each in batch)
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x, self.context)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=["dp cp", "cp tp"])
@on_ranks(4)
def test_ranks_that_share_sequences(sizes: tuple[int, int, int], level: str) -> None:
    """(data, context, tensor) parallel ranks."""
    mesh = mesh_of(sizes, ("dp", "cp", "tp"))

    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        step, rank = divmod(seed - 1, 100)
        generator = torch.Generator().manual_seed(10 * step + rank // (sizes[1] * sizes[2]))
        tokens = torch.randint(0, 20, (rows, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def shard(model: Any, data: Any, **options: Any) -> Any:
        model.context = mesh["cp"]
        columns = dict.fromkeys(("query", "key"), ColwiseParallel())
        for block in model.blocks if sizes[2] > 1 else ():
            parallelize_module(block, mesh["tp"], {**columns, "out": RowwiseParallel()})
        return fe.shard(model, data, **options)

    Scenario(
        model=Model,
        batch=batch,
        pair=(level, "no_shard"),
        mesh=mesh["dp", "cp"]._flatten("dp_cp"),
        shard=shard,
        optimizer=partial(torch.optim.SGD, lr=0.3),
        later=1e-4,
    ).check()
