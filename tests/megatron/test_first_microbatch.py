"""``set_is_first_microbatch``, by the call of Megatron-Core's schedules."""

from __future__ import annotations

import torch
from torch import nn

import fsdp_engine as fe
from tests.pool import on_ranks


class _CachesWeights(nn.Linear):
    """Quantises its weights in a step's first microbatch, as Megatron-Core's TELinear does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.is_first_microbatch = True
        self.num_quantised = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.num_quantised += self.is_first_microbatch
        self.is_first_microbatch = False
        return super().forward(batch)


@on_ranks(2)
def test_schedules_refresh_cached_weights_once_a_step() -> None:
    layers = [_CachesWeights(), _CachesWeights()]
    config = fe.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = fe.DistributedDataParallel(nn.Sequential(layers[0], nn.ReLU(), layers[1]), config)
    for step in range(3):
        for microbatch in range(2):
            if microbatch == 0:
                model.set_is_first_microbatch()
            model(torch.ones(1, 4)).sum().backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
        assert [layer.num_quantised for layer in layers] == [step + 1] * 2
