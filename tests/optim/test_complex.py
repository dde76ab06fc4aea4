"""Complex parameters beside real ones: norms and steps, against one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.strategies import LEVELS
from tests.models import vector_batch
from tests.pool import on_ranks
from tests.reference import Batch, full, full_gradients, nothing
from tests.scenario import Scenario


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


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch[0]).square().mean()


SCENARIO = Scenario(
    model=Mixer,
    batch=partial(vector_batch, width=6),
    loss_of=loss_of,
    steps=3,
    microbatches=1,
    max_norm=0.5,
    tolerance=1e-4,
)


def adamw(params: Iterable[Tensor], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, amsgrad=True, **options)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "adamw, foreach": lambda params: adamw(params, foreach=True),
    "adamw, each": lambda params: adamw(params, foreach=False),
    "sharded adamw": adamw,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1, foreach=True),
}


@pytest.mark.parametrize(("name", "level"), zip(OPTIMIZERS, itertools.cycle(LEVELS), strict=False))
@on_ranks(2)
def test_complex_parameters_take_each_optimizer(name: str, level: str) -> None:
    wrap = fe.shard_optimizer if name.startswith("sharded") else nothing
    SCENARIO.but(optimizer=OPTIMIZERS[name], wrap=wrap, pair=(level, "no_shard")).check()


@on_ranks(2)
def test_torch_clips_them_too() -> None:
    for level in LEVELS:
        model, _ = SCENARIO.but(pair=(level, "no_shard")).sharded_model()
        loss_of(model, vector_batch(4, 1, 6)).backward()
        grads = full_gradients(model)
        norm = nn.utils.get_total_norm(list(grads.values()))  # type: ignore[arg-type]
        assert norm > 0.01
        found = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(full(found), norm)
        for name, grad in full_gradients(model).items():
            expected = grads[name]
            assert expected is not None
            torch.testing.assert_close(grad, expected * (0.01 / (norm + 1e-6)))


@pytest.mark.parametrize("level", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_parts_of_a_complex_parameter_are_sharded_views(level: str) -> None:
    """A sharded complex parameter can be viewed as pairs of real numbers, and such pairs as
    complex."""
    model: Any = Mixer()
    expected = model.mix.detach().clone()
    engine = fe.shard(model, strategy=level)
    with torch.no_grad():
        parts = torch.view_as_real(model.mix)
        assert parts.shape == (5, 5, 2)
        torch.testing.assert_close(parts.full_tensor(), torch.view_as_real(expected))
        numbers = torch.view_as_complex(parts)
        assert numbers.shape == (5, 5)
        parts.mul_(2.0)  # parts share memory with the parameter
        torch.testing.assert_close(numbers.full_tensor(), 2 * expected)
        torch.testing.assert_close(model.mix.conj().full_tensor(), 2 * expected.conj())
    torch.testing.assert_close(engine.full_state_dict()["mix"], 2 * expected)
    model.mix.grad = None
    torch.view_as_real(model.mix).square().sum().backward()
    torch.testing.assert_close(model.mix.grad.full_tensor(), 4 * expected)
