"""Steps on whole tensors at their owners, simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp_engine as fe

WIDTH = 256
MATRIX = WIDTH * WIDTH


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def muon(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(params), ns_steps=1)


def simulated(num_ranks: int, optimizer: Any = muon, **options: Any) -> fe.Simulation:
    arguments: dict[str, Any] = {"strategy": "optim_grads_params", "units": [nn.Linear], **options}
    return fe.simulate(
        build,
        num_ranks,
        batch=torch.zeros(8, WIDTH),
        optimizer=optimizer,
        loss=lambda output: output.square().mean(),
        options=fe.Options(min_unit_size=0),
        **arguments,
    )


def products_of_step(found: fe.Simulation) -> dict[str, float]:
    """Seconds of products, which are those of the optimizer."""
    seconds: dict[str, float] = {}
    for span in found.spans:
        if span.phase == "step" and span.label in ("mm", "addmm", "bmm", "baddbmm"):
            seconds[span.label] = seconds.get(span.label, 0.0) + span.end - span.start
    return seconds


def test_each_rank_steps_its_share() -> None:
    alone, four = (products_of_step(simulated(num_ranks)) for num_ranks in (1, 4))
    assert alone
    assert four == pytest.approx({label: seconds / 4 for label, seconds in alone.items()})


def test_messages_have_the_bytes_of_cut_matrices() -> None:
    """Each of two ranks owns two of four matrices, and sends half of the gradients of the others
    and half of its own weights."""
    found, adamw = simulated(2), simulated(2, None)
    halves = 2 * MATRIX // 2 * 4
    assert found.sent_bytes["inner"] - adamw.sent_bytes["inner"] == 2 * halves
    labels = {span.label for span in found.spans if span.phase == "step"}
    assert {"gradients to owners", "weights from owners"} <= labels
    for level in ("no_shard", "optim", "optim_grads"):
        spans = simulated(2, strategy=level).spans
        assert "weights from owners" in {span.label for span in spans}
    # Momenta of two matrices, their whole weights, and messages.
    assert found.memory["optimizer"] >= 2 * 2 * MATRIX * 4


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_plan_takes_it(num_ranks: int) -> None:
    planning = fe.plan(
        build,
        torch.zeros(8, WIDTH),
        world_size=num_ranks,
        checkpointing=(False,),
        optimizer=muon,
        loss=lambda output: output.square().mean(),
        options=fe.Options(min_unit_size=0),
    )
    assert planning.chosen is not None


class Broken(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("no step")


def test_steps_that_fail_are_errors_that_say_so() -> None:
    with pytest.raises(fe.SimulationError, match="the optimizer's step") as caught:
        simulated(2, lambda params: torch.optim.Adafactor(list(params)))
    assert caught.value.needs_values
    with pytest.raises(ValueError, match="Broken raises ZeroDivisionError"):
        simulated(2, Broken)
