"""Functions along dims gather sharded parameters, and have the results of plain torch."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import gathered_functions
from fsdp_engine.flat_dtensor.gathered_functions import GatheredView
from fsdp_engine.flat_dtensor.given_slices import COLLECTIVES_DISPATCH
from fsdp_engine.fsdp2 import fully_shard
from tests.pool import on_ranks
from tests.promises.everywhere import LEVELS

_FUNCTIONS: list[Callable[[Any], Any]] = [
    lambda p: p.norm(dim=1),
    lambda p: p.sum(0),
    lambda p: p.mean(1, keepdim=True),
    lambda p: p.max(),
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
    lambda p: sum(p.unbind()),
]


def _model() -> tuple[nn.Module, Tensor, Any]:
    """A sharded model, one of its weights, and the same full weight."""
    model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
    whole = model[0].weight.detach().clone()
    fully_shard(model)
    return model, whole, model[0].weight


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


@on_ranks(2)
def test_where_of_a_condition_alone_returns_indices_of_the_full_tensor() -> None:
    _, whole, param = _model()
    for found in (torch.where(param > 0), torch.where(condition=param > 0)):
        expected = torch.where(whole > 0)
        assert len(found) == len(expected) == 2
        assert all(map(torch.equal, found, expected))
    chosen: Any = torch.where(param > 0, param, 0.0)
    assert torch.equal(chosen.full_tensor(), torch.where(whole > 0, whole, 0.0))


# Changes of views, for a plain and for a sharded tensor.
_CHANGES: list[Callable[[Any], Any]] = [
    lambda p: p[0].zero_(),
    lambda p: p.T.add_(1),
    lambda p: p[0].__setitem__(0, 1.0),
    lambda p: p[0].data.mul_(2),
    lambda p: p[0][1:].fill_(2),
    lambda p: torch.add(torch.ones(8), 1, out=p[0]),
    lambda p: torch.max(torch.ones(3, 8), 0, out=(p[1], torch.empty(0, dtype=torch.long))),
    lambda p: torch.aminmax(torch.ones(3, 8), dim=0, out=(p[1], p[2])),
    lambda p: nn.init.constant_(p[1:3], 0.5),
    lambda p: nn.init.normal_(p[2:]),
    lambda p: torch._foreach_mul_(list(p.chunk(2)), 3),
    lambda p: torch._foreach_zero_([p[0], p[4]]),
    lambda p: F.relu(p[1], inplace=True),
    lambda p: p.view_as(torch.ones(8, 5)).mul_(2),
    lambda p: p.as_strided((3,), (2,)).zero_(),
    lambda p: p.T.contiguous().T.zero_(),
    lambda p: p[1:].T.split_with_sizes([2, 6])[1].neg_(),
    lambda p: p.diagonal().detach().squeeze().zero_(),
    lambda p: p[0].add_(1).view(2, 4).mul_(2)[0].sub_(1),
    lambda p: p[2].copy_(p[3]),
    lambda p: p[2].copy_(torch.arange(8.0)),
    lambda p: p.__setitem__(0, 1.0),
    lambda p: p.__setitem__((slice(1, 3), 2), torch.tensor([5.0, 6.0])),
    lambda p: p.__setitem__(torch.tensor([0, 3]), 0.0),
    lambda p: p.index_fill_(0, torch.tensor([1]), 7),
    lambda p: p.tril_(),
    lambda p: p.scatter_(1, torch.zeros(5, 1, dtype=torch.long), 3.0),
]


@pytest.mark.parametrize("in_bf16", [False, True])
@on_ranks(2)
def test_changes_of_a_part_are_changes_of_the_shards(in_bf16: bool) -> None:
    for level in LEVELS:
        model = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))
        policy = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16) if in_bf16 else None
        engine = fe.shard(model, strategy=level, mp_policy=policy)
        param: Any = model[0].weight
        for index, change in enumerate(_CHANGES):
            whole = engine.full_tensor("0.weight")
            for each in (whole, param):
                torch.manual_seed(0)
                with torch.no_grad():
                    change(each.detach() if index % 2 else each)
            torch.testing.assert_close(engine.full_tensor("0.weight"), whole, msg=f"{index}")
        x = torch.randn(2, 8)
        found, expected = model[0](x).float(), F.linear(x, whole, engine.full_tensor("0.bias"))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.5)


@on_ranks(2)
def test_a_square_matrix_is_transposed_in_place() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    whole = model[0].weight.detach().clone()
    fully_shard(model)
    param: Any = model[0].weight
    with torch.no_grad():
        assert param.t_() is param
        torch.testing.assert_close(param.full_tensor(), whole.t())
        param.transpose_(0, 1)
        torch.testing.assert_close(param.full_tensor(), whole)


@on_ranks(4)
def test_tensors_whose_slices_are_equal_on_some_ranks_only_are_gathered_on_all() -> None:
    """Ranks 0 and 3 hold no element of either weight, so the slices there are equal."""
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in "qkv"})
    q, k = (model[name].weight.detach().clone() for name in "qk")
    fe.shard(model)
    mine, other = (model[name].weight for name in "qk")
    assert isinstance(mine, fe.FlatDTensor)
    assert isinstance(other, fe.FlatDTensor)
    equals = torch.tensor(float(mine.flat_placement == other.flat_placement))
    dist.all_reduce(equals)
    assert 0 < equals < 4

    with torch.no_grad():
        mine.add_(other)
        torch.testing.assert_close(mine.full_tensor(), q + k)
        mine.copy_(other)
        torch.testing.assert_close(mine.full_tensor(), k)
        mine.masked_fill_(other > 0, 3.0)
        torch.testing.assert_close(mine.full_tensor(), k.masked_fill(k > 0, 3.0))
        for call in (
            lambda: torch.equal(mine, other),
            lambda: mine + other,
            lambda: torch._foreach_add_([mine], [other]),
        ):
            with pytest.raises(ValueError, match="slices"):
                call()
    gradient = torch.ones_like(other)
    with pytest.raises(TypeError, match="expected None or a FlatDTensor of the slice of this"):
        mine.grad = gradient


@on_ranks(2)
def test_models_of_other_sizes_share_slices_of_equal_tensors() -> None:
    """Each rank holds half of the smaller model's only weight, and half of the larger one's second
    weight."""
    one, three = (
        nn.Sequential(*(nn.Linear(320, 320, bias=False) for _ in range(count))) for count in (1, 3)
    )
    for model in (one, three):
        fe.shard(model, initial_values="rank0")
    p, q = one[0].weight.detach(), three[1].weight.detach()
    assert isinstance(p, fe.FlatDTensor)
    assert isinstance(q, fe.FlatDTensor)
    assert p.flat_placement.is_same_on_all_ranks(q.flat_placement)
    assert not torch.equal(p, q)
    sums: Any = p + q
    assert torch.equal(sums.full_tensor(), p.full_tensor() + q.full_tensor())


@on_ranks(2)
def test_a_held_view_is_written_unless_its_tensor_has_changed_since() -> None:
    model, whole, param = _model()
    with torch.no_grad():
        row = param[0]
        model[0].bias.zero_()  # type: ignore[operator, union-attr]
        other = param[1]
        row.zero_()
        other.zero_()
        torch.testing.assert_close(param.full_tensor()[:2], torch.zeros(2, 8))
        param.add_(1)
        with pytest.raises(ValueError, match=r"0\.weight that was taken after its last change"):
            row.zero_()
    torch.testing.assert_close(param.full_tensor()[2:].detach(), whole[2:] + 1)


@on_ranks(2)
def test_a_change_that_would_be_lost_raises() -> None:
    _, whole, param = _model()
    rank = torch.distributed.get_rank()

    def broadcast() -> Any:
        torch.distributed.broadcast(param.data[0], 0)

    changes: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "same values", lambda: param.data[0].fill_(rank)),
        (ValueError, "same values", lambda: param.data.__setitem__(0, rank)),
        (ValueError, "read-only", lambda: param.data[0].numpy().fill(1)),
        (ValueError, "read-only", lambda: param.data.numpy(force=True).fill(1)),
        (ValueError, "read-only", lambda: numpy.asarray(param.data[0]).fill(1)),
        (ValueError, r"\.clone\(\)", lambda: torch.from_dlpack(param.data[0])),
        *([(ValueError, r"\.clone\(\)", broadcast)] if COLLECTIVES_DISPATCH else []),
        (RuntimeError, "no_grad", lambda: param[0].zero_()),
        (RuntimeError, "no_grad", lambda: param.__setitem__(0, 1.0)),
    ]
    for error, message, change in changes:
        with pytest.raises(error, match=message):
            change()
    torch.testing.assert_close(param.full_tensor().detach(), whole)


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
    for view in (param.unsqueeze(0), param.detach().flatten(), param.expand(2, 5, 8)):
        assert isinstance(view, GatheredView)
        assert view.shape.numel() == view.size().numel() == view.numel()
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
    with pytest.raises(RuntimeError, match=r"Muon: expected .* found one that needs full tensors"):
        optimizer.step()


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_inner_gradients_of_data_of_one_rank_are_refused(level: str) -> None:
    model = nn.Linear(6, 6)
    fe.shard(model, strategy=level, initial_values="rank0")
    batch = torch.full((8, 6), float(dist.get_rank()))
    clone = model.weight.clone()
    loss = F.linear(batch, clone).square().mean()
    with pytest.raises(ValueError, match=r"no sharded tensor that linear combines.*weight"):
        torch.autograd.grad(loss, clone, retain_graph=True)
    with pytest.raises(ValueError, match=r"no sharded tensor that matmul combines.*weight"):
        torch.autograd.grad((batch @ clone.t()).sum(), clone)
    penalty = (clone @ clone.T).square().sum()
    (found,) = torch.autograd.grad(penalty, clone)
    full = clone.full_tensor().detach().requires_grad_()
    (expected,) = torch.autograd.grad((full @ full.T).square().sum(), full)
    torch.testing.assert_close(found.full_tensor(), expected)
    loss.backward()
    assert model.weight.grad is not None
