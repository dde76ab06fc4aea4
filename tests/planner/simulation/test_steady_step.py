"""A simulation returns its second step; a third step would be identical, also if the first has as
many microbatches."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.planner.simulation.machine import Link, Machine, Processor
from tests.models import CalledTwice, EncoderDecoder, vector_batch

LEVEL_3 = ("optim_grads_params", "no_shard")
NARROW, BLOCKING = [
    Machine(
        "narrow", Processor({torch.float32: 1e9}, 1e9, 1e12), Link(1e6, 1e-6), Link(3e5, 2e-6), 4
    ),
    Machine(
        "the host computes",
        Processor({torch.float32: 1e9}, 1e9, 1e12),
        Link(1e7, 1e-6, processor_share=0.5),
        Link(3e6, 2e-6, processor_share=0.5),
        ranks_per_node=4,
        host_seconds=1e-6,
        host_runs_ahead=False,
    ),
]
QUICK = [
    (LEVEL_3, fe.H100),
    (("optim_grads", "no_shard"), NARROW),
    (("optim", "optim"), BLOCKING),
    (("no_shard", "no_shard"), fe.H100),
]


@pytest.mark.parametrize(("levels", "on"), QUICK)
@pytest.mark.parametrize("build", [EncoderDecoder, CalledTwice])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_more_first_steps_add_nothing(
    levels: tuple[str, str],
    on: Machine,
    build: type[nn.Module],
    microbatches: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    simulation = importlib.import_module("fsdp_engine.planner.simulation.simulate")
    for steps in (simulation.FIRST_STEPS, (microbatches, microbatches)):
        monkeypatch.setattr(simulation, "FIRST_STEPS", steps)
        found.append(
            fe.simulate(
                build,
                8,
                batch=vector_batch(8, 0),
                mesh=(2, 4),
                machine=on,
                microbatches=microbatches,
                strategy=levels[0],
                outer_strategy=levels[1],
                options=fe.Options(min_unit_size=0),
            )
        )
    second, third = found
    assert second.seconds == pytest.approx(third.seconds, rel=1e-9)
    assert second.exposed_seconds == pytest.approx(third.exposed_seconds, abs=1e-9 * third.seconds)
    assert second.memory == third.memory
    assert [(s.lane, s.label) for s in second.spans] == [(s.lane, s.label) for s in third.spans]
