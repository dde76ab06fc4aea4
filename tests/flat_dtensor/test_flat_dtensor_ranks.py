"""FlatDTensor on several ranks: full tensors, reductions, checkpoints.

Checkpoints of models and optimizers that load on other meshes are in ``tests/optim``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp_engine as fe
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement, full_reductions
from fsdp_engine.flat_dtensor.full_reductions import FullNorm
from tests.checkpoint.scene import shared_folder
from tests.pool import Ranks, on_ranks
from tests.training import mesh_of

SHAPES: list[tuple[int, ...]] = [(), (1,), (3,), (17,), (4, 5), (2, 3, 7), (0,), (2, 0, 3), (1, 64)]
# (mesh shape, number of sharded axes)
MESHES = [((4,), 1), ((4,), 0), ((2, 2), 1), ((2, 2), 2), ((4, 1), 2), ((1, 3), 1)]


def bounds(numel: int, parts: int, seed: object) -> list[int]:
    """Uneven boundaries, the same on every rank; some parts are empty."""
    dice = random.Random(repr(seed))
    return [0, *sorted(dice.randint(0, numel) for _ in range(parts - 1)), numel]


def flat_of(full: Tensor, mesh: DeviceMesh, num_cut: int, seed: int = 0) -> FlatDTensor:
    """This rank's slice of ``full``, sharded unevenly over the innermost ``num_cut`` axes."""
    start, stop = 0, full.numel()
    for axis in range(mesh.ndim - 1, mesh.ndim - 1 - num_cut, -1):
        cuts = bounds(stop - start, mesh.size(axis), (seed, axis, full.shape, start))
        at = mesh.get_local_rank(axis)
        start, stop = start + cuts[at], start + cuts[at + 1]
    placement = FlatPlacement.on_mesh(full.shape, start, stop, mesh, num_cut)
    return FlatDTensor.from_flat_local(full.reshape(-1)[start:stop].clone(), placement)


def same_bits(a: Tensor, b: Tensor) -> bool:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


# --- full tensors ---

FLOATS = [torch.float32, torch.float64, torch.bfloat16]
OTHERS = [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
INTEGERS = [torch.int64, torch.int8, torch.uint8, torch.bool]


def whole_tensors_are_exact(mesh_shape: tuple[int, ...], num_cut: int) -> None:
    mesh = mesh_of(*mesh_shape)
    for shape in SHAPES:
        for dtype in FLOATS + (OTHERS + INTEGERS if len(shape) < 2 else []):
            num_bytes = math.prod(shape) * dtype.itemsize
            bits = torch.randint(0, 2 if dtype == torch.bool else 256, (num_bytes,))
            full = bits.to(torch.uint8).view(dtype).view(shape)
            flat = flat_of(full, mesh, num_cut)
            assert same_bits(flat.full_tensor(), full), (shape, dtype)
            replicated = flat.redistribute(placements=[Replicate()] * mesh.ndim)
            assert type(replicated) is DTensor
            assert same_bits(replicated.to_local(), full)
    special = torch.tensor([-0.0, math.nan, -math.inf, 1e-45] * 3)
    assert same_bits(flat_of(special, mesh, num_cut).full_tensor(), special)


# --- reductions ---

REDUCTIONS: list[Callable[[Any], Any]] = [
    lambda t: t.sum(),
    lambda t: torch.sum(t, dtype=torch.float64),
    lambda t: t.sum(dim=tuple(range(t.dim()))),
    lambda t: t.mean(),
    lambda t: t.nansum(),
    lambda t: (t > 0).sum(),
    lambda t: torch.count_nonzero(t > 0),
    lambda t: t.norm(),
    lambda t: torch.norm(t, 3),
    lambda t: torch.linalg.vector_norm(t, 0),
    lambda t: torch.linalg.vector_norm(t, 1.5, dtype=torch.float64),
    lambda t: torch.linalg.vector_norm(t, math.inf),
    lambda t: torch.linalg.vector_norm(t, -math.inf),
    lambda t: torch.linalg.norm(t),
    lambda t: t.max(),
    lambda t: t.min(),
    lambda t: torch.amin(t),
    lambda t: (t > 1).any(),
    lambda t: (t > -9).all(),
    lambda t: (t * 10).int().max(),
    lambda t: (t * 10).int().sum(),
    lambda t: t.isnan().any(),
    lambda t: t.bfloat16().sum(),
    lambda t: t.bfloat16().norm(),
]
# Reductions that keep dims gather the tensor.
REDUCTIONS += [
    lambda t: t.sum(0),
    lambda t: t.sum(dim=-1, keepdim=True),
    lambda t: t.amax(0),
    lambda t: t.norm(dim=0),
    lambda t: t.max(0).indices if t.dim() > 1 else t.max(),
]
OF_LISTS: list[Callable[[Any], Any]] = [
    lambda t: torch._foreach_norm([t, t * 2])[1],
    lambda t: torch._foreach_norm([t.bfloat16(), t * 2], math.inf)[0],
    lambda t: torch._foreach_max([t, t * 2])[1],
    lambda t: torch._foreach_norm([t, t.new_ones(2)], ord=1)[1],
    lambda t: torch.stack(torch._foreach_norm([t.bfloat16(), t], 3)).float(),
]


def reductions_agree(mesh_shape: tuple[int, ...], num_cut: int) -> None:
    mesh = mesh_of(*mesh_shape)
    for shape in SHAPES:
        for spoiled in (False, True) if shape in ((), (17,), (4, 5)) else (False,):
            full = torch.randn(shape)
            if spoiled:
                full.view(-1)[full.numel() // 2] = math.nan
            flat = flat_of(full, mesh, num_cut)
            for index, reduction in enumerate(REDUCTIONS + OF_LISTS * bool(full.numel())):
                try:
                    expected = reduction(full)
                except (RuntimeError, IndexError):
                    with pytest.raises((RuntimeError, IndexError)):
                        reduction(flat)
                    continue
                found = reduction(flat)
                assert type(found) in (Tensor, FullNorm), index
                where = f"reduction {index} of shape {shape}"
                torch.testing.assert_close(found, expected, equal_nan=True, msg=where)


@pytest.mark.parametrize(("mesh_shape", "num_cut"), MESHES)
def test_full_tensors_and_reductions_are_exact(
    ranks: Ranks, mesh_shape: tuple[int, ...], num_cut: int
) -> None:
    size = math.prod(mesh_shape)
    ranks.run(whole_tensors_are_exact, mesh_shape, num_cut, world_size=size)
    ranks.run(reductions_agree, mesh_shape, num_cut, world_size=size)


@on_ranks(4)
def test_reductions_are_differentiable() -> None:
    mesh = mesh_of(2, 2)
    for shape in [(4, 5), (), (3,)]:
        for reduction in (
            lambda t: (t * t).sum(),
            lambda t: (t**3).mean(),
            lambda t: t.norm(),
            lambda t: torch.linalg.vector_norm(t, 3) + t.sum() * 2,
            lambda t: (t * 0).norm(),
            lambda t: (t.full_tensor() if isinstance(t, FlatDTensor) else t).pow(2).sum(),
        ):
            full = torch.randn(shape, requires_grad=True)
            param: Any = nn.Parameter(flat_of(full.detach(), mesh, 2))
            reduction(full).backward()
            reduction(param).backward()
            assert full.grad is not None
            torch.testing.assert_close(param.grad.full_tensor(), full.grad)


@on_ranks(4)
def test_a_norm_does_not_overflow_where_the_sum_of_squares_would() -> None:
    mesh, rank = mesh_of(4), dist.get_rank()
    placement = FlatPlacement.on_mesh((4,), rank, rank + 1, mesh, 1)
    norm = FlatDTensor.from_flat_local(torch.tensor([1.5e19]), placement).norm()
    assert norm.item() == pytest.approx(3e19)


@on_ranks(4)
def test_every_rank_gets_the_same_answer() -> None:
    mesh = mesh_of(4)
    full = torch.rand(4, 5)
    a, b = flat_of(full, mesh, 1), flat_of(full, mesh, 1)
    assert torch.equal(a, b)
    assert torch.allclose(a, b + 1e-9)
    if b.flat_placement.start == 0 and b.local.numel():
        b.local[0] += 1  # on one rank only
    assert not torch.equal(a, b)
    assert not torch.allclose(a, b)
    scalar = flat_of(torch.tensor(2.5), mesh, 1)
    assert bool(scalar)
    assert scalar.item() == float(scalar) == 2.5


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@on_ranks(4)
def test_clipping_equals_that_of_full_gradients_with_one_reduction(norm_type: float) -> None:
    mesh = mesh_of(2, 2)
    for foreach in (None, True, False):
        shapes = [shape for shape in SHAPES if math.prod(shape)]
        full = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        flat: list[Any] = [nn.Parameter(flat_of(p.detach(), mesh, 2)) for p in full]
        for p, q in zip(full, flat, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = flat_of(p.grad, mesh, 2)
        with patch.object(
            full_reductions, "reduce_over", wraps=full_reductions.reduce_over
        ) as call:
            norm = nn.utils.clip_grad_norm_(flat, 1.0, norm_type, foreach=foreach)
        assert call.call_count > 1 if foreach is False else call.call_count == 1
        assert type(norm) is FullNorm
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(full, 1.0, norm_type))
        for p, q in zip(full, flat, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
        total = nn.utils.get_total_norm([q.grad for q in flat])
        torch.testing.assert_close(total, nn.utils.get_total_norm([p.grad for p in full]))


@on_ranks(4)
def test_a_rank_that_overflows_stops_all() -> None:
    mesh, full = mesh_of(4), torch.rand(4, 5)
    for overflow in (False, True):
        param: Any = nn.Parameter(flat_of(full, mesh, 1))
        grad = torch.full((4, 5), 8.0)
        if overflow:
            grad[0, 0] = math.inf
        param.grad = flat_of(grad, mesh, 1)
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(param.full_tensor(), full - 1) is not overflow
        assert scaler.get_scale() == (4.0 if overflow else 8.0)


# --- checkpoints ---


@on_ranks(4)
def test_checkpoints_of_plain_and_of_distributed_tensors_load() -> None:
    mesh = mesh_of(4)
    full = torch.arange(20.0).view(4, 5)
    saved = {"plain": full, "sharded": distribute_tensor(full, mesh, [Shard(1)])}
    path = shared_folder()
    dcp.save(saved, checkpoint_id=path)
    state = {name: flat_of(torch.zeros(4, 5), mesh, 1) for name in saved}
    dcp.load(state, checkpoint_id=path)
    for tensor in state.values():
        assert torch.equal(tensor.full_tensor(), full)


@on_ranks(4)
def test_copy_takes_the_slice_of_any_distributed_tensor() -> None:
    mesh, full = mesh_of(4), torch.rand(6, 5)
    flat = flat_of(torch.zeros(6, 5), mesh, 1)
    for other in (distribute_tensor(full, mesh, [Shard(0)]), flat_of(full + 1, mesh, 1, seed=9)):
        flat.copy_(other)
        assert torch.equal(flat.full_tensor(), other.full_tensor())


@on_ranks(2)
def test_copy_takes_a_number_that_another_rank_holds() -> None:
    mesh, rank = mesh_of(2), dist.get_rank()

    def number(value: float, owner: int) -> FlatDTensor:
        start, stop = (0, 1) if rank == owner else (rank > owner, rank > owner)
        placement = FlatPlacement.on_mesh((), int(start), int(stop), mesh, 1)
        return FlatDTensor.from_flat_local(torch.full((placement.numel,), value), placement)

    flat = number(0.0, 0)
    flat.copy_(number(3.0, 1))
    assert flat.full_tensor() == 3


@on_ranks(4)
def test_a_plain_tensor_is_modified_in_place_with_full_operands() -> None:
    mesh = mesh_of(4)
    full = torch.rand(6, 5)
    flat = flat_of(full, mesh, 1)
    plain = torch.ones(6, 5)
    assert plain.mul_(flat) is plain
    assert torch.equal(plain, full)
    plain += flat
    assert torch.equal(plain, full * 2)
    row = torch.ones(5)
    with pytest.raises(RuntimeError, match="shape"):
        row.mul_(flat)  # torch raises this error for plain tensors, too
    large = torch.rand(300, 300)
    assert torch.equal(torch.ones(300, 300).mul_(flat_of(large, mesh, 1)), large)
    with pytest.raises(ValueError, match="not gathered implicitly"):
        torch.ones(300).mul_(flat_of(large, mesh, 1))


@on_ranks(4)
def test_values_drawn_by_ranks_with_different_seeds_are_one_tensor_on_all_replicas() -> None:
    for shape, num_cut in (((4,), 1), ((4,), 0), ((2, 2), 1), ((2, 2), 2)):
        mesh = mesh_of(*shape)
        tensor = flat_of(torch.zeros(4, 5), mesh, num_cut)
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(tensor)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, tensor.full_tensor())
        torch.manual_seed(0)
        expected = torch.empty(4, 5).normal_()
        assert all(torch.equal(each, expected) for each in found), (shape, num_cut)


# --- second derivatives ---


@on_ranks(2)
def test_the_error_for_a_second_derivative_names_the_parameter() -> None:
    for level in ("optim", "optim_grads_params"):
        fe.shard(model := nn.Linear(3, 3), strategy=level, initial_values="rank0")
        weight = (model.weight * 2).exp() + model.weight
        (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        expected = 3 * weight.detach().full_tensor() ** 2
        torch.testing.assert_close(grad.detach().full_tensor(), expected)
        (grad.detach() * weight).sum().backward(retain_graph=True)
        for second in (grad.sum(), (grad * weight).sum()):
            with pytest.raises(RuntimeError, match=r"first derivatives of weight; .*create_graph"):
                second.backward(retain_graph=True)


# --- parameters of two models ---


class Pair(nn.Module):
    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 32))
        self.teacher = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 32))
        if is_frozen:
            self.freeze()

    def freeze(self) -> None:
        self.student[0].weight.requires_grad_(False)
        self.teacher.requires_grad_(False)

    def average(self, kind: str, *, is_full: bool = False) -> None:
        targets, sources = (list(each.parameters()) for each in (self.teacher, self.student))
        sources = [each.full_tensor() if is_full else each for each in sources]
        with torch.no_grad():
            if kind == "foreach":
                torch._foreach_lerp_(targets, sources, 0.1)
                return
            for target, source in zip(targets, sources, strict=True):
                target.data = target.data * 0.9 + source.data * 0.1

    def weights(self) -> list[Tensor]:
        return [each.full_tensor() for each in self.teacher.parameters()]


@pytest.mark.parametrize("kind", ["foreach", "data"])
@on_ranks(3)
def test_an_average_of_a_model_with_other_slices_raises_on_all_ranks(kind: str) -> None:
    for level in ("optim", "optim_grads", "optim_grads_params"):
        fe.shard(model := Pair(is_frozen=True), strategy=level, initial_values="rank0")
        before = model.weights()
        found = r"two different slices; .* found teacher\.0.* over 3 ranks\) and student\.0.* over"
        with pytest.raises(ValueError, match=rf"{found}.*\.full_tensor\(\) of one.*own fe\.shard"):
            model.average(kind)
        if kind == "foreach":
            assert all(map(torch.equal, model.weights(), before))

        torch.manual_seed(0)
        plain = Pair(is_frozen=True)
        model.load_state_dict(plain.state_dict())
        plain.average(kind)
        model.average(kind, is_full=True)
        torch.testing.assert_close(model.weights(), [*plain.teacher.parameters()])

        torch.manual_seed(0)
        model = Pair(is_frozen=False)
        for each in (model.student, model.teacher):
            fe.shard(each, strategy=level, initial_values="rank0")
        model.freeze()
        model.average(kind)
        torch.testing.assert_close(model.weights(), [*plain.teacher.parameters()])
