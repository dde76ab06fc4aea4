"""A rank that stops is named by the other ranks, with its last operation. [Note: Missing ranks]"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

import fsdp_engine as fe
from fsdp_engine.comm import activity
from fsdp_engine.comm.device_lane import DeviceLane
from fsdp_engine.extensions.stall_monitor import stall_monitor
from fsdp_engine.extensions.stall_monitor.stall_monitor import (
    ForwardLines,
    StallMonitor,
    SubmittedWork,
    first_difference,
)
from fsdp_engine.strategies import LEVELS
from tests.checkpoint.scene import shared_folder, update
from tests.matrices import thorough_but
from tests.pool import on_ranks
from tests.ports import free_port

NUM_STEPS = 2


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))


def train(model: nn.Module, num_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        update(model(torch.ones(2, 4)).sum(), optimizer)


def do_something_else(told: str = "told") -> None:
    """Wait until another rank has set ``told``."""
    store, deadline = _get_default_store(), time.monotonic() + 120
    while not store.check([told]) and time.monotonic() < deadline:
        time.sleep(0.1)


def is_told(told: str = "told") -> None:
    _get_default_store().set(told, "")


@contextmanager
def logged(patience_seconds: float) -> Iterator[list[str]]:
    """Yields the lines that this rank logs. The first one sets ``told`` for the other rank."""
    lines: list[str] = []
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        lines.append(record.getMessage())
        is_told()

    handler.emit = emit
    logging.getLogger("fsdp_engine").addHandler(handler)
    before, activity.PATIENCE_SECONDS = activity.PATIENCE_SECONDS, patience_seconds
    try:
        yield lines
    finally:
        activity.PATIENCE_SECONDS = before
        logging.getLogger("fsdp_engine").removeHandler(handler)


@pytest.mark.parametrize("level", thorough_but(["optim_grads_params"], LEVELS))
@on_ranks(4)
def test_a_rank_with_fewer_batches_is_named_as_is_one_that_misses_a_norm(level: str) -> None:
    # Two pairs of ranks, which wait for their eight seconds at the same time.
    pairs = [[0, 1], [2, 3]]
    groups = [dist.new_group(pair, timeout=timedelta(seconds=8)) for pair in pairs]
    number, place = divmod(dist.get_rank(), 2)
    model = make_model()
    # Where every rank holds all gradients, their norm sends nothing.
    levels = (level, "optim_grads_params")
    engine = fe.shard(model, DeviceMesh.from_group(groups[number], "cpu"), levels[number])
    train(model, NUM_STEPS)
    if number == 1:
        model(torch.ones(2, 4)).sum().backward()
    told = f"told {number}"
    if place == 1:
        do_something_else(told)
        return
    missing = pairs[number][1]
    called = r"called at .*:\d+ in .*"
    place = rf"test_missing_ranks\.py:\d+ in do_something_else, {called}"
    where = rf"rank {missing} is at .*{place}; "
    if number == 0:
        with pytest.raises(RuntimeError, match=rf"did not complete.*: {where}the last it began "):
            train(model, 1)
    else:
        text = rf"the norm of gradients did not complete.*: {where}"
        with pytest.raises(RuntimeError, match=text):
            engine.clip_grad_norm_(1.0)
    is_told(told)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))


@pytest.mark.parametrize("step", [0, 2])
@on_ranks(2)
def test_a_forward_of_one_rank_is_named_though_the_others_answer_it_later(step: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    model = make_model()
    fe.shard(model, DeviceMesh.from_group(group, "cpu"))
    train(model, step)
    if dist.get_rank() == 0:
        evaluate(model)
    places = [
        r"\S*test_missing_ranks\.py:\d+ in evaluate",
        r"\S*test_missing_ranks\.py:\d+ in train",
    ]
    if dist.get_rank() == 1:
        places.reverse()
    text = (
        rf"The ranks began forward {step + 1} at different lines: rank {1 - dist.get_rank()} at "
        rf"{places[1]}, this rank at {places[0]}\. "
    )
    with pytest.raises(RuntimeError, match=text):
        train(model, 2)


class TestForwardLines:
    def test_a_loop_is_one_run(self) -> None:
        lines = ForwardLines()
        for _ in range(3):
            for _ in range(1000):
                lines.append(sys._getframe())
            lines.append(sys._getframe())
        number, runs = json.loads(lines.as_json())
        assert number == 3 * 1001
        assert [first for first, _ in runs] == [0, 1000, 1001, 2001, 2002, 3002]
        assert runs[0][1].endswith("in test_a_loop_is_one_run")
        assert runs[0][1] == runs[2][1]

    def test_only_the_latest_are_kept(self) -> None:
        lines = ForwardLines()
        for _ in range(stall_monitor._MOST_RUNS):
            lines.append(sys._getframe())
            lines.append(sys._getframe())
        _, runs = json.loads(lines.as_json())
        assert len(runs) == stall_monitor._MOST_RUNS == runs[0][0]

    @pytest.mark.parametrize(
        ("mine", "theirs", "found"),
        [
            ((5, [(0, "a")]), (5, [(0, "a")]), ""),
            ((5, [(0, "a")]), (6, [(0, "a"), (5, "b")]), ""),  # one rank has begun the sixth
            ((6, [(0, "a")]), (6, [(0, "a"), (5, "b")]), "forward 6 at"),
            ((9, [(0, "a"), (3, "b"), (4, "a")]), (9, [(0, "a"), (4, "b")]), "forward 4 at"),
            ((90, [(70, "a")]), (90, [(0, "a"), (69, "b")]), "forward 71 or earlier at"),
            ((90, [(70, "a")]), (70, [(0, "b")]), ""),
            ((0, []), (3, [(0, "a")]), ""),
        ],
    )
    def test_the_first_that_differs_is_named(self, mine: Any, theirs: Any, found: str) -> None:
        for here, there in ((mine, theirs), (theirs, mine)):
            text = first_difference(here, there, 7)
            assert found in text
            assert bool(text) == bool(found)


INSTALLED = """
def outer(call):
    return inner(call)

def inner(call):
    return call()
"""


def test_the_line_of_the_user_is_named_beyond_installed_packages(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "library.py"
    names: dict[str, Any] = {}
    exec(compile(INSTALLED, file, "exec"), names)
    frames = names["outer"](partial(stall_monitor._user_frame, threading.get_ident()))
    lines = [rf"{file}:{line} in {name}" for line, name in ((6, "inner"), (3, "outer"))]
    own = rf"{__file__}:\d+ in test_the_line_of_the_user_is_named_beyond_installed_packages"
    assert re.fullmatch(", called at ".join([*lines, own]), frames)


def wait_long() -> None:
    model = make_model()
    engine = fe.shard(model)
    with logged(patience_seconds=1.0) as lines:
        if dist.get_rank() == 1:
            do_something_else()
        model(torch.ones(2, 4)).sum().backward()
    assert engine.clip_grad_norm_(1.0) >= 0
    if dist.get_rank() == 0:
        assert len(lines) == 1, lines
        own = r"at \S*test_missing_ranks\.py:\d+ in wait_long"
        assert re.match(rf"rank 0 has waited 1 s for all-gather of .* {own}.*: rank 1 ", lines[0])
        assert "in do_something_else" in lines[0]


@pytest.mark.parametrize("in_thread", [False, True])
@on_ranks(2)
def test_a_wait_that_takes_long_is_logged_with_who_is_missing_and_goes_on(in_thread: bool) -> None:
    if not in_thread:
        wait_long()
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(wait_long).result()


STOPS = """
import os, signal, torch, fsdp_engine as fe
from torch import nn
import torch.distributed as dist

def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fe.shard(model, strategy="{level}")
    for step in range(4):
        if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
            {stop}
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()

main()
"""


def run_on_ranks(program: str, num_ranks: int = 2) -> tuple[list[str], list[str], list[int]]:
    """Returns the output, the errors and the exit code of ``program`` on each rank."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=200) for rank in ranks]
    printed, errors = map(list, zip(*said, strict=True))
    return printed, errors, [rank.returncode for rank in ranks]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("level", "stop", "ended"),
    [
        ("no_shard", "os.kill(os.getpid(), signal.SIGKILL)", "has ended (process "),
        ("optim_grads_params", "os._exit(1)", "has ended (process "),
        ("no_shard", "raise ValueError('bad')", "has ended with ValueError: bad; the last it beg"),
    ],
)
def test_the_others_say_at_once_which_rank_has_ended(
    level: str, stop: str, ended: str, num_ranks: int
) -> None:
    _, errors, codes = run_on_ranks(STOPS.format(level=level, stop=stop), num_ranks)
    assert codes[:-1] == [1] * (num_ranks - 1), errors
    text = errors[0]  # rank 0 has the store: the other ranks may lose it before they ask
    assert f"rank {num_ranks - 1} {ended}" in text, text
    assert "did not complete: another rank failed, or did not begin it: " in text
    assert "The last operation that completed here was " in text
    if level == "optim_grads_params":  # waits for a gather
        assert "numbers of batches, use engine.even_batches(loader). The cause can also be" in text


ENDS_AT_ONCE = """
import time, torch, fsdp_engine as fe
import torch.distributed as dist
from torch import nn
from fsdp_engine.extensions.stall_monitor import stall_monitor

dist.init_process_group("gloo")
fe.shard(nn.Linear(4, 4), initial_values="rank0")
leave = stall_monitor.StallMonitor._publish_end

def leave_slowly(self, why):
    time.sleep(1)
    leave(self, why)
    print("left word:", why)

stall_monitor.StallMonitor._publish_end = leave_slowly
dist.destroy_process_group()
while not stall_monitor._LATEST[0]._over.is_set():
    time.sleep(0.01)
"""


def test_the_interpreter_ends_after_the_watching_thread() -> None:
    printed, errors, codes = run_on_ranks(ENDS_AT_ONCE)
    assert printed[0] == "left word: has destroyed its process groups\n"
    assert codes == [0, 0], errors


class FakeEvent:
    reached, num_queries = False, 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.reached


def present_monitor() -> StallMonitor:
    monitor = activity.monitor()
    assert isinstance(monitor, StallMonitor)
    return monitor


def watched_lane(stream: Any) -> tuple[DeviceLane, SubmittedWork]:
    lane, work = DeviceLane(torch.device("cpu"), stream, [0, 1]), SubmittedWork()
    lane.recent = work.recent
    return lane, work


def test_work_on_a_stream_that_is_not_reached_in_time_is_told_once_by_its_label() -> None:
    lane, work = watched_lane(None)
    events = [FakeEvent() for _ in range(4)]
    assert work.stuck(lane, 0.0, 60.0) is None
    for number in range(3):
        lane.recent.append((f"gather {number}", events[number]))
        assert work.stuck(lane, 1.0 + number, 60.0) is None
    events[0].reached = True
    assert work.stuck(lane, 62.0, 60.0) is None
    assert not any(event.num_queries for event in events)
    assert work.stuck(lane, 64.0, 60.0) == "gather 1"
    assert work.stuck(lane, 200.0, 60.0) is None
    events[1].reached = events[2].reached = True
    lane.recent.append(("gather 3", events[3]))
    assert work.stuck(lane, 201.0, 60.0) is None
    assert work.stuck(lane, 262.0, 60.0) == "gather 3"


class Capturing:
    """A module as ``torch.cuda``, one of whose streams is captured into a graph."""

    def __init__(self, captured: str) -> None:
        self.captured: str | None = captured
        self.graph = SimpleNamespace(default_capture_stream="torch's")
        self._current: str | None = None

    def is_current_stream_capturing(self) -> bool:
        return self._current is not None and self._current == self.captured

    @contextmanager
    def stream(self, stream: str | None) -> Iterator[None]:
        before, self._current = self._current, stream or self._current
        yield
        self._current = before


@pytest.mark.parametrize("captured", ["torch's", "the lane's"])
def test_no_event_is_queried_while_a_graph_is_captured(
    captured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, before, within = Capturing(captured), FakeEvent(), FakeEvent()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    stream: Any = "the lane's"
    lane, work = watched_lane(stream)
    monkeypatch.setattr(lane, "_record", lambda captured: SimpleNamespace(event=within))
    lane.recent.append(("gather 0", before))
    if captured == "the lane's":
        with module.stream(stream):
            lane.submit("gather 1", lambda: iter(()))
    assert work.stuck(lane, 1.0, 60.0) is None
    assert work.stuck(lane, 100.0, 60.0) is None
    assert not before.num_queries
    module.captured = None
    assert work.stuck(lane, 200.0, 60.0) == "gather 0"
    # An event of the graph is never queried.
    assert not within.num_queries


@on_ranks(2)
def test_lanes_on_streams_that_are_stuck_are_logged_by_the_watching_thread() -> None:
    fe.shard(make_model())
    lane = DeviceLane(torch.device("cpu"), None, [0, 1])
    with logged(patience_seconds=0.5) as lines:
        if dist.get_rank() == 0:
            present_monitor().watch([lane])
            lane.recent.append(("gather of blocks.1", FakeEvent()))
        do_something_else()
    del lane
    if dist.get_rank() == 0:
        (line,) = lines
        assert re.search(r"gather of blocks\.1 at .* in do_something_else.*: rank 1 is at", line)
    else:
        assert not lines


class DoneJustAfter:
    """Work that completes right after a wait for it has timed out."""

    num_waits = 0

    def __init__(self, error: str = "") -> None:
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        self.num_waits += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return True


def test_work_that_ends_between_two_looks_is_no_error() -> None:
    work: Any = DoneJustAfter()
    stall_monitor.HostWork(work).wait()
    assert work.num_waits == 2
    with pytest.raises(RuntimeError, match="closed by peer"):
        stall_monitor.HostWork(DoneJustAfter("Connection closed by peer")).wait()  # type: ignore[arg-type]


@on_ranks(2)
def test_a_store_that_an_earlier_job_has_used_is_refused() -> None:
    left = {"n": 0, "is": ["node7 pid:[1]", 4242]}
    store = dist.PrefixStore("fsdp_engine/stall_monitor", _get_default_store())
    store.set(f"says/{dist.get_rank()}", json.dumps(left))
    with pytest.raises(
        RuntimeError,
        match=f"no earlier rank {dist.get_rank()} has used; found keys of process 4242 on "
        "node7. Where torchrun restarts workers, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    ):
        fe.shard(make_model())


@on_ranks(2)
def test_a_rank_that_saves_alone_logs_who_is_missing() -> None:
    checkpointer = fe.Checkpointer(shared_folder(), fe.shard(make_model()))
    with logged(patience_seconds=1.0) as lines:
        if dist.get_rank() == 1:
            do_something_else()
        checkpointer.save(1)
    if dist.get_rank() == 0:
        assert "rank 0 has waited 1 s for Checkpointer.save at " in lines[0]
        assert ": rank 1 is at " in lines[0]
        assert "in do_something_else" in lines[0]
    checkpointer.close()


def test_a_rank_that_waits_for_another_operation_is_named_with_its_line() -> None:
    state = {"n": 1, "waits": "all-gather of b", "failed": None, "at": "train.py:7 in evaluate"}
    described = stall_monitor._place_of("all-gather of a", 3, state, 1)
    assert described == "rank 3 waits for all-gather of b at train.py:7 in evaluate"
    assert stall_monitor._place_of("all-gather of b", 3, state, 1) is None


class CountingStore:
    def __init__(self, store: Any) -> None:
        self.num_questions = 0
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.num_questions += 1
        return getattr(self._store, name)


@on_ranks(2)
def test_a_rank_that_trains_asks_the_store_nothing() -> None:
    fe.shard(make_model())
    monitor = present_monitor()
    store: Any = CountingStore(monitor._store)
    monitor._store = store
    for number in range(200):
        if number == 100:
            store.num_questions = 0  # forget earlier questions
        activity.ACTIVITY.last = f"operation {number}"
        time.sleep(stall_monitor.PERIOD_SECONDS / 50)
    assert store.num_questions == 0
    deadline = time.monotonic() + 60
    while not store.num_questions and time.monotonic() < deadline:
        time.sleep(0.1)
    assert store.num_questions


class EndingStore:
    """A store that ends after it has returned the states of the other ranks."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, value: int) -> int:
        if key == "alarms" and value:
            raise dist.DistNetworkError("the store has ended")
        return int(self._store.add(key, value))

    def check(self, keys: list[str]) -> bool:
        if keys[0].startswith("forwards"):
            raise dist.DistNetworkError("the store has ended")
        return bool(self._store.check(keys))


def monitor_beside_one_that_left() -> StallMonitor | None:
    """The monitor of rank 0, once that of rank 1 has left its last message; None on rank 1."""
    activity.start_monitor()
    monitor = present_monitor()
    if dist.get_rank() == 1:
        monitor.end()
        is_told("left")
        do_something_else("over")
        return None
    do_something_else("left")
    return monitor


@on_ranks(2)
def test_a_diagnosis_is_kept_if_the_store_ends_after_it() -> None:
    if (monitor := monitor_beside_one_that_left()) is None:
        return
    store: Any = EndingStore(monitor._store)
    monitor._store = store
    assert "rank 1 has ended" in monitor.missing_at("all-gather of a", [0, 1])
    is_told("over")


@on_ranks(2)
def test_an_alarm_of_the_monitor_thread_ends_this_ranks_own_wait() -> None:
    if (monitor := monitor_beside_one_that_left()) is None:
        return
    with logged(patience_seconds=0.5) as lines:
        activity.ACTIVITY.waits = SimpleNamespace(label="all-gather of a", ranks=[0, 1])
        do_something_else()
        activity.ACTIVITY.waits = None
    assert "rank 1 has ended" in lines[0]
    assert monitor.has_alarm()
    # The rank's own wait has failed by now, so its own alarm must not end another wait.
    assert "rank 1 has ended" in monitor.missing_at("all-gather of a", [0, 1])
    assert not monitor.has_alarm()
    is_told("over")
