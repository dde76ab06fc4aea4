"""Averages of weights whose main weights are offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fsdp_engine as fe
from tests import reference
from tests.models import Mlp, vector_batch
from tests.pool import on_ranks

OFFLOADS = {
    "state on the host": fe.Offload("host"),
    "all on the host": fe.Offload("host", main_weights="host", gradients="host", step_on="host"),
}


def trained(offload: fe.Offload | None) -> list[dict[str, Tensor]]:
    """Averages after three steps, weights within ``swapped()``, and weights after it."""
    torch.manual_seed(0)
    model = Mlp()
    policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    engine = fe.shard(model, mp_policy=policy, extensions=[offload] if offload else [])
    optimizer = fe.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    ema = fe.EMA(engine, decay=0.5)
    for step in range(3):
        model(vector_batch(4, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    averages = {name: reference.full(each) for name, each in ema.state_dict()["shadow"].items()}
    with ema.swapped():
        within = engine.full_state_dict()
    return [averages, within, engine.full_state_dict()]


@pytest.mark.parametrize("name", OFFLOADS)
@on_ranks(2)
def test_averages_of_offloaded_weights_are_those_of_weights_on_the_device(name: str) -> None:
    averages, within, after = trained(OFFLOADS[name])
    torch.testing.assert_close([averages, within, after], trained(None), rtol=0, atol=0)
    torch.testing.assert_close(within, averages, rtol=0, atol=0)
    assert any(not torch.equal(after[key], averages[key]) for key in after)
