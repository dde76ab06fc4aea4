"""Functions along dims of sharded parameters: gathered, with the result of plain torch."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp_engine.flat_dtensor import gathered_functions
from fsdp_engine.flat_dtensor.gathered_functions import GatheredView
from fsdp_engine.fsdp2 import fully_shard
from tests.pool import on_ranks

_FUNCTIONS: list[Callable[[Any], Any]] = [
    lambda p: p.norm(dim=1),
    lambda p: p.sum(0),
    lambda p: p.mean(1, keepdim=True),
    lambda p: p.max(),
    lambda p: p.max(dim=1).values,
    lambda p: p.std(),
    lambda p: p @ p.t(),
    lambda p: torch.linalg.svdvals(p),
    lambda p: F.normalize(p),
    lambda p: F.linear(torch.ones(2, 8), p),
    lambda p: torch.cat([p, p]),
    lambda p: p.softmax(-1),
    lambda p: p.T,
    lambda p: p[0],
    lambda p: p[:, 1:3],
    lambda p: p.view(-1),
    lambda p: p.unsqueeze(0),
    lambda p: p.T @ torch.ones(5, 2),
    lambda p: p[1] + 1,
    lambda p: sum(p.unbind()),
]


def _model() -> tuple[nn.Module, Tensor, Any]:
    """A sharded model, one of its weights, and the same full weight."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    whole = model[0].weight.detach().clone()
    fully_shard(model)
    return model, whole, model[0].weight


@pytest.mark.filterwarnings("ignore:.*gathers the full tensor")
@on_ranks(2)
def test_functions_along_dims_answer_as_plain_torch() -> None:
    _, whole, param = _model()
    for function in _FUNCTIONS:
        plain = whole.clone().requires_grad_()
        expected = function(plain)
        found = function(param)
        assert type(found) in (Tensor, GatheredView)
        torch.testing.assert_close(found.detach().as_subclass(Tensor), expected.detach())
        param.grad = None
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(param.grad.full_tensor(), plain.grad)


@pytest.mark.filterwarnings("ignore:.*gathers the full tensor")
@on_ranks(2)
def test_a_change_that_would_be_lost_raises() -> None:
    _, whole, param = _model()
    changes: list[Callable[[], Any]] = [
        lambda: param.data[0].zero_(),
        lambda: param.data.T.add_(1),
        lambda: param.detach()[0].__setitem__(0, 1.0),
        lambda: param.detach()[0].data.mul_(2),
        lambda: param.detach()[0][1:].fill_(2),
        lambda: torch.add(torch.ones(8), 1, out=param.detach()[0]),
    ]
    for change in changes:
        with pytest.raises(ValueError, match="found a view of a sharded tensor"):
            change()
    torch.testing.assert_close(param.full_tensor().detach(), whole)


@pytest.mark.filterwarnings("ignore:.*gathers the full tensor")
@on_ranks(2)
def test_a_view_is_a_tensor_for_everything_else() -> None:
    model, whole, param = _model()
    buffer = io.BytesIO()
    torch.save(param.detach()[0], buffer)
    buffer.seek(0)
    assert type(torch.load(buffer)) is Tensor
    assert type(pickle.loads(pickle.dumps(param.detach()[0]))) is Tensor
    assert torch.equal(param.detach()[0].clone().zero_(), torch.zeros(8))
    vector = nn.utils.parameters_to_vector(model.parameters())
    torch.testing.assert_close(vector[:40].detach().as_subclass(Tensor), whole.view(-1))
    with torch.no_grad():
        param.copy_(param.T.T + 1)
    torch.testing.assert_close(param.full_tensor().detach(), whole + 1)


@on_ranks(2)
def test_the_warning_about_a_gather_is_shown_once_per_function() -> None:
    _, _, param = _model()
    gathered_functions._warned.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            param.norm(dim=1)
            param.norm(dim=0)
            param.detach().T  # noqa: B018
    texts = [str(each.message).split(" of ")[0] for each in said]
    assert texts == ["norm", "T"]


@on_ranks(2)
def test_an_optimizer_that_needs_matrices_is_refused_in_one_sentence() -> None:
    model, _, param = _model()
    model(torch.ones(2, 8)).sum().backward()
    optimizer = torch.optim.Muon([param], lr=0.1)
    with pytest.raises(RuntimeError, match=r"Muon: expected .* found one that needs whole tensors"):
        optimizer.step()
