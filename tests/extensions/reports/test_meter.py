"""Waits that lanes report to a meter: of the host on a CPU, of events on CUDA (a fake device)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fsdp_engine.comm import host_lane
from fsdp_engine.comm.host_lane import HostLane
from fsdp_engine.comm.lanes import Lanes, Steps
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.extensions.reports import wait_meter as meter_module
from fsdp_engine.extensions.reports.peaks import Peak
from fsdp_engine.extensions.reports.wait_meter import WaitMeter
from fsdp_engine.memory.allocator import Ledger

LABEL = "all-gather of blocks.1 over the inner axis"


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class SlowWork:
    def __init__(self, time: Time, seconds: float, error: str | None = None) -> None:
        self._time, self._seconds, self._error = time, seconds, error

    def wait(self) -> None:
        self._time.now += self._seconds
        if self._error is not None:
            raise RuntimeError(self._error)


def host_operation(time: Time, *seconds: float, error: str | None = None) -> Callable[[], Steps]:
    """Works of ``seconds``, one after the other, with a second of compute after each."""

    def steps() -> Steps:
        for each in seconds:
            yield [SlowWork(time, each, error)]
            time.now += 1.0

    return steps


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(host_lane, "time", time)
    return time


def metered(lanes: Lanes, phase: str = "forward") -> WaitMeter:
    meter = WaitMeter(lambda: phase)
    for lane in lanes.all:
        lane.meters = (meter,)
    return meter


def found(meter: WaitMeter, *, wait: bool = True) -> dict[tuple[str, str, str], tuple[int, float]]:
    meter.read(wait=wait)
    return {key: (each.count, pytest.approx(each.seconds)) for key, each in meter.found.items()}


def test_on_cpu_waits_for_works_count_for_the_operation_whose_they_are(time: Time) -> None:
    lanes = make_lanes(torch.device("cpu"))
    meter = metered(lanes, "backward")
    first = lanes.outer_gather.submit("first", host_operation(time, 3.0))
    second = lanes.inner_gather.submit("second", host_operation(time, 4.0, 5.0), after=[first])
    time.now += 10.0  # the model computes
    assert found(meter) == {}
    lanes.compute.wait(second)
    lanes.compute.wait(second)
    assert found(meter) == {
        ("outer gather", "first", "backward"): (1, 3.0),
        ("inner gather", "second", "backward"): (2, 9.0),
    }


def test_on_cpu_what_fails_is_raised_as_it_is_without_a_meter(time: Time) -> None:
    lanes = make_lanes(torch.device("cpu"))
    meter = metered(lanes)
    ticket = lanes.inner_gather.submit(LABEL, host_operation(time, 3.0, error="Timed out"))
    with pytest.raises(RuntimeError, match=r"^all-gather of blocks\.1 .*\(Timed out\)$"):
        lanes.compute.wait(ticket)
    assert found(meter) == {}
    assert [len(lane.drain()) for lane in lanes.all] == [0, 1, 0, 0, 0]


def test_without_a_meter_no_time_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    monkeypatch.setattr(host_lane, "time", None)
    lane, compute = HostLane(), HostLane()
    compute.wait(lane.submit(LABEL, host_operation(time, 3.0)))


class Device:
    """Streams whose time advances with submitted work, and events that record it."""

    def __init__(self) -> None:
        self.reached = float("inf")  # stream time that the host knows to be over
        self.num_synchronized = 0
        self.current: Any = Stream(self)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def work(self, seconds: float) -> Callable[[], Steps]:
        def steps() -> Steps:
            self.current.time += seconds
            yield from ()

        return steps


class Stream:
    def __init__(self, device: Device) -> None:
        self.device, self.time = device, 0.0

    def wait_event(self, event: Any) -> None:
        self.time = max(self.time, event.time)


class Event:
    device: Device

    def __init__(self, enable_timing: bool = False) -> None:
        self.is_timed, self.time = enable_timing, None

    def record(self, stream: Stream) -> None:
        self.time = stream.time  # type: ignore[assignment]

    def query(self) -> bool:
        return self.time <= self.device.reached  # type: ignore[operator]

    def synchronize(self) -> None:
        self.device.num_synchronized += 1
        self.device.reached = max(self.device.reached, self.time)  # type: ignore[type-var]

    def elapsed_time(self, end: Event) -> float:
        assert self.is_timed
        assert end.is_timed
        assert self.query()
        assert end.query()
        return 1e3 * (end.time - self.time)  # type: ignore[operator]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    Event.device = device
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: Stream(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return device


def gather_and_wait(device: Device, lanes: Lanes, sent: float, computed: float) -> None:
    ticket = lanes.inner_gather.submit(LABEL, device.work(sent), after=[lanes.compute.record()])
    device.current.time += computed
    lanes.compute.wait(ticket)


def test_on_cuda_a_wait_is_due_to_the_longest_of_what_came_one_after_the_other(
    device: Device,
) -> None:
    lanes = make_lanes(torch.device("cuda"))
    meter = metered(lanes)
    first = lanes.outer_gather.submit("first", device.work(7.0))
    second = lanes.inner_gather.submit("second", device.work(2.0), after=[first])
    third = lanes.inner_gather.submit("third", device.work(1.0), after=[second])
    device.current.time += 4.0
    lanes.compute.wait(third)
    assert found(meter) == {("outer gather", "first", "forward"): (1, 6.0)}


def test_on_cuda_nobody_waits_for_the_device_before_somebody_asks(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "_MOST_PENDING", 4)
    lanes = make_lanes(torch.device("cuda"))
    meter = metered(lanes)
    device.reached = 9.0  # the device has completed the first two gathers below
    for _ in range(6):
        gather_and_wait(device, lanes, sent=4.0, computed=1.0)
    assert device.num_synchronized == 0
    assert found(meter, wait=False) == {("inner gather", LABEL, "forward"): (2, 6.0)}
    assert device.num_synchronized == 0
    assert found(meter) == {("inner gather", LABEL, "forward"): (6, 18.0)}
    assert device.num_synchronized == 1


def test_on_cuda_what_was_submitted_before_is_not_told(device: Device) -> None:
    lanes = make_lanes(torch.device("cuda"))
    ticket = lanes.inner_gather.submit(LABEL, device.work(5.0))
    meter = metered(lanes)
    lanes.compute.wait(ticket)
    assert device.current.time == 5.0
    lanes.inner_reduce.wait(lanes.inner_gather.submit(LABEL, device.work(5.0)))
    assert found(meter) == {}


def test_on_cuda_events_have_no_time_without_a_meter(device: Device) -> None:
    lanes = make_lanes(torch.device("cuda"))
    tickets: Any = (lanes.inner_gather.submit(LABEL, device.work(5.0)), lanes.compute.record())
    assert [ticket.event.is_timed for ticket in tickets] == [False, False]


def test_a_peak_of_ones_own_knows_nothing_of_others() -> None:
    ledger = Ledger()
    ledger.add("main", 10)
    peak = Peak(ledger)
    ledger.watchers = (peak,)
    ledger.add("full", 5)
    ledger.add("full", -5)
    ledger.add("grad", 4)
    ledger.reset_peak()
    ledger.add("staging", 1)
    ledger.add("staging", -1)
    assert (peak.held, peak.total) == ({"main": 10, "full": 5}, 15)
    assert ledger.peak_total == 15  # 10 + 4 + 1 since the reset
