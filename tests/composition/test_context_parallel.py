"""Context parallelism: ranks hold parts of each sequence, and share the weights as data-parallel
ranks do.

torch's own ring attention does not run on a CPU (2.11 to 2.13: its flash attention for CPUs has no
sharding strategy). Here keys and values are gathered along the sequence by DTensor, which sends as
much, also in backward, between the engine's messages.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import fsdp_engine as fe
from tests.composition.tensor_parallel import mesh_of, whole
from tests.pool import Ranks

WIDTH, HEADS, LENGTH = 16, 4, 8


class Attention(nn.Module):
    """Causal; ``context``: the ranks that hold parts of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.context: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        first = 0
        if self.context is not None:
            first = self.context.get_local_rank() * x.shape[1]
            key, value = (self._of_all(each, self.context) for each in (key, value))
        places = torch.arange(first, first + x.shape[1])
        mask = places[:, None] >= torch.arange(key.shape[2])[None]
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).flatten(2))

    @staticmethod
    def _of_all(part: Tensor, mesh: DeviceMesh) -> Tensor:
        spread = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
        # Each rank's queries bring a gradient of the whole: they are summed.
        gathered = spread.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial()])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 20, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def as_one_process(sizes: tuple[int, int, int], level: str) -> None:
    """(data, context, tensor) parallel ranks, two steps of SGD."""
    num_data, num_context, num_tensor = sizes
    torch.manual_seed(2)
    alone = Model()
    model: Any = copy.deepcopy(alone)
    mesh = mesh_of(sizes, ("dp", "cp", "tp"))
    for block in model.blocks:
        block.context = mesh["cp"]
        if num_tensor > 1:
            columns = dict.fromkeys(("query", "key", "value"), ColwiseParallel())
            parallelize_module(block, mesh["tp"], {**columns, "out": RowwiseParallel()})
    data = mesh["dp", "cp"]._flatten("dp_cp")
    engine = fe.shard(model, data, level)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (alone, model)]
    at = mesh["dp"].get_local_rank()
    part = slice(mesh["cp"].get_local_rank() * LENGTH // num_context, None)
    part = slice(part.start, part.start + LENGTH // num_context)
    for step in range(2):
        expected = sum(alone(*batch(step, rank)) for rank in range(num_data)) / num_data
        expected.backward()  # type: ignore[union-attr]
        tokens, targets = batch(step, at)
        loss = model(tokens[:, part], targets[:, part])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=engine.mesh.control_group)
        assert mean.item() / engine.mesh.size == pytest.approx(float(expected), rel=1e-5)
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.allclose(whole(mine.grad), theirs.grad, rtol=1e-3, atol=1e-6), name  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2)], ids=["dp cp", "cp tp"])
def test_ranks_that_share_sequences(ranks: Ranks, sizes: tuple[int, int, int]) -> None:
    for level in ("optim", "optim_grads_params"):
        ranks.run(as_one_process, sizes, level)
