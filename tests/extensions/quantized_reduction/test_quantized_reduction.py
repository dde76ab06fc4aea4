"""Reductions in few bits: sums are as defined, and the same on every rank, at every level."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.quantized_reduction.block_codes import BlockCodes
from fsdp_engine.extensions.quantized_reduction.communicator import QuantizedCommunicator
from fsdp_engine.memory.allocator import Memory
from tests import reference
from tests.messages import watched
from tests.models import Transformer, odd_model, unused_model, vector_batch
from tests.pairs import FEW_PAIRS, PAIRS
from tests.pool import on_ranks
from tests.scenario import Scenario
from tests.training import mesh_of

CODES = BlockCodes(8, 8)
SCENARIO = Scenario(model=partial(Transformer, 2), max_norm=float("inf"))


def driven(steps: Any) -> None:
    for works in steps:
        for work in works:
            work.wait()


def summands(numel: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(numel, dtype=dtype, generator=generator) for _ in range(dist.get_world_size())
    ]


def bounds(numel: int, rank: int) -> slice:
    size = dist.get_world_size()
    return slice(numel * rank // size, numel * (rank + 1) // size)


def quantized(values: Tensor, wide: torch.dtype) -> Tensor:
    message = torch.empty(1, CODES.num_bytes(values.numel()), dtype=torch.uint8)
    CODES.encode(values.unsqueeze(0), message, None)
    return CODES.decode(message, values.numel(), wide).squeeze(0)


def expected_sum(parts: list[Tensor], owner: int, wide: torch.dtype) -> Tensor:
    """Returns the sum of ``parts`` by rank, of which the owner's is not quantized."""
    total = torch.zeros_like(parts[0], dtype=wide)
    for rank, part in enumerate(parts):
        total += part.to(wide) if rank == owner else quantized(part, wide)
    return total


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
@on_ranks(3)
def test_sums_are_those_of_decoded_summands_and_the_own_one(dtype: torch.dtype) -> None:
    comm = QuantizedCommunicator(dist.group.WORLD, torch.device("cpu"), CODES, None)
    rank, numel = dist.get_rank(), 60
    values = summands(numel, dtype)
    real = [torch.view_as_real(v).flatten() if v.is_complex() else v for v in values]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = 2 if dtype.is_complex else 1

    def of(owner: int) -> Tensor:
        place = bounds(numel, owner)
        place = slice(place.start * scale, place.stop * scale)
        return expected_sum([each[place] for each in real], owner, wide)

    def as_real(tensor: Tensor) -> Tensor:
        return torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor

    own = of(rank)
    out = torch.ones(numel // 3, dtype=dtype)
    driven(comm.reduce_scatter(values[rank].clone(), out, tag=2))
    torch.testing.assert_close(as_real(out), own.to(real[0].dtype))
    driven(
        comm.reduce_scatter(
            values[rank].clone(), out, average=True, divisor=4.0, accumulate=True, tag=2
        )
    )
    torch.testing.assert_close(
        as_real(out), own.to(real[0].dtype) + (own / 12).to(real[0].dtype), rtol=2e-2, atol=2e-2
    )
    full = values[rank].clone()
    driven(comm.all_reduce(full, average=True, tag=4))
    gathered = torch.cat([quantized((of(owner) / 3).to(real[0].dtype), wide) for owner in range(3)])
    torch.testing.assert_close(as_real(full), gathered.to(real[0].dtype))


@on_ranks(3)
def test_fewer_elements_than_equal_shards_need() -> None:
    comm = QuantizedCommunicator(dist.group.WORLD, torch.device("cpu"), CODES, None)
    for numel in (1, 2, 10, 25):
        values = summands(numel, torch.float32)
        full = values[dist.get_rank()].clone()
        driven(comm.all_reduce(full, tag=2))
        assert (full - sum(values)).abs().max() < 0.15, numel


@pytest.mark.parametrize("axis", ["inner", "outer", "both"])
@pytest.mark.parametrize("pair", PAIRS)
@on_ranks(4)
def test_training_is_near_that_without_quantization_and_replicas_are_equal(
    pair: tuple[str, str], axis: str
) -> None:
    scenario = SCENARIO.but(pair=pair, mesh=mesh_of(2, 2))
    expected = scenario.alone()
    given = {"extensions": [fe.QuantizedReduction(axis=axis, block=32)]}
    found = scenario.but(options=given).sharded()
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert abs(ours.loss - theirs.loss) < 2e-3, pair
        for name, wanted in theirs.gradients.items():
            error = reference.relative_error(ours.gradients[name], wanted)
            assert error < 3e-2, (name, error)
    # Control: quantized sums differ from plain sums.
    assert any(
        not torch.equal(found.steps[0].gradients[name], value)
        for name, value in expected.steps[0].gradients.items()
    )
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, found.weights)
    for other in every:
        for name, value in found.weights.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(2)
def test_error_feedback_keeps_what_a_step_loses(bits: int) -> None:
    def mean_gradient(feedback: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        extension = fe.QuantizedReduction(bits, axis="inner", error_feedback=feedback)
        fe.shard(model, strategy="optim_grads", extensions=[extension])
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(8, 64, generator=generator)
        total = torch.zeros(64, 64)
        for _ in range(32):
            (model(x) ** 2).sum().backward()
            total += reference.full(model.weight.grad)
            model.zero_grad()
        plain = torch.zeros(64, 64)
        for rank in range(2):
            torch.manual_seed(0)
            alone = nn.Linear(64, 64, bias=False)
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
            (alone(x) ** 2).sum().backward()
            plain += alone.weight.grad / 2
        return total / 32, plain

    kept, plain = mean_gradient(True)
    lost, _ = mean_gradient(False)
    assert (kept - plain).abs().max() < (lost - plain).abs().max() / 8


@pytest.mark.parametrize("pair", FEW_PAIRS)
@on_ranks(4)
def test_nan_reaches_all_ranks_and_no_later_step(pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = odd_model()
    extension = fe.QuantizedReduction(axis="both", block=8)
    fe.shard(model, mesh_of(2, 2), *pair, extensions=[extension])
    rank = dist.get_rank()
    for planted in (True, False):
        x, y = vector_batch(2, rank, 7)
        loss = model(x, y) * (float("nan") if planted and rank == 3 else 1.0)
        loss.backward()
        gradients = [reference.full(p.grad) for p in model.parameters() if p.grad is not None]
        found = [bool(each.isnan().any()) for each in gradients if each.numel()]
        assert all(found) if planted else not any(found), (planted, found)
        model.zero_grad()


@on_ranks(4)
def test_bytes_sent_between_nodes() -> None:
    def sent_bytes(extensions: list[Any]) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
        engine = fe.shard(
            model, mesh_of(2, 2), "optim_grads_params", "optim_grads", extensions=extensions
        )
        outer = engine.communicators.data.mesh.outer.reduce_group
        num_bytes = 0

        def note(group: Any, tensor: Tensor) -> None:
            nonlocal num_bytes
            num_bytes += tensor.nbytes if group is outer else 0

        with watched(note, lambda group, tensor, options: None):
            model(torch.randn(4, 256)).sum().backward()
        return num_bytes

    plain = sent_bytes([])
    assert sent_bytes([fe.QuantizedReduction(8)]) / plain == pytest.approx(0.254, abs=2e-3)
    assert sent_bytes([fe.QuantizedReduction(4)]) / plain == pytest.approx(0.129, abs=2e-3)


@on_ranks(4)
def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    scenario = SCENARIO.but(model=unused_model, batch=vector_batch, mesh=mesh_of(2, 2))
    found = scenario.but(options={"extensions": [fe.QuantizedReduction(axis="both")]}).sharded()
    expected = scenario.alone()
    assert found.steps[1].gradients.keys() == expected.steps[1].gradients.keys()


@on_ranks(1)
def test_one_rank_changes_nothing() -> None:
    found = SCENARIO.but(options={"extensions": [fe.QuantizedReduction(axis="both")]}).sharded()
    expected = SCENARIO.sharded()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value)


def test_wrong_arguments_are_refused() -> None:
    for given, message in (
        ({"bits": 2}, "bits: expected 8 or 4; found 2"),
        ({"bits": 8.0}, "bits: expected 8 or 4; found 8.0"),
        ({"axis": ["outer"]}, "axis: expected one of inner, outer, both; found"),
        ({"axis": "nodes"}, "axis: expected one of inner, outer, both; found 'nodes'"),
        ({"block": 12}, "block: expected a positive multiple of 8; found 12"),
        ({"block": 0}, "block: expected a positive multiple of 8; found 0"),
    ):
        with pytest.raises(ValueError, match=message):
            fe.QuantizedReduction(**given)


@on_ranks(2)
def test_ranks_with_different_options_are_refused() -> None:
    extension = fe.QuantizedReduction(bits=8 if dist.get_rank() else 4)
    with pytest.raises(ValueError, match="QuantizedReduction"):
        fe.shard(nn.Linear(4, 4), extensions=[extension])


@on_ranks(2)
def test_memory_that_is_allocated_before_is_refused_and_nothing_changes() -> None:
    model = nn.Linear(4, 4)
    with (
        mock.patch.object(Memory, "is_fixed", True),
        pytest.raises(ValueError, match=r"without fe\.Arenas"),
    ):
        fe.shard(model, extensions=[fe.QuantizedReduction()])
    assert all(type(param) is nn.Parameter for param in model.parameters())
    fe.shard(model)


@on_ranks(2)
def test_errors_that_are_not_kept_cannot_be_saved() -> None:
    reduction = fe.QuantizedReduction(error_feedback=False)
    with pytest.raises(ValueError, match="error_feedback: expected True"):
        reduction.errors(fe.shard(nn.Linear(4, 4), extensions=[reduction]))
