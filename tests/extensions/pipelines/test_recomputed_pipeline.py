"""Re-entrant checkpoints where the next forward precedes a backward, as in a pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp_engine as fe
from tests import reference
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.pool import on_ranks

DIM, NUM_MICROBATCHES = 6, 4


class Recomputed(nn.Module):
    """Each layer is recomputed by itself; a bucket holds several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x.square().mean()


def train_step(model: nn.Module, parts: list[Tensor], ddp: fe.DistributedDataParallel) -> None:
    """1F1B with one forward ahead: F0 F1 B0 F2 B1 F3 B2 B3."""
    loss = model(parts[0])
    for part in parts[1:]:
        ahead = model(part)
        with ddp.no_sync():
            loss.backward()
        loss = ahead
    loss.backward()


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_gradients_of_recomputed_forwards_come_in_time(level: str, evaluates: bool) -> None:
    torch.manual_seed(0)
    model = Recomputed()
    alone = copy.deepcopy(model)
    ddp = fe.DistributedDataParallel(
        model, config_of(level, overlap=True, bucket_size=3 * DIM * DIM), units=()
    )
    for step in range(3):
        dice = torch.Generator().manual_seed(step)
        shape = (dist.get_world_size(), NUM_MICROBATCHES, 2, DIM)
        data = torch.randn(shape, generator=dice)
        if evaluates and step == 1:
            with torch.no_grad():
                ddp(data[0, 0].clone())
        ddp.zero_grad_buffer()
        alone.zero_grad()
        train_step(ddp, [each.clone() for each in data[dist.get_rank()]], ddp)
        ddp.finish_grad_sync()
        (sum(alone(each.clone()) for each in data.flatten(0, 1)) / len(data)).backward()
        torch.testing.assert_close(*map(reference.full_gradients, (model, alone)))
