"""Each wait of the engine's lanes is necessary: without it weights are wrong.

``waits.py`` leaves them out one by one; ``benchmarks/missing_waits.py`` writes the table of
``docs/internals/devices.md``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.make_lanes import make_lanes
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.waits import PROGRAMS, Program, num_ranks, sweep
from tests.pool import Ranks, on_ranks

ranks = device.ranks


def places_of(waits: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(each["place"], each["waiter"], each["source"]) for each in waits}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROGRAMS)
def test_wherever_a_lane_waits_weights_are_wrong_without_it(ranks: Ranks, name: str) -> None:
    found = ranks.run(sweep, name, world_size=num_ranks(name), timeout=600)[0]
    tried = [each for each in found if not each["implied"]]
    assert len(tried) >= len(found) // 2, found
    shown = [each for each in tried if each["pattern"] is not None]
    # On a busy machine a delay may be too short to show one of several waits at a place.
    assert len(tried) - len(shown) <= 2, tried
    assert places_of(shown) == places_of(tried)


@on_ranks(2)
def test_the_search_finds_a_missing_wait_and_blames_no_delay() -> None:
    program = Program(PROGRAMS["`optim_grads_params`"])
    wait = next(each for each in program.waits if each.place == "unit.wait")
    assert program.first_pattern(wait) is not None
    assert program.is_right_with({"lane": wait.source, "seconds": 6e-3})


def nothing() -> Steps:
    yield ()


@on_ranks(1)
def test_a_lane_waits_for_the_newest_of_several_tickets_once_and_for_none_of_its_own() -> None:
    lanes = make_lanes(on.DEVICE)
    first, second = (lanes.inner_gather.submit("gather", nothing) for _ in range(2))
    third = lanes.inner_reduce.submit("reduce", nothing)
    with on.without_wait(-1):
        lanes.compute.wait(first, second, third)
        assert on.num_stream_waits() == 2
        lanes.inner_gather.wait(first, second)
        lanes.inner_gather.wait(third)
        lanes.inner_gather.wait(third)
        assert on.num_stream_waits() == 3
    side = torch.deferred.Stream()
    torch.accelerator.synchronize()
    with on.held(lanes.inner_gather._stream):
        with torch.deferred.stream(lanes.inner_gather._stream):
            x = torch.ones(3, device=on.DEVICE) * 2
        newest = lanes.inner_gather.record()
        with torch.deferred.stream(side):
            lanes.compute.wait(first, newest)
            y = x + 1
        assert not side.query()
    side.synchronize()
    assert y.cpu().tolist() == [3.0] * 3
