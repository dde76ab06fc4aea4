"""The states of a unit, and the transitions that are refused."""

from __future__ import annotations

import pytest

import fsdp_engine as fe
from fsdp_engine.runtime.unit import BACKWARD, FORWARD, State
from tests.models import Small
from tests.pool import on_ranks


@on_ranks(world_size=2)
def test_transitions_that_are_refused_name_the_unit_and_the_states() -> None:
    engine = fe.shard(Small())
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
