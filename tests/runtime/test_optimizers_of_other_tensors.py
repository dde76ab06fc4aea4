"""Steps of optimizers that do not hold the engine's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.pool import on_ranks

POLICIES = (None, fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def shard(model: nn.Module, level: str, policy: fe.MixedPrecisionPolicy | None) -> fe.Engine:
    options = fe.Options(min_unit_size=0)
    return fe.shard(model, strategy=level, units="*", mp_policy=policy, options=options)


def slice_of(tensor: Tensor) -> Tensor:
    """This rank's shard, whose changes do not count as changes of the parameter."""
    return tensor.to_local().data if isinstance(tensor, fe.FlatDTensor) else tensor.data


@pytest.mark.parametrize("kind", ["foreach", "fused", "copies"])
@on_ranks(2)
def test_a_step_on_views_or_copies_of_the_shards_is_seen(kind: str) -> None:
    for level in LEVELS:
        for policy in POLICIES:
            engine = shard(model := make_model(), level, policy)
            x = torch.ones(2, 8)
            model(x).square().sum().backward()
            shards = [slice_of(param) for param in model.parameters()]
            stepped = [each.clone() for each in shards] if kind == "copies" else shards
            optimizer = torch.optim.Adam(stepped, lr=0.1, fused=kind == "fused")
            for own, param in zip(stepped, model.parameters(), strict=True):
                own.grad = slice_of(param.grad)
            optimizer.step()
            for target, own in zip(shards, stepped, strict=True):
                target.copy_(own)
            expected = make_model()
            expected.load_state_dict(engine.full_state_dict())
            if policy is not None:
                expected.bfloat16()
            dtype = torch.float32 if policy is None else torch.bfloat16
            torch.testing.assert_close(model(x).to(dtype), expected(x.to(dtype)))
