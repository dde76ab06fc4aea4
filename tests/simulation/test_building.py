"""Models that are built on the meta device are built outside of a simulation's modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import fsdp_engine as fe
from fsdp_engine.simulation import simulate as simulation
from tests.models import Transformer, token_batch
from tests.simulation.scene import WIDTH
from tests.simulation.small_llama import llama

BATCH = torch.zeros(4, WIDTH)


class Scaled(nn.Module):
    """A linear layer, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.keep(torch.ones(50, WIDTH))

    def keep(self, table: Tensor) -> None:
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.table.to(x.device)[0]).sum()


class WithAttribute(Scaled):
    """Keeps its table neither as a parameter nor as a buffer."""

    def keep(self, table: Tensor) -> None:
        self.table = table


class InClosure(Scaled):
    """Has its table in a function alone."""

    def keep(self, table: Tensor) -> None:
        self.scale = lambda x: x * table.to(x.device)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.linear(x)).sum()


class Tied(nn.Module):
    """Two names of one parameter, which has an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.first.weight.is_special = True

    def forward(self, x: Tensor) -> Tensor:
        assert self.second.weight is self.first.weight
        return self.second(self.first(x)).sum()


class Reading(nn.Module):
    """Reads a range's values, and does without where it cannot."""

    def __init__(self) -> None:
        super().__init__()
        try:
            width = int(torch.linspace(WIDTH, 4 * WIDTH, 4)[3].item())
        except RuntimeError:
            width = WIDTH
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


class Transposed(nn.Module):
    """Has a weight whose rows are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, WIDTH).T)

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.shape == (WIDTH, 7)
        return (x @ self.weight).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "transformer": (lambda: Transformer(2), token_batch(4, 0), True),
    "tied": (Tied, BATCH, True),
    "buffer": (Scaled, BATCH, True),
    "strides": (Transposed, BATCH, True),
    "attribute": (WithAttribute, BATCH, False),
    "closure": (InClosure, BATCH, False),
    "values": (Reading, BATCH, False),
}


@contextmanager
def on_meta_or_under_modes(built: list[bool]) -> Iterator[None]:
    """Within it, ``built`` gets whether each model was built without the modes."""
    original = simulation._built_outside_of_modes

    def counted(build: Callable[[], nn.Module]) -> Any:
        found = original(build)
        built.append(found is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "_built_outside_of_modes", counted)
        yield


def simulated(make: Callable[[], nn.Module], batch: Any) -> tuple[fe.Simulation, list[bool]]:
    def build() -> nn.Module:
        with torch.device("meta"):
            return make()

    built: list[bool] = []
    with on_meta_or_under_modes(built):
        found = fe.simulate(build, 4, batch=batch)
    return found, built


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_same_step_if_it_is_built_without_the_modes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch, is_outside = MODELS[name]
    found, built = simulated(make, batch)
    assert built == [is_outside]
    monkeypatch.setattr(simulation, "_built_outside_of_modes", lambda build: None)
    expected, _ = simulated(make, batch)
    assert found.memory == expected.memory
    assert found.memory_by_place == expected.memory_by_place
    assert found.sent_bytes == expected.sent_bytes
    assert found.model_flops == expected.model_flops
    assert math.isclose(found.seconds, expected.seconds, rel_tol=1e-9)
    assert [(each.lane, each.label) for each in found.spans] == [
        (each.lane, each.label) for each in expected.spans
    ]


def test_a_model_of_transformers_is_built_without_the_modes() -> None:
    tokens = torch.zeros(1, 16, dtype=torch.long)
    _, built = simulated(llama, {"input_ids": tokens, "labels": tokens})
    assert built == [True]


def test_a_model_on_the_cpu_is_built_under_the_modes_and_gets_no_memory() -> None:
    modes: list[object] = []

    def build() -> nn.Module:
        modes.append(_get_current_dispatch_mode())
        return nn.Linear(1 << 24, 1 << 24)  # a petabyte

    built: list[bool] = []
    with on_meta_or_under_modes(built):
        fe.simulate(build, 4, batch=torch.zeros(2, 1 << 24), loss=lambda out: out.sum())
    assert built == [False]
    assert len(modes) == 2


def test_a_plan_sees_errors_of_a_model_that_cannot_be_built() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(4, int(torch.rand(()) * 8) + 1)  # here

    with pytest.raises(fe.SimulationError, match=r"building the model failed at .*# here`"):
        fe.simulate(build, 2, batch=torch.zeros(2, 4))
