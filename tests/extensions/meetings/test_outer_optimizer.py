"""Exchanges of ``fe.OuterOptimizer`` with the codes of ``fe.QuantizedReduction``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.extensions.outer_optimizer.replica import Replica, simulated
from tests.extensions.outer_optimizer.simulation import make_model
from tests.pool import on_ranks
from tests.reference import full_weights


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(4)
def test_exchanges_in_few_bits_give_all_replicas_the_same_weights(bits: int) -> None:
    run = Replica((4, 1), {"every": 2, "bits": bits})
    run.train(4)
    plain = simulated((4, 1), {"every": 2}).run(4)[0]
    error, moved = 0.0, 0.0
    start = dict(make_model().named_parameters())
    for name, value in full_weights(run.model).items():
        values = [torch.empty_like(value) for _ in range(4)]
        dist.all_gather(values, value)
        assert all(torch.equal(values[0], each) for each in values), name
        error += float((value - plain[name]).square().sum())
        moved += float((plain[name] - start[name].detach()).square().sum())
    assert 0 < error**0.5 < moved**0.5 * (0.02 if bits == 8 else 0.3)
