"""Granules of rows and of whole tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from tests.pool import on_ranks
from tests.reference import full


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Conv1d(1, 5, 3), nn.Flatten())
    model.empty = nn.Parameter(torch.empty(0, 7))
    return model.double()


def loss(model: nn.Module) -> Tensor:
    inputs = torch.randn(6, 1, 13, generator=torch.Generator().manual_seed(1)).double()
    return model(inputs).square().sum() + model.empty.sum()


def step_rows(params: list[tuple[Tensor, Tensor, int]]) -> None:
    """A step of each row by its own norm."""
    for weight, grad, columns in params:
        rows = grad.view(-1, columns)
        norms = rows.norm(dim=1, keepdim=True) + 1e-9
        weight.view(-1, columns).sub_(0.1 * rows / norms)


@on_ranks(3)
def test_rows_or_tensors_are_whole() -> None:
    expected, model, whole = build(), build(), build()
    loss(expected).backward()
    with torch.no_grad():
        step_rows([(p, p.grad, max(p.shape[1:].numel(), 1)) for p in expected.parameters()])  # type: ignore[misc]
    options = fe.Options(granule=fe.whole_rows, min_unit_size=0)
    fe.shard(model, None, "optim_grads_params", options=options)
    loss(model).backward()
    of_rank = []
    for param in model.parameters():
        assert isinstance(param, fe.FlatDTensor)
        assert isinstance(param.grad, fe.FlatDTensor)
        columns = param.shape[1:].numel()
        assert param.local.numel() % columns == 0
        of_rank.append((param.local, param.grad.local, columns))
    with torch.no_grad():
        step_rows(of_rank)
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(param), other.detach())
    options = fe.Options(granule=fe.whole_tensors, min_unit_size=0)
    fe.shard(whole, None, "optim_grads_params", options=options)
    for param in whole.parameters():
        assert isinstance(param, fe.FlatDTensor)
        assert param.local.numel() in (0, param.numel())


@pytest.mark.parametrize(
    ("shape", "rows", "tensors"), [((), 1, 1), ((5,), 1, 5), ((4, 2, 3), 6, 24), ((0, 3), 3, 1)]
)
def test_sizes(shape: tuple[int, ...], rows: int, tensors: int) -> None:
    assert fe.whole_rows("", torch.empty(shape)) == rows
    assert fe.whole_tensors("", torch.empty(shape)) == tensors
