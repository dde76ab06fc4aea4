"""The norm that ``torch.nn.utils.clip_grad_norm_`` returns, compared with FSDP2's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_engine as fe
from tests.fsdp2.programs import APIS, batch, loss_of, parallelize
from tests.fsdp2.scene import seeded
from tests.pool import Ranks, on_ranks


def _norms(api: str, order: float, foreach: bool, num_axes: int) -> tuple[Tensor, Tensor]:
    names = ("replicate", "shard")[-num_axes:]
    mesh = init_device_mesh("cpu", (2,) * num_axes, mesh_dim_names=names)
    model = parallelize(APIS[api], seeded(), mesh=mesh)
    loss_of(model, *batch(0, 0, mesh.get_rank())).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order, foreach=foreach)
    assert isinstance(norm, DTensor)
    assert norm.device_mesh == mesh
    whole = norm.full_tensor()
    assert type(whole) is Tensor
    # As programs use it.
    if api == "fsdp_engine":
        assert norm.item() == float(norm) == whole.item()
        assert bool(norm > 0.1) is bool(whole > 0.1)
        assert torch.isfinite(norm)
        torch.testing.assert_close(norm.to_local(), whole)
    clipped = torch.nn.utils.clip_grad_norm_(
        model.parameters(), 1e9, order, error_if_nonfinite=True
    )
    return whole, clipped.full_tensor()


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize(("order", "foreach"), [(2.0, True), (2.0, False), (math.inf, True)])
def test_the_norm_is_a_dtensor_as_fsdp2_returns_it(
    ranks: Ranks, order: float, foreach: bool, num_axes: int
) -> None:
    size = 2**num_axes
    found = ranks.run(_norms, "fsdp_engine", order, foreach, num_axes, world_size=size)
    expected = ranks.run(_norms, "fsdp2", order, foreach, num_axes, world_size=size)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0], found[-1], rtol=0, atol=0)


@on_ranks(2)
def test_the_norm_is_a_plain_tensor_with_shard_and_with_plain_gradients() -> None:
    model = nn.Linear(4, 4)
    fe.shard(model)
    model(torch.ones(2, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not isinstance(norm, DTensor)
    assert norm.full_tensor() == norm  # type: ignore[attr-defined]
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    APIS["fsdp_engine"].fully_shard(part[0])
    part(torch.ones(2, 4)).sum().backward()
    expected = math.hypot(*(whole_norm(param) for param in part.parameters()))
    norm = torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)
    assert not isinstance(norm, DTensor)
    torch.testing.assert_close(norm.item(), expected)


def whole_norm(param: Tensor) -> float:
    grad = param.grad
    assert grad is not None
    full = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return full.norm().item()
