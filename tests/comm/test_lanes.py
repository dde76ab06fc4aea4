"""Lanes on CPU: what starts when, what waits for what, and what an error says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_engine.comm import collectives
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain, HostLane, Lanes, make_lanes
from fsdp_engine.strategies import Axis


class FakeWork:
    """A work that records when it is waited for, and may fail."""

    def __init__(self, log: list[str], name: str, error: str | None = None) -> None:
        self._log, self._name, self._error = log, name, error

    def wait(self) -> None:
        self._log.append(f"{self._name} waited")
        if self._error is not None:
            raise RuntimeError(self._error)


def operation(
    log: list[str], name: str, num_works: int = 1, error: str | None = None
) -> Callable[[], Steps]:
    """Notes its start, each of its works, and its end."""

    def steps() -> Steps:
        log.append(f"{name} starts")
        for _ in range(num_works):
            yield [FakeWork(log, name, error)]  # type: ignore[list-item]
        log.append(f"{name} ends")

    return steps


def test_an_operation_starts_at_once_and_ends_when_somebody_waits() -> None:
    log: list[str] = []
    lane, compute = HostLane(), HostLane()
    ticket = lane.submit("a", operation(log, "a", 2))
    assert log == ["a starts"]
    assert not ticket.done
    compute.wait(ticket)
    assert log == ["a starts", "a waited", "a waited", "a ends"]
    assert ticket.done
    compute.wait(ticket)
    assert len(log) == 4


def test_an_operation_without_communication_is_done_at_once() -> None:
    log: list[str] = []
    assert HostLane().submit("a", operation(log, "a", 0)).done
    assert log == ["a starts", "a ends"]


def test_operations_of_a_lane_overlap_unless_one_comes_after_the_other() -> None:
    log: list[str] = []
    lane = HostLane()
    first = lane.submit("a", operation(log, "a"))
    lane.submit("b", operation(log, "b"))
    assert log == ["a starts", "b starts"]
    lane.submit("c", operation(log, "c"), after=[first])
    assert log == ["a starts", "b starts"]
    lane.submit("d", operation(log, "d"))
    assert log == ["a starts", "b starts", "a waited", "a ends", "c starts", "d starts"]


def test_operations_start_in_the_order_of_their_submission() -> None:
    log: list[str] = []
    other, lane, compute = HostLane(), HostLane(), HostLane()
    held_up_by = other.submit("x", operation(log, "x"))
    lane.submit("a", operation(log, "a"), after=[held_up_by])
    last = lane.submit("b", operation(log, "b"))
    # The submission of b drove x to its end, since a had to start before b.
    assert log == ["x starts", "x waited", "x ends", "a starts", "b starts"]
    compute.wait(last)
    assert log[5:] == ["b waited", "b ends"]


def test_waiting_for_what_is_held_up_drives_what_it_comes_after() -> None:
    log: list[str] = []
    other, lane, compute = HostLane(), HostLane(), HostLane()
    first = other.submit("x", operation(log, "x"))
    second = lane.submit("y", operation(log, "y"), after=[first])
    third = other.submit("z", operation(log, "z"), after=[second])
    compute.wait(third)
    assert log == [f"{name} {what}" for name in "xyz" for what in ("starts", "waited", "ends")]
    assert first.done
    assert second.done


def test_waiting_for_the_second_starts_the_first_before_it() -> None:
    log: list[str] = []
    other, lane, compute = HostLane(), HostLane(), HostLane()
    blocker = other.submit("x", operation(log, "x"))
    first = lane.submit("a", operation(log, "a"), after=[blocker])
    compute.wait(blocker)
    assert "a starts" not in log  # its lane has not been used since
    compute.wait(first)
    assert log[-3:] == ["a starts", "a waited", "a ends"]


def test_a_record_on_the_host_is_reached_already() -> None:
    log: list[str] = []
    lane = HostLane()
    lane.submit("a", operation(log, "a"))
    assert lane.record().done
    lane.submit("b", operation(log, "b"), after=[lane.record()])
    assert log == ["a starts", "b starts"]


def test_a_chain_runs_its_links_one_after_the_other_and_again() -> None:
    log: list[str] = []
    gather, reduce, compute = HostLane(), HostLane(), HostLane()
    chain = Chain()
    assert not chain
    for lane, name in ((gather, "a"), (reduce, "b"), (gather, "c")):
        chain.add(lane, name, operation(log, name))
    assert chain
    compute.wait(chain.run(()))
    once = [f"{name} {what}" for name in "abc" for what in ("starts", "waited", "ends")]
    assert log == once
    blocker = compute.submit("x", operation([], "x"))
    compute.wait(chain.run((blocker,)))
    assert blocker.done
    assert log == once * 2


def test_an_error_while_waiting_names_the_operation() -> None:
    lane, compute = HostLane(), HostLane()
    ticket = lane.submit("all-gather of blocks.1", operation([], "a", error="Timed out"))
    for _ in range(2):  # a second wait must not look like success
        with pytest.raises(
            RuntimeError, match=r"^all-gather of blocks\.1 did not complete: .*\(Timed out\)$"
        ):
            compute.wait(ticket)
        assert not ticket.done


def test_an_error_at_the_start_names_the_operation() -> None:
    def steps() -> Steps:
        raise RuntimeError("Connection closed by peer")
        yield ()

    lane = HostLane()
    with pytest.raises(RuntimeError, match=r"^cast of blocks\.2 did not complete: .*closed by"):
        lane.submit("cast of blocks.2", steps)
    assert len(lane.drain()) == 1


def test_an_error_names_the_operation_that_failed_not_the_one_that_waits_for_it() -> None:
    lane, other, compute = HostLane(), HostLane(), HostLane()
    failing = other.submit("first", operation([], "a", error="no"))
    second = lane.submit("second", operation([], "b"), after=[failing])
    with pytest.raises(RuntimeError, match=r"^first did not complete"):
        compute.wait(second)


def test_draining_ends_everything_and_returns_what_failed() -> None:
    log: list[str] = []
    lane, other = HostLane(), HostLane()
    tickets = [
        lane.submit("a", operation(log, "a")),
        lane.submit("b", operation(log, "b", error="broken pipe")),
        lane.submit("c", operation(log, "c")),
    ]
    held_up = lane.submit("d", operation(log, "d"), after=[other.submit("x", operation(log, "x"))])
    errors = lane.drain()
    assert [str(error).split(" did not")[0] for error in errors] == ["b"]
    assert [ticket.done for ticket in (*tickets, held_up)] == [True, False, True, True]
    assert lane.drain() == []
    # The lane continues.
    again = lane.submit("e", operation(log, "e"))
    other.wait(again)
    assert log[-1] == "e ends"


def test_all_lanes_drain_together() -> None:
    lanes = make_lanes(torch.device("cpu"))
    lanes.inner_gather.submit("a", operation([], "a", error="no"))
    lanes.outer_reduce.submit("b", operation([], "b", error="no"))
    assert [str(error)[0] for error in lanes.drain()] == ["a", "b"]


def test_an_axis_has_a_lane_for_gathers_and_one_for_reductions() -> None:
    lanes = make_lanes(torch.device("cpu"))
    assert isinstance(lanes, Lanes)
    chosen = [f(axis) for f in (lanes.gather, lanes.reduce) for axis in (Axis.INNER, Axis.OUTER)]
    assert chosen == [
        lanes.inner_gather,
        lanes.outer_gather,
        lanes.inner_reduce,
        lanes.outer_reduce,
    ]
    assert len({id(lane) for lane in (*chosen, lanes.compute)}) == 5


def test_memory_is_managed_where_it_is_asked_for() -> None:
    log: list[str] = []
    lane = HostLane()
    lane.submit("a", operation(log, "a"))
    lane.manage("free", lambda: log.append("freed"), None)
    assert log == ["a starts", "freed"]


def test_a_profiler_shows_operations_by_name() -> None:
    logging.getLogger("torch.profiler").setLevel(logging.ERROR)
    lane, compute = HostLane(), HostLane()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compute.wait(lane.submit("all-gather of blocks.3", operation([], "a")))
    names = {event.key for event in profile.key_averages()}
    assert "fsdp_engine: all-gather of blocks.3" in names


class Group:
    """A process group whose backend for CUDA is called ``name``, of a class in Python: its methods
    are called.

    Attributes:
        issued: of each collective, whether it was asynchronous.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.issued: list[bool] = []

    def all_gather_single(self, out: Any, source: Any, options: Any) -> Any:
        self.issued.append(options.asyncOp)
        return "work" if options.asyncOp else None

    # By torch 2.11 under the older names.
    reduce_scatter_single = _allgather_base = _reduce_scatter_base = all_gather_single

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._name)

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("backend", "device", "is_async"),
    [
        ("nccl", "cuda", False),
        ("gloo", "cuda", True),  # would make the host wait
        ("mpi", "cpu", True),
    ],
)
def test_collectives_stay_on_the_stream_of_their_lane(
    backend: str, device: str, is_async: bool
) -> None:
    group = Group(backend)
    comm = collectives.Communicator(group, torch.device(device))  # type: ignore[arg-type]
    assert comm._stays_on_stream is not is_async
    if backend == "gloo":
        return  # goes pairwise
    full, part = torch.zeros(4), torch.zeros(2)
    for operation in (comm.all_gather(full), comm.reduce_scatter(full, part, average=True)):
        assert list(operation) == [("work",) if is_async else ()]
    assert group.issued == [is_async] * 2
