"""``check_for_nan_in_grad`` and ``check_for_large_grads``: results, errors and collectives."""

from __future__ import annotations

import itertools
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.extensions.checks import gradient_checks
from tests.megatron.configs import LEVEL_NAMES, config_of
from tests.messages import Messages
from tests.models import Dot
from tests.pool import on_ranks
from tests.reference import full_gradients
from tests.training import mesh_of

DIM = 8


class Poisoned(nn.Module):
    """The gradient of ``poisoned`` is ``y`` itself; that of the layers depends on ``x`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        self.poisoned = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean() + (self.poisoned * y).sum()


def inputs(number: int, bad: float | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    x, y = torch.randn(2, DIM, generator=generator), torch.randn(DIM, generator=generator)
    if bad is not None and dist.get_rank() == dist.get_world_size() - 1:
        y[3] = bad
    return x, y


def step(ddp: fe.DistributedDataParallel, *batches: Any, zero_buffer: bool = True) -> None:
    ddp.zero_grad_buffer(zero_buffer)
    for batch in batches[:-1]:
        with ddp.no_sync():
            ddp(*batch).backward()
    ddp(*batches[-1]).backward()
    ddp.finish_grad_sync()


def wrapped(*levels: str, mesh: Any = None, **fields: Any) -> fe.DistributedDataParallel:
    torch.manual_seed(0)
    return fe.DistributedDataParallel(Poisoned(), config_of(*levels, **fields), mesh)


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def check_nan(ddp: fe.DistributedDataParallel, plain: fe.DistributedDataParallel) -> None:
    """NaN or Inf in one microbatch of one rank raises on all ranks and affects no later step."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ddp, plain)]
    last = dist.get_world_size() - 1
    message = (
        r"check_for_nan_in_grad: expected finite gradients; found NaN or Inf, before any "
        rf"reduction, in poisoned \(data-parallel rank {last}\)$"
    )
    bad_values = ((float("nan"), True), (float("inf"), False), (-float("inf"), True))
    for number, (bad, first) in enumerate(bad_values):
        for each, optimizer in zip((ddp, plain), optimizers, strict=True):
            # If the buffer is not zeroed, the step overwrites earlier values that are not finite.
            step(each, inputs(number), zero_buffer=number % 2 == 0)
            optimizer.step()
        before = ddp.engine.full_state_dict()
        batches = [inputs(number, bad), inputs(number)]
        with pytest.raises(RuntimeError, match=message):
            step(ddp, *(batches if first else reversed(batches)))
        assert all(param.grad is None for param in ddp.parameters())
        assert_same_state(ddp.engine.full_state_dict(), before)
    assert_same_state(ddp.engine.full_state_dict(), plain.engine.full_state_dict())


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("overlap", [False, True])
def test_check_for_nan_in_grad_raises_on_every_rank_at_every_level(
    overlap: bool, level: str
) -> None:
    check_nan(
        wrapped(level, overlap=overlap, check_for_nan_in_grad=True, bucket_size=70),
        wrapped(level, overlap=overlap, bucket_size=70),
    )


@on_ranks(world_size=4)
@pytest.mark.parametrize("levels", [("no_shard",) * 2, ("optim", "optim"), ("optim_grads",) * 2])
def test_check_for_nan_in_grad_raises_on_every_rank_of_two_axes(levels: tuple[str, str]) -> None:
    mesh = mesh_of(2, 2)
    check_nan(wrapped(*levels, mesh=mesh, check_for_nan_in_grad=True), wrapped(*levels, mesh=mesh))


@on_ranks(world_size=2)
def test_check_for_nan_in_grad_names_every_parameter_and_rank() -> None:
    ddp = wrapped("optim", check_for_nan_in_grad=True)
    x, y = inputs(0, float("nan"))
    with pytest.raises(RuntimeError) as caught:
        step(ddp, (x * float("inf") if dist.get_rank() == 0 else x, y))
    names = [f"layers.{layer}.{what}" for layer in range(2) for what in ("weight", "bias")]
    parts = [f"{name} (data-parallel rank 0)" for name in names]
    said = str(caught.value).rpartition(" in ")[2]
    assert sorted(said.split("; ")) == sorted([*parts, "poisoned (data-parallel rank 1)"])


@on_ranks(world_size=2)
def test_check_for_nan_in_grad_reads_finite_gradients_once_however_large() -> None:
    for level in LEVEL_NAMES:
        ddp = wrapped(level, check_for_nan_in_grad=True)
        x, y = inputs(0)
        large = torch.full_like(y, 0.9 * torch.finfo(y.dtype).max)  # two of them overflow in a sum
        large[0] *= -1
        with mock.patch.object(gradient_checks, "_largest") as closer_look:
            step(ddp, (x, large))
        closer_look.assert_not_called()
        assert torch.equal(full_gradients(ddp.module)["poisoned"], large)  # type: ignore[arg-type]


@on_ranks(world_size=1)
def test_parameters_without_elements_are_finite() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))
    engine = fe.shard(model, config=config_of("no_shard", check_for_nan_in_grad=True))
    (model(torch.ones(1, 2)).sum() + model.nothing.sum()).backward()
    engine.reset()


def messages_of(level: str, **fields: Any) -> Messages:
    """Counts the second step; in the first one ranks also agree on an order."""
    ddp, messages = wrapped(level, **fields), Messages()
    step(ddp, inputs(0), inputs(5))
    with messages.counting():
        step(ddp, inputs(1), inputs(6))
    return messages


@on_ranks(world_size=2)
def test_check_for_nan_in_grad_sends_one_message_of_a_byte_for_each_parameter() -> None:
    for level, overlap in itertools.product(LEVEL_NAMES, (False, True)):
        without = messages_of(level, overlap=overlap)
        found = messages_of(level, overlap=overlap, check_for_nan_in_grad=True)
        assert list((found.calls - without.calls).values()) == [1], (level, overlap)
        # An all-reduce over two ranks sends each byte once.
        assert list((found.sent - without.sent).values()) == [5], (level, overlap)


@on_ranks(world_size=2)
def test_check_for_large_grads_adds_no_message() -> None:
    for level in LEVEL_NAMES:
        without, found = (messages_of(level, check_for_large_grads=c) for c in (False, True))
        assert found.calls == without.calls
        assert found.operations == without.operations
        assert found.sent == without.sent


@on_ranks(world_size=2)
def test_check_for_nan_in_grad_raises_in_backward_of_shard_and_reset_goes_on() -> None:
    torch.manual_seed(0)
    model = Poisoned()
    engine = fe.shard(model, config=config_of("optim_grads", check_for_nan_in_grad=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"poisoned \(data-parallel rank 1\)"):
        model(*inputs(0, float("nan"))).backward()
    engine.reset()
    model(*inputs(0)).backward()
    optimizer.step()
    other = wrapped("optim_grads")
    step(other, inputs(0))
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_same_state(engine.full_state_dict(), other.engine.full_state_dict())


def dot(level: str, **fields: Any) -> fe.DistributedDataParallel:
    fields = {"check_for_large_grads": True, **fields}
    return fe.DistributedDataParallel(Dot(64), config_of(level, **fields))


def warnings_of(ddp: fe.DistributedDataParallel, value: float) -> list[str]:
    """Warnings of a step whose gradient has ``value`` in one element and 0 elsewhere."""
    x = torch.zeros(64)
    x[5] = value
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(ddp, (x,))
    return [str(each.message) for each in caught if "check_for_large" in str(each.message)]


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_check_for_large_grads_warns_beyond_ten_times_the_largest(level: str) -> None:
    for overlap in (False, True):
        ddp = dot(level, overlap=overlap)
        # No gradient is large if there were none before, or only zeros.
        for value in (0.0, 0.0, 1.0, 9.9, 1.0, 98.0, 970.0):
            assert not warnings_of(ddp, value), value
        (text,) = warnings_of(ddp, 9702.0)
        for part in ("the root module", "norm 4.85e+03", "10 times", "last 7 steps, 485"):
            assert part in text, text
        assert not warnings_of(ddp, 97000.0)  # the large norm is the reference now
        assert ddp.engine.full_state_dict()["weight"].abs().max() == 0.0
    plain = dot(level, check_for_large_grads=False)
    assert not [each for value in (1.0, 1e6) for each in warnings_of(plain, value)]


@on_ranks(world_size=2)
def test_check_for_large_grads_forgets_after_a_hundred_steps() -> None:
    for num_between, warns in ((99, False), (100, True)):
        ddp = dot("optim")
        for value in (5.0, *[1.0] * num_between):
            assert not warnings_of(ddp, value)
        assert bool(warnings_of(ddp, 20.0)) is warns


@on_ranks(world_size=2)
def test_check_for_large_grads_looks_at_each_ranks_own_gradient() -> None:
    ddp = dot("no_shard")
    assert not warnings_of(ddp, 1.0)
    found = warnings_of(ddp, 100.0 if dist.get_rank() == 1 else 1.0)
    assert bool(found) is (dist.get_rank() == 1)


@on_ranks(world_size=2)
def test_check_for_large_grads_is_not_blinded_by_a_step_that_was_not_finite() -> None:
    for value, before in itertools.product((float("inf"), float("nan")), ((1.0,), ())):
        ddp = dot("optim")
        for each in before:
            assert not warnings_of(ddp, each)
        warnings_of(ddp, value)
        assert not warnings_of(ddp, 1.0)
        assert not warnings_of(ddp, 9.9)
        assert warnings_of(ddp, 100.0)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))

    def forward(self, scale: float) -> Tensor:
        return (self.filter * scale).abs().sum()


@pytest.mark.parametrize("level", LEVEL_NAMES)
@on_ranks(2)
def test_complex_gradients_that_are_nan_or_large_are_found(level: str) -> None:
    model = Complex()
    fe.shard(model, strategy=level, extensions=[fe.GradientChecks(large=True)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1.0, 1.0, 30.0):
            model.zero_grad()
            model(scale).backward()
    found = [str(each.message) for each in caught if "check_for_large_grads" in str(each.message)]
    (text,) = found
    assert "have norm 36.7 on this" in text  # 30 * sqrt(6), divided by 2 ranks
    model.zero_grad()
    loss = model(1.0) * (float("nan") if dist.get_rank() == 1 else 1.0)
    with pytest.raises(RuntimeError, match=r"NaN or Inf, .* in .*filter \(data-parallel rank 1\)"):
        loss.backward()


@on_ranks(1)
def test_the_check_for_large_gradients_is_exact_to_fp32_rounding() -> None:
    model = Dot(2_400_000)
    checks = fe.GradientChecks(nan=False, large=True)
    fe.shard(model, strategy="optim_grads", extensions=[checks])
    large, one = torch.randn(2_400_000), torch.zeros(2_400_000)
    # The norm of `one` is exact. That of `large` is slightly more than 10 times as large.
    one[0] = torch.linalg.vector_norm(large.double()) / 10 / (1 + 1e-5)
    model(one).backward()
    model.zero_grad()
    loss = model(large)
    with pytest.warns(UserWarning, match="more than 10 times the largest"):
        loss.backward()
