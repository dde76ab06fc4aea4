"""Lanes on CPU: when operations start, their waits, and messages of errors."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_engine.comm import collectives
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.host_lane import HostLane
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.comm.make_lanes import make_lanes
from fsdp_engine.strategies import Axis


class Scene:
    """Host lanes by name, and a log of what their operations do; "compute" waits for them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lanes: dict[str, HostLane] = defaultdict(HostLane)

    def operation(
        self, name: str, num_works: int = 1, error: str | None = None
    ) -> Callable[[], Steps]:
        """An operation that logs its start, the wait for each of its works, and its end. ``error``:
        the message with which a wait fails."""

        def wait() -> None:
            self.log.append(f"{name} waited")
            if error is not None:
                raise RuntimeError(error)

        def steps() -> Steps:
            self.log.append(f"{name} starts")
            for _ in range(num_works):
                yield [SimpleNamespace(wait=wait)]  # type: ignore[list-item]
            self.log.append(f"{name} ends")

        return steps

    def submit(self, lane: str, name: str, *after: Any, error: str | None = None) -> Any:
        return self.lanes[lane].submit(name, self.operation(name, error=error), after=after)

    def wait(self, ticket: Any) -> None:
        self.lanes["compute"].wait(ticket)


def whole(names: str) -> list[str]:
    """The log of operations one after the other."""
    return [f"{name} {what}" for name in names for what in ("starts", "waited", "ends")]


def test_an_operation_starts_at_once_and_ends_when_somebody_waits() -> None:
    scene = Scene()
    ticket = scene.submit("lane", "a")
    assert scene.log == ["a starts"]
    assert not ticket.done
    for _ in range(2):
        scene.wait(ticket)
        assert scene.log == whole("a")
        assert ticket.done
    # Without communication it is done at once.
    assert HostLane().submit("b", scene.operation("b", 0)).done
    assert scene.log[3:] == ["b starts", "b ends"]


def test_operations_of_a_lane_overlap_unless_one_comes_after_the_other() -> None:
    scene = Scene()
    first = scene.submit("lane", "a")
    scene.submit("lane", "b")
    scene.submit("lane", "c", first)
    assert scene.log == ["a starts", "b starts"]
    scene.submit("lane", "d")
    assert scene.log == ["a starts", "b starts", "a waited", "a ends", "c starts", "d starts"]


def test_operations_start_in_the_order_of_their_submission() -> None:
    scene = Scene()
    scene.submit("lane", "a", scene.submit("other", "x"))
    last = scene.submit("lane", "b")
    # When b is submitted, x is completed: a precedes b on the lane, and a waits for x.
    assert scene.log == [*whole("x"), "a starts", "b starts"]
    scene.wait(last)
    assert scene.log[5:] == ["b waited", "b ends"]


def test_waiting_drives_what_an_operation_comes_after() -> None:
    scene = Scene()
    first = scene.submit("other", "x")
    second = scene.submit("lane", "y", first)
    third = scene.submit("other", "z", second)
    scene.wait(third)
    assert scene.log == whole("xyz")
    assert first.done
    assert second.done
    blocker = scene.submit("other", "x")
    held_up = scene.submit("lane", "a", blocker)
    scene.wait(blocker)
    assert "a starts" not in scene.log  # the wait for another lane does not start it
    scene.wait(held_up)
    assert scene.log[-3:] == whole("a")


def test_a_record_on_the_host_is_reached_and_memory_is_managed_at_once() -> None:
    scene = Scene()
    scene.submit("lane", "a")
    record = scene.lanes["lane"].record()
    assert record.done
    scene.submit("lane", "b", record)
    scene.lanes["lane"].manage("free", lambda: scene.log.append("freed"), None)
    assert scene.log == ["a starts", "b starts", "freed"]


def test_a_chain_runs_its_links_one_after_the_other_and_again() -> None:
    scene = Scene()
    chain = Chain()
    assert not chain
    for lane, name in (("gather", "a"), ("reduce", "b"), ("gather", "c")):
        chain.add(scene.lanes[lane], name, scene.operation(name))
    assert chain
    scene.wait(chain.run(()))
    assert scene.log == whole("abc")
    blocker = scene.submit("compute", "x")
    scene.wait(chain.run((blocker,)))
    assert blocker.done
    assert scene.log == whole("abcxabc")


def test_an_error_names_the_operation_that_failed() -> None:
    scene = Scene()
    failing = scene.submit("lane", "all-gather of blocks.1", error="Timed out")
    waiting = scene.submit("other", "second", failing)
    # A second wait must not look like success.
    for ticket in (failing, failing, waiting):
        with pytest.raises(
            RuntimeError, match=r"^all-gather of blocks\.1 did not complete: .*\(Timed out\)$"
        ):
            scene.wait(ticket)
        assert not ticket.done

    def raises() -> Steps:
        raise RuntimeError("Connection closed by peer")
        yield ()

    lane = HostLane()
    with pytest.raises(RuntimeError, match=r"^cast of blocks\.2 did not complete: .*closed by"):
        lane.submit("cast of blocks.2", raises)
    assert len(lane.drain()) == 1


def test_draining_ends_everything_and_returns_what_failed() -> None:
    scene = Scene()
    tickets = [
        scene.submit("lane", "a"),
        scene.submit("lane", "b", error="broken pipe"),
        scene.submit("lane", "c"),
        scene.submit("lane", "d", scene.submit("other", "x")),
    ]
    errors = scene.lanes["lane"].drain()
    assert [str(error).split(" did not")[0] for error in errors] == ["b"]
    assert [ticket.done for ticket in tickets] == [True, False, True, True]
    assert scene.lanes["lane"].drain() == []
    scene.wait(scene.submit("lane", "e"))  # the lane continues
    assert scene.log[-1] == "e ends"


def test_an_axis_has_a_lane_for_gathers_and_one_for_reductions_and_all_drain_together() -> None:
    lanes = make_lanes(torch.device("cpu"))
    chosen = [f(axis) for f in (lanes.gather, lanes.reduce) for axis in (Axis.INNER, Axis.OUTER)]
    named = [lanes.inner_gather, lanes.outer_gather, lanes.inner_reduce, lanes.outer_reduce]
    assert chosen == named
    assert len({id(lane) for lane in (*chosen, lanes.compute)}) == 5
    lanes.inner_gather.submit("a", Scene().operation("a", error="no"))
    lanes.outer_reduce.submit("b", Scene().operation("b", error="no"))
    assert [str(error)[0] for error in lanes.drain()] == ["a", "b"]


def test_a_profiler_shows_operations_by_name() -> None:
    logging.getLogger("torch.profiler").setLevel(logging.ERROR)
    scene = Scene()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scene.wait(scene.submit("lane", "all-gather of blocks.3"))
    names = {event.key for event in profile.key_averages()}
    assert "fsdp_engine: all-gather of blocks.3" in names


class Group:
    """A process group of a user's Python class, whose methods the engine must call. Its backend for
    CUDA is called ``name``.

    Attributes:
        issued: for each collective, whether it was asynchronous.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.issued: list[bool] = []

    def all_gather_single(self, out: Any, source: Any, options: Any) -> Any:
        self.issued.append(options.asyncOp)
        return "work" if options.asyncOp else None

    # torch 2.11 calls these older names.
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
        ("gloo", "cuda", True),  # a synchronous call would make the host wait
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
        return  # gloo sends between pairs of ranks
    full, part = torch.zeros(4), torch.zeros(2)
    for operation in (comm.all_gather(full), comm.reduce_scatter(full, part, average=True)):
        assert list(operation) == [("work",) if is_async else ()]
    assert group.issued == [is_async] * 2
