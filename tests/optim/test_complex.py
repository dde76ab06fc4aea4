"""Complex parameters beside real ones: norms, checks and steps, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_engine as fe
from tests.pool import Ranks

LEVELS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
STEPS = 3
NORM = 0.5


class Mixer(nn.Module):
    """A filter in the frequency domain between two real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 9)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) / 3)
        self.out = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.into(x), n=9)
        return self.out(torch.fft.irfft((spectrum * self.filter) @ self.mix, n=9))


def _adamw(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, amsgrad=True, **options)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw, foreach": lambda params: _adamw(params, foreach=True),
    "adamw, each": lambda params: _adamw(params, foreach=False),
    "sharded adamw": _adamw,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1, foreach=True),
}


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def _seeded() -> Mixer:
    torch.manual_seed(0)
    return Mixer()


def _expected(optimizer_name: str, num_ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _seeded()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (model(_batch(step, rank)).square().mean() / num_ranks).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).item())
        optimizer.step()
    return norms, dict(model.state_dict())


def _found(level: str, optimizer_name: str, clip: str) -> tuple[list[float], dict[str, Tensor]]:
    model = _seeded()
    engine = fe.shard(model, strategy=level, extensions=[fe.GradientChecks(large=True)])
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if optimizer_name.startswith("sharded"):
        fe.shard_optimizer(optimizer)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(_batch(step, dist.get_rank())).square().mean().backward()
        if clip == "engine":
            norm = engine.clip_grad_norm_(NORM)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        norms.append(norm.item())
        optimizer.step()
    return norms, engine.full_state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_complex_parameters_train_as_one_process(ranks: Ranks, level: str, world_size: int) -> None:
    expected = _expected("adamw, foreach", world_size)
    for clip in ("engine", "torch"):
        found = ranks.run(_found, level, "adamw, foreach", clip, world_size=world_size)[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_complex_parameters_take_each_optimizer(ranks: Ranks, name: str) -> None:
    found = ranks.run(_found, "optim_grads_params", name, "engine", world_size=2)[0]
    torch.testing.assert_close(found, _expected(name, 2), rtol=1e-4, atol=1e-5)


def _nan_in_a_part(level: str) -> None:
    model = _seeded()
    fe.shard(model, strategy=level, extensions=[fe.GradientChecks()])
    loss = model(_batch(0, dist.get_rank())).square().mean()
    if dist.get_rank() == 1:
        loss = loss * float("nan")
    with pytest.raises(RuntimeError, match=r"NaN or Inf, .* in .*filter \(data-parallel rank 1\)"):
        loss.backward()


@pytest.mark.parametrize("level", LEVELS)
def test_nan_in_a_complex_gradient_is_found_by_name(ranks: Ranks, level: str) -> None:
    ranks.run(_nan_in_a_part, level, world_size=2)


def _large(level: str) -> int:
    model = nn.ParameterList([nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))])

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = model

        def forward(self, scale: float) -> Tensor:
            return (self.weights[0] * scale).abs().sum()

    summed = Sum()
    checks = fe.GradientChecks(nan=False, large=True)
    fe.shard(summed, strategy=level, extensions=[checks])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1.0, 1.0, 30.0):
            summed.zero_grad()
            summed(scale).backward()
    found = [str(each.message) for each in caught if "check_for_large_grads" in str(each.message)]
    assert all("have norm 36.7 on this" in each for each in found)  # 30 * sqrt(6) of 2 ranks
    return len(found)


@pytest.mark.parametrize("level", LEVELS)
def test_a_large_complex_gradient_is_warned_of(ranks: Ranks, level: str) -> None:
    assert ranks.run(_large, level, world_size=2) == [1, 1]


def _parts(level: str) -> None:
    """Views of a sharded complex parameter as pairs of real numbers, and back."""
    model = _seeded()
    expected = model.mix.detach().clone()
    engine = fe.shard(model, strategy=level)
    with torch.no_grad():
        parts = torch.view_as_real(model.mix)
        assert parts.shape == (5, 5, 2)
        torch.testing.assert_close(parts.full_tensor(), torch.view_as_real(expected))
        numbers = torch.view_as_complex(parts)
        assert numbers.shape == (5, 5)
        parts.mul_(2.0)  # the parameter's own memory
        torch.testing.assert_close(numbers.full_tensor(), 2 * expected)
        torch.testing.assert_close(model.mix.conj().full_tensor(), 2 * expected.conj())
    torch.testing.assert_close(engine.full_state_dict()["mix"], 2 * expected)
    model.mix.grad = None
    torch.view_as_real(model.mix).square().sum().backward()
    torch.testing.assert_close(model.mix.grad.full_tensor(), 4 * expected)


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
def test_parts_of_a_complex_parameter_are_sharded_views(ranks: Ranks, level: str) -> None:
    ranks.run(_parts, level, world_size=2)
