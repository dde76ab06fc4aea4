"""Steps of optimizers that do not hold the engine's parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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


@on_ranks(2)
def test_one_rank_may_step_an_optimizer_of_its_own() -> None:
    for level in LEVELS:
        for policy in POLICIES:
            shard(model := make_model(), level, policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            probe = nn.Parameter(torch.ones(4))
            other = torch.optim.SGD([probe], lr=0.1)
            for _ in range(2):
                losses = []
                for _ in range(2):
                    loss = model(torch.ones(2, 8)).square().sum()
                    losses.append(loss.detach().clone())
                    if dist.get_rank() == 0:
                        probe.square().sum().backward()
                        other.step()
                    loss.backward()  # rank 0 must not gather again
                assert torch.equal(*losses)
                optimizer.step()
                optimizer.zero_grad()


def slice_of(tensor: Tensor) -> Tensor:
    """This rank's shard, whose changes do not count as changes of the parameter."""
    return tensor.to_local().data if isinstance(tensor, fe.FlatDTensor) else tensor.data


@pytest.mark.parametrize("kind", ["foreach", "fused"])
@on_ranks(2)
def test_a_step_on_views_of_the_shards_is_seen(kind: str) -> None:
    for level in LEVELS:
        for policy in POLICIES:
            engine = shard(model := make_model(), level, policy)
            shards = [slice_of(param) for param in model.parameters()]
            optimizer = torch.optim.Adam(shards, lr=0.1, **{kind: True})
            x = torch.ones(2, 8)
            model(x).square().sum().backward()
            for own, param in zip(shards, model.parameters(), strict=True):
                own.grad = slice_of(param.grad)
            optimizer.step()
            expected = make_model()
            expected.load_state_dict(engine.full_state_dict())
            if policy is not None:
                expected.bfloat16()
            dtype = torch.float32 if policy is None else torch.bfloat16
            torch.testing.assert_close(model(x).to(dtype), expected(x.to(dtype)))
