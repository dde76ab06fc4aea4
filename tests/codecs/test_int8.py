"""The int8 codec of the tests, on the base class of fp8's, trains at every level."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests.codecs.int8_codec import Int8
from tests.pool import on_ranks


def quantised(weight: Tensor) -> Tensor:
    """``weight`` in steps of a row's amax / 127."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize("level", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_modules_compute_with_int8_weights_and_main_weights_are_updated(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    weights = [module.weight.detach().clone() for module in model]
    inputs = torch.randn(4, 6)
    engine = fe.shard(model, strategy=level, codec_rules=[Int8()], min_unit_size=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        copies = [quantised(weight).requires_grad_() for weight in weights]
        hidden = nn.functional.linear(inputs, copies[0], engine.full_tensor("0.bias"))
        expected = nn.functional.linear(hidden, copies[1], engine.full_tensor("1.bias"))
        found = model(inputs)
        torch.testing.assert_close(found, expected)
        expected.square().mean().backward()
        found.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight, copy in zip(weights, copies, strict=True):
            weight -= 0.5 * copy.grad
        for name, weight in zip(("0.weight", "1.weight"), weights, strict=True):
            torch.testing.assert_close(engine.full_tensor(name), weight)
