"""Models that are built on the meta device are built outside of a simulation's modes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe
from fsdp_engine.planner.simulation import simulate as simulation
from tests.matrices import thorough_but
from tests.models import Transformer, odd_model, token_batch, vector_batch
from tests.planner.simulation.scene import WIDTH, on_meta
from tests.planner.simulation.small_llama import llama

BATCH = torch.zeros(4, WIDTH)
TOKENS = torch.zeros(1, 16, dtype=torch.long)


class Scaled(nn.Module):
    """A linear layer and a table of constants, which ``keep(model, table)`` stores: as a buffer, as
    an attribute or only in a function."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        keep(self, torch.ones(50, WIDTH))

    def scale(self, x: Tensor) -> Tensor:
        return x * self.table.to(x.device)[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.linear(x)).sum()


def keep_in_closure(model: Any, table: Tensor) -> None:
    model.scale = lambda x: x * table.to(x.device)[0]


class Reading(nn.Module):
    """Reads its width from a ``linspace``, and has a fallback if values cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        try:
            width = int(torch.linspace(WIDTH, 4 * WIDTH, 4)[3].item())
        except RuntimeError:
            width = WIDTH
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "tied": (lambda: Transformer(2, tied=True), token_batch(4, 0), True),
    "buffer": (
        lambda: Scaled(lambda model, table: model.register_buffer("table", table)),
        *(BATCH, True),
    ),
    "strides": (odd_model, vector_batch(8, 0, 7), True),
    "llama": (llama, {"input_ids": TOKENS, "labels": TOKENS}, True),
    "attribute": (
        lambda: Scaled(lambda model, table: setattr(model, "table", table)),
        *(BATCH, False),
    ),
    "closure": (lambda: Scaled(keep_in_closure), BATCH, False),
    "values": (Reading, BATCH, False),
}


@pytest.mark.parametrize("name", thorough_but({*MODELS} - {"tied", "llama"}, MODELS))
def test_a_model_has_the_same_step_if_it_is_built_without_the_modes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch, is_outside = MODELS[name]
    assert (simulation._built_outside_of_modes(on_meta(make)) is not None) == is_outside
    found = fe.simulate(on_meta(make), 4, batch=batch)
    monkeypatch.setattr(simulation, "_built_outside_of_modes", lambda build: None)
    expected = fe.simulate(on_meta(make), 4, batch=batch)
    assert found.memory == expected.memory
    assert found.memory_by_place == expected.memory_by_place
    assert found.sent_bytes == expected.sent_bytes
    assert found.model_flops == expected.model_flops
    assert math.isclose(found.seconds, expected.seconds, rel_tol=1e-9)
    labels = [[(each.lane, each.label) for each in run.spans] for run in (found, expected)]
    assert labels[0] == labels[1]


def test_a_model_on_the_cpu_is_built_under_the_modes_and_gets_no_memory() -> None:
    def build() -> nn.Module:
        return nn.Linear(1 << 24, 1 << 24)  # a petabyte

    assert simulation._built_outside_of_modes(build) is None
    assert fe.simulate(build, 4, batch=torch.zeros(2, 1 << 24), loss=Tensor.sum).seconds > 0
