"""State in host memory, stepped on the device or there: order, memory, waits of the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp_engine.extensions.offload import offloaded_step
from fsdp_engine.planner.simulation import state_links
from tests.async_device import device as on
from tests.async_device import ranks as device
from tests.async_device.scene import differences, on_device, train_with
from tests.extensions.offload.device_jobs import (
    REST_ON_HOST,
    job,
    slow_disk,
    trained,
)
from tests.extensions.offload.offloaded import LEVELS, offloadings_of
from tests.matrices import thorough_but
from tests.models import vector_batch
from tests.pool import on_ranks

ranks = device.ranks

STATE = "state on the host"


@on_ranks(1)
def test_state_is_pinned_on_the_host_and_a_step_does_not_wait_for_it() -> None:
    for level in LEVELS:
        _, optimizer, step = trained(STATE, 2, (level, "no_shard"))
        with on.delays(copy=5e-3), on.count_host_syncs() as syncs:
            step(2)
            step(3)
        assert not syncs
        packed = optimizer.state_dict()  # waits for the last copies
        for state in packed["state"].values():
            for key in ("exp_avg", "exp_avg_sq"):
                local = getattr(state[key], "local", state[key])
                assert local.device.type == "cpu"
                assert local.is_pinned()
                assert bool(local.any())


@pytest.mark.parametrize("place", [STATE, "all on a disk"])
@on_ranks(1)
def test_waits_of_compute_for_copies_are_measured(place: str) -> None:
    engine, optimizer, step = trained(place, 1)
    with on.delays(copy=1e-2), slow_disk(5e-3), engine.measure() as measured:
        step(1)
    units = {unit.label for unit in engine.units if unit.buffers}
    for lane in ("state in", "state out"):
        waited = [each for each in measured.waited if each.lane == lane]
        assert sum(each.seconds for each in waited) >= 5e-3
        assert {each.unit for each in waited if each.phase == "step"} == units
        assert lane in str(measured)
    assert "for communication and copies of state" in str(engine.describe())
    assert not any(lane.meters for lane in offloadings_of(engine)[0].lanes)
    if place == STATE:
        assert set(engine.memory_bytes("host")) == {"optimizer"}
        del optimizer, step
        gc.collect()
        assert engine.memory_bytes("host") == {}


@on_ranks(1)
def test_a_deleted_optimizer_waits_for_copies_into_its_memory() -> None:
    engine, optimizer, step = trained(STATE, pair=("optim", "no_shard"))
    lane: Any = offloaded_step._OFFLOADS[next(engine.model.parameters())].unit.offload.state_out
    with on.delays(copy=0.05):
        step(0)
        assert not lane._target().query()
        del optimizer, step
        assert lane._target().query()


@pytest.mark.parametrize("place", REST_ON_HOST)
@on_ranks(2)
def test_parameters_and_gradients_are_pinned_and_nothing_is_held(place: str) -> None:
    engine, optimizer, _ = trained(place)
    batch = on_device(vector_batch(4, 0), on.DEVICE)
    for _ in range(2):
        engine.model(*batch).backward()
        assert not engine.memory_bytes()
        for param in engine.model.parameters():
            assert param.device.type == param.grad.device.type == "cpu"
            assert param.local.is_pinned()
            assert param.grad.local.is_pinned()
        optimizer.step()
        optimizer.zero_grad()
        assert set(engine.memory_bytes("host")) >= {"main", "grad"}
    assert torch.isfinite(engine.clip_grad_norm_(1.0))


ELSEWHERE = ("all on the host", "stepped on the host", "all on a disk")
CHANGES: list[Callable[[list[Any]], Any]] = [
    lambda params: [param.mul_(1.5) for param in params],
    lambda params: [param.data.mul_(0.8) for param in params],
    lambda params: [param.to_local().mul_(0.9) for param in params],
    lambda params: torch._foreach_mul_(params, 1.25),
]


@pytest.mark.parametrize("place", thorough_but(ELSEWHERE, [*ELSEWHERE, "rest on the host"]))
@on_ranks(2)
def test_changes_and_reads_of_parameters_elsewhere_are_ordered(place: str) -> None:
    """Gradients are read, weights are read after steps, and weights change during gathers."""
    results = []
    for there, device_type in ((None, "cpu"), (place, on.NAME)):
        engine, optimizer, _ = trained(there, device_type=device_type)
        model: Any = engine.model
        batch = on_device(vector_batch(4, 0), engine.mesh.device)
        found = []
        with on.delays(copy=2e-3, compute=5e-4):
            for change in CHANGES:
                model(*batch).backward()
                found += [param.grad.local.clone() for param in model.parameters()]
                optimizer.step()
                found += [param.detach().clone() for param in model.parameters()]
                with torch.no_grad():
                    found.append(model(*batch))
                    change(list(model.parameters()))
                    found += [model(*batch), *(param.full_tensor() for param in model.parameters())]
                found.append(model(*batch).detach())  # without a backward
                optimizer.step()
                optimizer.zero_grad()
                model.load_state_dict(engine.full_state_dict())
        results.append([getattr(each, "local", each).cpu() for each in found])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@on_ranks(1)
def test_a_step_on_the_stream_of_a_lane_is_the_same() -> None:
    """The device has few streams, so the caller's stream can be the stream of a lane."""
    pair = ("optim", "no_shard")
    data = job(STATE, pair).data()
    engine, optimizer, _ = trained(STATE, pair=pair, device_type="cpu")
    expected = train_with(engine, optimizer, data)
    for lane in (0, 1):
        engine, optimizer, _ = trained(STATE, pair=pair)
        stream = offloadings_of(engine)[0].lanes[lane]._stream  # type: ignore[attr-defined]
        with on.delays(copy=4e-3, compute=1e-3), torch.deferred.stream(stream):
            assert not differences(train_with(engine, optimizer, data), expected)


@on_ranks(1)
def test_a_scale_of_the_device_divides_gradients_on_the_host() -> None:
    """torch copies the scale to the host without waiting."""
    found = []
    for device_type in ("cpu", on.NAME):
        engine, optimizer, _ = trained("stepped on the host", device_type=device_type)
        scaler = torch.amp.GradScaler(device_type, init_scale=256.0)
        batch = on_device(vector_batch(4, 0), engine.mesh.device)
        scaler.scale(engine.model(*batch)).backward()
        with on.delays(copy=1e-2):
            scaler.unscale_(optimizer)
            found.append([param.grad.local.clone() for param in engine.model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(1)
def test_the_link_to_the_host_is_measured() -> None:
    device = torch.device(on.NAME, 0)
    delay = 2e-3  # of each copy, also of a small one
    with pytest.MonkeyPatch.context() as patch, on.delays(copy=delay):
        patch.setattr(state_links, "_LARGE_ON_DEVICE", 2**20)
        found = state_links.measure_host_link(device, 0.02, lambda value: value)
    assert found.latency >= delay / 2
    for rate in (found.into, found.out):
        assert 0 < rate <= 2 * 2**20 / delay
    assert 0 < found.both <= found.into + found.out
