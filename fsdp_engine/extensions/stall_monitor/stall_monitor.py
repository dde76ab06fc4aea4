"""Monitor that finds missing ranks when a wait fails, from the activity of every rank.

[Note: Missing ranks]
A rank that is stuck, in a wait or in the user's code, cannot report it; a process that has ended
reports nothing. So lanes record their activity (``ACTIVITY``: a few attributes, without
communication). If it has not changed for half a second, a thread of the process checks the store of
the default group every half second for requests of other ranks; a rank that trains sends nothing.
In large jobs it checks less often, so that all ranks together check at most 500 times a second.

A rank whose wait has failed sends a request: it increments a number in the store, and every thread
answers with the activity of its rank. A rank that does not answer has ended, cannot be reached, or
still trains. If its process is on the same machine, its end is detected at once. A rank that ends
normally leaves a last message.

A rank that raises while others wait for it can leave them a reason (``give_reason``): their waits
then fail with that error.

Each rank records the lines that begin its forwards. If another rank began one of them at another
line, the error names both lines. If only one rank runs a forward, it is often matched with a later
forward of the other ranks, and the first wait that fails is then far from the cause.

The same thread logs waits of the host, and operations on a device's stream, that take longer than
``activity.PATIENCE_SECONDS``, with the missing ranks. This is long before the timeout of the
process group, which on NCCL ends the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import operator
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fsdp_engine.callers import is_installed, own_frame, user_frame
from fsdp_engine.comm import activity
from fsdp_engine.comm.activity import ACTIVITY, Monitor
from fsdp_engine.comm.host_threads import machine

THREAD_NAME = "fsdp_engine stall monitor"
PERIOD_SECONDS = 0.5
# Maximum number of checks of the store per second by all ranks together.
MOST_CHECKS_PER_SECOND = 500
# A thread answers within a period, unless other code holds the interpreter.
ANSWER_SECONDS = 3.0
# Number of recent submissions of a lane that are kept to find the one that is stuck.
_MOST_RECENT = 256
# Number of recent runs of forwards from one line that are kept to find the first difference between
# ranks.
_MOST_RUNS = 64
_SLICE = timedelta(seconds=1)
_MOST_NAMED = 8
_log = logging.getLogger("fsdp_engine")


class HostWork:
    """A collective of the host that communicates between neighbours.

    If a rank ends, only its neighbours detect it at once. Others would wait for the timeout, so
    they check once a second whether a rank has raised the alarm.
    """

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait until the collective is done.

        Raises:
            RuntimeError: The collective or another rank has failed.
        """
        while True:
            try:
                self._work.wait(_SLICE)
                return
            except RuntimeError:
                if self._work.is_completed():
                    # It has failed, or has completed after the wait: return or raise its result.
                    self._work.wait()
                    return
            monitor = activity.monitor()
            if isinstance(monitor, StallMonitor) and monitor.has_alarm():
                raise RuntimeError("another rank has failed")


class SubmittedWork:
    """The recent operations that a lane on a stream has submitted, the latest last.

    If a device is stuck, the host soon stops submitting. So no events are queried while work is
    submitted, and none while a graph is captured.
    """

    def __init__(self) -> None:
        self.recent: deque[tuple[str, Any]] = deque(maxlen=_MOST_RECENT)
        self._newest: tuple[str, Any] | None = None  # the newest operation at the last call
        self._newest_since = 0.0

    def stuck(self, lane: Any, now: float, patience: float) -> str | None:
        """Returns the label of the oldest unfinished operation of ``lane`` if no operation was
        submitted for ``patience`` seconds; None otherwise, and after the first report."""
        newest = self.recent[-1] if self.recent else None
        if newest is not self._newest:
            self._newest, self._newest_since = newest, now
        elif newest is not None and now - self._newest_since > patience:
            if lane.is_captured():
                return None
            self._newest_since = float("inf")
            unreached = [label for label, event in list(self.recent) if not event.query()]
            return unreached[0] if unreached else None
        return None


class ForwardLines:
    """The user's lines that begin the forwards of this rank, the latest last.

    Consecutive forwards from one line are one run, so that a loop of any length is one entry.

    Attributes:
        num_forwards: The number of forwards that have begun.
    """

    def __init__(self) -> None:
        self.num_forwards = 0
        self._runs: deque[_Run] = deque(maxlen=_MOST_RUNS)

    def append(self, frame: FrameType | None) -> None:
        """Record a forward that the code of ``frame`` begins."""
        if frame is None:
            return
        code, line = frame.f_code, frame.f_lineno
        last = self._runs[-1] if self._runs else None
        if last is None or last.line != line or last.code is not code:
            self._runs.append(_Run(self.num_forwards, code, line))
        self.num_forwards += 1

    def as_json(self) -> str:
        """Returns a :data:`_Lines` of this rank as JSON."""
        num_forwards = self.num_forwards
        # The training thread may append to the deque, which must not be iterated in Python.
        runs = list(self._runs)
        return json.dumps([num_forwards, [(run.first, run.place) for run in runs]])


class _Run(NamedTuple):
    """Consecutive forwards from one line."""

    first: int  # number of the first of them
    code: CodeType
    line: int

    @property
    def place(self) -> str:
        return _place(self.code, self.line)


def _shortened(error: BaseException) -> str:
    """Returns the start of an error message. For a failed wait, returns only the operation that did
    not complete: the rest of the message describes the ranks that read this text."""
    text, waits, _ = str(error).partition(f" {activity.ANOTHER_FAILED}")
    return f"{text} did not complete" if waits else shorten(text, 240, placeholder=" ...")


_LATEST: list[StallMonitor] = []


@atexit.register
def _end() -> None:
    for each in _LATEST:
        each.end()


class StallMonitor(Monitor):
    """The monitor thread for the current default group, and its requests to other ranks.

    Attributes:
        lanes: Lanes whose work the host does not wait for, with their submitted operations.
        forwards: The lines that begin this rank's forwards.
    """

    def __init__(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._group = weakref.ref(group)
        self._rank = group.rank()
        self._size = group.size()
        # Use a separate connection: other threads may block on the default one.
        store = _get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore("fsdp_engine/stall_monitor", store)
        self._identity = [machine(), os.getpid()]
        self._check_store()
        # Id of the training thread, which under Ray Train is not the main thread.
        self._training_thread = threading.get_ident()
        self._answered = 0
        self._alarms = 0  # number of alarms that this rank has seen
        self.lanes: weakref.WeakKeyDictionary[Any, SubmittedWork] = weakref.WeakKeyDictionary()
        self.forwards = ForwardLines()
        self._before: tuple[object, ...] = (None, None, None)
        self._next_check = 0.0
        self._seen: Any = None
        self._seen_at = 0.0
        self._publish({"n": 0})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        _LATEST[:] = [self]

    def _check_store(self) -> None:
        """Check that no earlier job has used the store, since groups would find the addresses of
        processes that have ended.

        Raises:
            RuntimeError: An earlier process with this rank has used the store.
        """
        key = f"says/{self._rank}"
        was = json.loads(self._store.get(key))["is"] if self._store.check([key]) else None
        if was not in (None, self._identity):
            raise RuntimeError(
                f"store of the default group: expected one that no earlier rank {self._rank} has "
                f"used; found keys of process {was[1]} on {was[0].split()[0]}. Where "
                "torchrun restarts workers, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
                "environment"
            )

    @property
    def is_present(self) -> bool:
        """Whether the monitor's default group is the current one."""
        return not self._over.is_set() and self._group() is dist.group.WORLD

    def end(self) -> None:
        """Publish a last message, if none was published, and end the thread. It must end before the
        interpreter: a thread within a call of the store would abort the process."""
        if not self._over.is_set():
            error = getattr(sys, "last_value", None)
            why = "" if error is None else f" with {type(error).__name__}: {_shortened(error)}"
            self._over.set()
            self._publish_end(f"has ended{why}")
        self._thread.join(ANSWER_SECONDS)

    def begin_forward(self) -> None:
        """See the base class."""
        self.forwards.append(user_frame(sys._getframe(1)))

    def watch(self, lanes: Sequence[Any]) -> None:
        """See the base class."""
        for lane in lanes:
            submitted = self.lanes[lane] = SubmittedWork()
            lane.recent = submitted.recent

    def host_work(self, work: dist.Work) -> HostWork:
        """See the base class."""
        return HostWork(work)

    def missing_at(self, what: str, ranks: Sequence[int]) -> str:
        """See the base class. Takes up to a few seconds."""
        others = [rank for rank in ranks or range(self._size) if rank != self._rank]
        try:
            number, found, silent = self._answers(others)
        except RuntimeError as error:
            return f"the store, which rank 0 or the launcher keeps, does not answer ({error})"
        texts = [
            (rank in silent, rank, text)
            for rank, state in found.items()
            if (text := _place_of(what, rank, state, number)) is not None
        ]
        if any(map(_is_over, found.values())):
            self._raise_alarm()
        texts.sort(key=lambda each: ("ended" not in each[2], each[0], each[1]))
        shown = "; ".join(text for _, _, text in texts[:_MOST_NAMED])
        more = len(texts) - _MOST_NAMED
        shown += f"; and {more} more ranks" if more > 0 else ""
        return shown + self._other_forwards([rank for _, rank, _ in texts[:_MOST_NAMED]])

    def _raise_alarm(self) -> None:
        with suppress(RuntimeError):  # The store has ended with its rank.
            alarms = self._store.add("alarms", 1)
            # An alarm of the monitor thread is also for this rank, whose training thread waits.
            if threading.current_thread() is not self._thread:
                self._alarms = alarms

    def _other_forwards(self, ranks: Sequence[int]) -> str:
        """Returns a text with the first forward that one of ``ranks`` began at another line than
        this rank; "" if there is none."""
        mine = self.forwards.as_json()
        with suppress(RuntimeError):  # The store has ended with its rank.
            for rank in ranks:
                key = _forwards_key(rank)
                if self._store.check([key]):
                    theirs = json.loads(self._store.get(key))
                    if text := first_difference(json.loads(mine), theirs, rank):
                        return f". {text}"
        return ""

    def waits_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """See the base class. Takes up to a few seconds."""
        number, found, _ = self._answers(ranks)
        return {
            rank: state["waits"]
            for rank, state in found.items()
            if not _is_over(state) and state["n"] >= number and state["waits"] is not None
        }

    def any_is_over(self, ranks: Sequence[int]) -> bool:
        """See the base class."""
        return any(map(_is_over, self._read(ranks).values()))

    def give_reason(self, ranks: Sequence[int], text: str) -> None:
        """See the base class."""
        for rank in ranks:
            self._store.set(f"reason/{rank}", text)

    def reason(self) -> str | None:
        """See the base class."""
        key = f"reason/{self._rank}"
        with suppress(RuntimeError):  # The store has ended with its rank.
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None

    def _answers(self, ranks: Sequence[int]) -> tuple[int, dict[int, dict[str, Any]], list[int]]:
        """Request states from ``ranks``. Returns the number of the request, the latest state of
        each rank, and the ranks that have not answered in time."""
        number = self._store.add("asked", 1)
        # All ranks may send requests at once: a thousand of them must not overload the store.
        pause = max(0.1, len(ranks) / MOST_CHECKS_PER_SECOND)
        deadline = time.monotonic() + max(ANSWER_SECONDS, 3 * pause)
        while True:
            self._answer()
            found = self._read(ranks)
            silent = [
                rank for rank, state in found.items() if not _is_over(state) and state["n"] < number
            ]
            if not silent or time.monotonic() > deadline:
                return number, found, silent
            time.sleep(pause)

    def has_alarm(self) -> bool:
        """Returns whether some rank has detected the end of another rank since the last call, or
        has left this rank a reason to fail."""
        before, self._alarms = self._alarms, self._store.add("alarms", 0)
        return self._alarms > before or self.reason() is not None

    def _read(self, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        keys = [f"says/{rank}" for rank in ranks]
        if keys and self._store.check(keys):
            return {
                rank: json.loads(text)
                for rank, text in zip(ranks, self._store.multi_get(keys), strict=True)
            }
        found = {}
        for rank, key in zip(ranks, keys, strict=True):
            text = self._store.get(key) if self._store.check([key]) else '{"n": -1}'
            found[rank] = json.loads(text)
        return found

    def _run(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            if self._group() is not dist.group.WORLD:
                self._over.set()
                self._publish_end("has destroyed its process groups")
                return
            if self._is_still():
                try:
                    self._answer()
                except RuntimeError:
                    return  # The store has ended, so no rank can send requests.
            self._log_stalls()

    def _is_still(self) -> bool:
        """Returns whether this rank's activity is unchanged and a check of the store is due."""
        before, self._before = self._before, (ACTIVITY.last, ACTIVITY.done, ACTIVITY.waits)
        now = time.monotonic()
        if now < self._next_check or any(map(operator.is_not, before, self._before)):
            return False
        self._next_check = now + self._size / MOST_CHECKS_PER_SECOND
        return True

    def _answer(self) -> None:
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            waits = ACTIVITY.waits
            self._store.set(_forwards_key(self._rank), self.forwards.as_json())
            self._publish(
                {
                    "n": asked,
                    "last": ACTIVITY.last,
                    "waits": waits.label if waits is not None else None,
                    "failed": ACTIVITY.failed,
                    "at": _user_frame(self._training_thread),
                }
            )

    def _publish(self, state: dict[str, Any]) -> None:
        state["is"] = self._identity
        self._store.set(f"says/{self._rank}", json.dumps(state))

    def _publish_end(self, why: str) -> None:
        with suppress(RuntimeError):
            self._publish({"gone": why, "last": ACTIVITY.last})

    def _log_stalls(self) -> None:
        """Log each operation that takes too long, once for each operation."""
        now, waits = time.monotonic(), ACTIVITY.waits
        if waits is not self._seen:
            self._seen, self._seen_at = waits, now
        elif waits is not None and now - self._seen_at > activity.PATIENCE_SECONDS:
            self._seen_at = float("inf")
            self._log_stall(waits.label, waits.ranks)
        for lane, submitted in list(self.lanes.items()):
            if (label := submitted.stuck(lane, now, activity.PATIENCE_SECONDS)) is not None:
                self._log_stall(label, lane.ranks)

    def _log_stall(self, label: str, ranks: Sequence[int]) -> None:
        missing = self.missing_at(label, ranks)
        _log.error(
            "rank %d has waited %.0f s for %s at %s: %s",
            self._rank,
            activity.PATIENCE_SECONDS,
            label,
            _user_frame(self._training_thread),
            f"{missing}. {activity.advice_on_calls(label)}"
            if missing
            else "all ranks have reached it",
        )


def _place_of(what: str, rank: int, state: dict[str, Any], number: int) -> str | None:
    """Returns a description of where ``rank`` is; None if it is at ``what``, as expected."""
    after = f"; the last it began was {state['last']}" if "last" in state else ""
    if "gone" in state:
        return f"rank {rank} {state['gone']}{after}"
    if state["n"] < number:
        if state["n"] < 0:
            return f"rank {rank} has not called the engine yet"
        process = f"process {state['is'][1]} on {state['is'][0].split()[0]}"
        if _has_ended(state):
            return f"rank {rank} has ended ({process} is gone)"
        return (
            f"rank {rank} does not answer ({process}): it has ended, is stopped, cannot be "
            "reached, or is still training"
        )
    if what in (state["waits"], state["failed"]):
        return None
    if state["waits"] is not None:
        return f"rank {rank} waits for {state['waits']} at {state['at']}"
    return f"rank {rank} is at {state['at']}{after}"


def _user_frame(thread: int) -> str:
    """Returns the place of a thread outside of this package and torch: the innermost two frames,
    such as a model's forward and the loop that called it. If both are in installed packages, the
    innermost frame of the user's own code follows."""
    innermost = sys._current_frames().get(thread)
    frame = user_frame(innermost) or innermost
    if frame is None:
        return "its end"
    frames = [frame]
    if (caller := user_frame(frame.f_back)) is not None:
        frames.append(caller)
    if all(is_installed(each.f_code.co_filename) for each in frames):
        frames += filter(None, [own_frame(frames[-1])])
    return ", called at ".join(map(_line_of, frames))


def first_difference(mine: _Lines, theirs: _Lines, rank: int) -> str:
    """Returns a text with the first forward that two ranks began at different lines.

    The text is "" if no such forward is known: each rank stores only its latest runs.

    Args:
        mine: This rank's number of forwards, and for each run the number of its first forward and
            its place.
        theirs: The same of the other rank.
        rank: The other rank.
    """
    (num_mine, runs), (num_theirs, others) = mine, theirs
    begin = max(runs[0][0], others[0][0]) if runs and others else 0
    for number in sorted({first for first, _ in (*runs, *others)} | {begin}):
        if begin <= number < min(num_mine, num_theirs):
            here, there = _place_at(number, runs), _place_at(number, others)
            if here != there:
                earlier = " or earlier" if number == begin > 0 else ""
                return (
                    f"The ranks began forward {number + 1}{earlier} at different lines: rank "
                    f"{rank} at {there}, this rank at {here}"
                )
    return ""


# The number of forwards, and for each run the number of its first forward and its place.
_Lines = tuple[int, list[tuple[int, str]]]


def _place_at(number: int, runs: list[tuple[int, str]]) -> str:
    return max(run for run in runs if run[0] <= number)[1]


def _forwards_key(rank: int) -> str:
    return f"forwards/{rank}"


def _line_of(frame: FrameType) -> str:
    return _place(frame.f_code, frame.f_lineno)


def _place(code: CodeType, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}"


def _is_over(state: dict[str, Any]) -> bool:
    """Returns whether the rank is known to have ended or to have destroyed its process groups."""
    return "gone" in state or _has_ended(state)


def _has_ended(state: dict[str, Any]) -> bool:
    """Returns whether the process is known to have ended."""
    if state["n"] < 0 or state["is"][0] != machine() or not Path("/proc/self/stat").exists():
        return False
    try:
        status = Path(f"/proc/{state['is'][1]}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"  # states of ended processes
