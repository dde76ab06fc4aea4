"""The norm that ``torch.nn.utils.clip_grad_norm_`` returns, compared with FSDP2's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from fsdp_engine import fsdp2
from tests.fsdp2.programs import batch, loss_of, parallelize, seeded
from tests.pool import Ranks, on_ranks
from tests.reference import full
from tests.training import mesh_of

clip = torch.nn.utils.clip_grad_norm_


def compare(order: float, foreach: bool, num_axes: int) -> list[Tensor]:
    mesh = mesh_of(*[2] * num_axes)

    def script(api: Any) -> list[Tensor]:
        model = parallelize(api, seeded(), mesh=mesh)
        loss_of(model, *batch(0, 0, mesh.get_rank())).backward()
        norm: Any = clip(model.parameters(), 0.1, order, foreach=foreach)
        assert isinstance(norm, DTensor)
        assert norm.device_mesh == mesh
        total = norm.full_tensor()
        assert type(total) is Tensor
        if api is fsdp2:  # ways in which programs read the norm
            assert norm.item() == float(norm) == total.item()
            assert bool(norm > 0.1) is bool(total > 0.1)
            assert torch.isfinite(norm)
            torch.testing.assert_close(norm.to_local(), total)
        return [total, full(clip(model.parameters(), 1e9, order, error_if_nonfinite=True))]

    found = script(fsdp2)
    torch.testing.assert_close(found, script(torch.distributed.fsdp), rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize(("order", "foreach"), [(2.0, True), (2.0, False), (math.inf, True)])
def test_the_norm_is_a_dtensor_as_fsdp2_returns_it(
    ranks: Ranks, order: float, foreach: bool, num_axes: int
) -> None:
    found = ranks.run(compare, order, foreach, num_axes, world_size=2**num_axes)
    torch.testing.assert_close(found[0], found[-1], rtol=0, atol=0)


@on_ranks(2)
def test_the_norm_is_a_plain_tensor_with_shard_and_with_plain_gradients() -> None:
    model: Any = nn.Linear(4, 4)
    fe.shard(model)
    model(torch.ones(2, 4)).sum().backward()
    norm: Any = clip(model.parameters(), 1.0)
    assert not isinstance(norm, DTensor)
    assert norm.full_tensor() == norm
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(part[0])
    part(torch.ones(2, 4)).sum().backward()
    expected = math.hypot(*(full(param.grad).norm().item() for param in part.parameters()))
    norm = clip(part.parameters(), 1.0)
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm.item(), expected)
