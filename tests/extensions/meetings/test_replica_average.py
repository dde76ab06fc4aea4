"""``fe.EMA`` in the ``extra`` of replicas that may be lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_engine as fe
from fsdp_engine.integrations.torchft import ElasticReplicas
from tests.integrations.lighthouses import lighthouse_for
from tests.pool import on_ranks
from tests.training import mesh_of


class Replica(ElasticReplicas):
    def __init__(self, address: str, mesh: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 4)
        self.engine = fe.shard(self.model, mesh, "optim_grads_params")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.ema = fe.EMA(self.engine, decay=0.5)
        super().__init__(
            self.engine,
            fe.shard_optimizer(optimizer),
            extra={"ema": self.ema},
            lighthouse=address,
            num_microbatches=2,
            timeout=20.0,
        )

    def train(self) -> int:
        for number in self.microbatches():
            self.model(torch.full((2, 4), float(number))).square().mean().backward()
        found = self.num_replicas
        assert self.commit()
        self.ema.update()
        return found


lighthouse = partial(lighthouse_for, Replica, join_timeout_ms=500, heartbeat_timeout_ms=1000)


@on_ranks(4)
def test_a_replica_that_comes_later_gets_the_averages() -> None:
    mesh, is_first = mesh_of(2, 2)["inner"], dist.get_rank() < 2
    with lighthouse(1) as join:
        if is_first:
            replica = join(mesh)
            for _ in range(3):
                replica.train()
        dist.barrier()
        if not is_first:
            replica = join(mesh)
        dist.barrier()
        while replica.train() == 1:
            assert replica.step < 5000
        for value in replica.ema.state_dict()["shadow"].values():
            mine = value.full_tensor()
            others = mine.clone()
            dist.broadcast(others, 0)
            assert torch.equal(mine, others)
