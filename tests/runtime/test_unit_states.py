"""The states of a unit through a step, and the transitions that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.runtime.unit import BACKWARD, FORWARD, State
from tests.models import Small, vector_batch
from tests.pool import on_ranks
from tests.training import mesh_of


def _sharded(level: str) -> tuple[nn.Module, fe.Engine]:
    model = Small()
    return model, fe.shard(model, mesh_of(2), level, options=fe.Options(min_unit_size=0))


@on_ranks(world_size=2)
@pytest.mark.parametrize("level", ["optim_grads_params", "optim"])
def test_the_states_of_a_unit_through_a_step(level: str) -> None:
    model, engine = _sharded(level)
    rest = State.SHARDED if level == "optim_grads_params" else State.FULL
    blocks = [unit for unit in engine.units if unit.buffers]
    within: list[tuple[State, int]] = []
    for unit in blocks:
        for module in unit.modules:
            module.register_forward_pre_hook(
                lambda *_, unit=unit: within.append((unit.state, unit.uses))
            )
    assert {unit.state for unit in blocks} == {rest}
    loss = model(*vector_batch(2, torch.distributed.get_rank()))
    assert {state for state, _ in within} == {State.FULL}
    assert min(uses for _, uses in within) >= 1
    assert {unit.uses for unit in blocks} == {0}
    loss.backward()
    assert {unit.state for unit in blocks} == {rest}


@on_ranks(world_size=2)
def test_transitions_that_are_refused_name_the_unit_and_the_states() -> None:
    _, engine = _sharded("optim_grads_params")
    unit = engine.units[-1]
    assert unit.state is State.SHARDED
    with pytest.raises(AssertionError, match="entered while it is sharded"):
        unit.enter()
    unit.wait()  # nothing is in flight
    unit.release()  # it is sharded already
    assert unit.state is State.SHARDED
    unit.gather(FORWARD)
    assert unit.state is State.GATHERING
    assert not unit.needs_gather(BACKWARD)
    unit.install()
    assert unit.state is State.FULL
    unit.enter()
    with pytest.raises(AssertionError, match="freed while it is in use"):
        unit.release()
    assert unit.leave()
    with pytest.raises(AssertionError, match="left more often than entered"):
        unit.leave()
    unit.release()
    assert unit.state is State.SHARDED
    with pytest.raises(AssertionError, match=f"{unit.label}: SHARDED -> FULL is not a legal"):
        unit._move(State.FULL)
