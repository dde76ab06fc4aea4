"""What every rank is doing, told when somebody asks: where a wait fails, who is missing.

[Note: Who is missing]
A rank that is stuck, in a wait or in its user's code, cannot say so itself; one whose process has
ended says nothing at all. So lanes write down what they do (``NOW``: a few attributes, nothing is
sent). Where that has not changed for half a second, a thread in the process looks every half second
into the store of the default group whether anybody has asked: a rank that trains sends nothing. In
large jobs it looks less often, so that all ranks together look 500 times a second at most.

Somebody asks where a wait has failed: it raises a number in the store, every thread answers with
what its rank does, and who does not answer has ended (which is certain, and known at once, for a
process on the same machine) or is out of reach. A rank that ends in order leaves word.

A rank that raises while others wait for it may leave them a reason (``give_reason``): their waits
then fail with that, and not with a guess at who is missing.

The same thread sees what takes too long: a wait of the host, or work on a CUDA stream, that is not
over after ``PATIENCE_SECONDS`` is logged with who is missing, long before a process group's own
timeout, which on NCCL ends the process.
"""

from __future__ import annotations

import atexit
import json
import logging
import operator
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PERIOD_SECONDS = 0.5
# How often all ranks together look into the store at most.
MOST_LOOKS_PER_SECOND = 500
# A thread answers within a period, unless something holds the interpreter.
ANSWER_SECONDS = 3.0
# When a wait is so long that it is logged. Groups have timeouts of 10 (NCCL) or 30 minutes (gloo).
PATIENCE_SECONDS = float(os.environ.get("FSDP_ENGINE_PATIENCE_SECONDS", "60"))
_SLICE = timedelta(seconds=1)
_MOST_NAMED = 8
_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(dist.__file__).parents[1]))
_log = logging.getLogger("fsdp_engine")


class Labelled(Protocol):
    """One operation, a new object each time."""

    @property
    def label(self) -> str:
        """Its unit and what is done."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks that it is about; none: all."""
        ...


class Now:
    """What this rank does now. Written at every operation, read only when somebody asks.

    Attributes:
        last: label of the operation that was begun last.
        done: label of the operation that was seen to end last.
        waits: what the host is waiting for.
        failed: label of the operation that failed last.
        alarms: how many ranks' ends were heard of.
    """

    __slots__ = ("alarms", "done", "failed", "last", "waits")

    def __init__(self) -> None:
        self.alarms = 0
        self.last = self.done = self.failed = "nothing"
        self.waits: Labelled | None = None


NOW = Now()


class Small:
    """A small collective outside lanes."""

    __slots__ = ("_group", "label")

    def __init__(self, label: str, group: dist.ProcessGroup) -> None:
        self.label = label
        self._group = group

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks."""
        return dist.get_process_group_ranks(self._group)


class HostWork:
    """A collective of the host that goes from neighbour to neighbour.

    Where a rank ends, its neighbours see it at once. The others would wait for the timeout: they
    look once a second whether a neighbour has raised the alarm.
    """

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            RuntimeError: it failed, or a rank has ended meanwhile, or left a reason to fail.
        """
        while True:
            try:
                self._work.wait(_SLICE)
                return
            except RuntimeError:
                if self._work.is_completed():
                    # It has failed, or was done just after this look at it: it says which.
                    self._work.wait()
                    return
            latest = _num_alarms()
            if latest > NOW.alarms:
                NOW.alarms = latest
                raise RuntimeError("a rank has ended")
            if _reason() is not None:
                raise RuntimeError("another rank has raised")


class Slow(Protocol):
    """A lane whose work the host does not wait for. ``ranks``: global, those that it is about."""

    ranks: Sequence[int]

    def stuck(self, now: float, patience: float) -> str | None:
        """Label of the oldest work that is not reached, once it has not been for ``patience``
        seconds; told once. Called now and then, by the watching thread."""
        ...


# Lanes to look after.
SLOW: weakref.WeakSet[Slow] = weakref.WeakSet()


class _Watcher:
    """The thread, and what it shares with those who ask. One for each default group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self._rank = group.rank()
        self._size = group.size()
        # A connection of its own: others may block on the default one.
        self._store = dist.PrefixStore("fsdp_engine/watch", _get_default_store().clone())  # type: ignore[attr-defined]
        self._identity = [_machine(), os.getpid()]
        self._check_that_store_is_new()
        # The one that trains; Ray Train's is not the main one.
        self._trains = threading.get_ident()
        self._answered = 0
        self._did: tuple[object, ...] = (None, None, None)
        self._next_look = 0.0
        self._seen: Labelled | None = None
        self._seen_at = 0.0
        self._say({"n": 0})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fsdp_engine watch", daemon=True)
        self._thread.start()

    def _check_that_store_is_new(self) -> None:
        """Nothing made in a store that an earlier job has used could be trusted: groups would look
        for each other at addresses of processes that have ended.

        Raises:
            RuntimeError: a process that was this rank before has used it.
        """
        key = f"says/{self._rank}"
        was = json.loads(self._store.get(key))["is"] if self._store.check([key]) else None
        if was not in (None, self._identity):
            raise RuntimeError(
                f"store of the default group: expected one that no earlier rank {self._rank} has "
                f"used; found what process {was[1]} on {was[0].split()[0]} has left. Where "
                "torchrun restarts workers, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
                "environment"
            )

    @property
    def serves(self) -> bool:
        """Whether its default group is the present one."""
        return not self._over.is_set() and self._group() is dist.group.WORLD

    def end(self, why: str) -> None:
        """Leave word, unless that is done, and be gone before the interpreter is: a thread that is
        still in a call of the store would abort the process."""
        if not self._over.is_set():
            self._over.set()
            self._leave_word(why)
        self._thread.join(ANSWER_SECONDS)

    def ask(self, what: str, ranks: Sequence[int]) -> str:
        """Who of ``ranks`` is not at ``what``, and where they are; "" if nobody can be asked."""
        others = [rank for rank in ranks if rank != self._rank]
        try:
            number, found, silent = self._answers(others)
        except RuntimeError as error:
            return f"the store, which rank 0 or the launcher keeps, does not answer ({error})"
        texts = [
            (rank in silent, rank, text)
            for rank, state in found.items()
            if (text := _told(what, rank, state, number)) is not None
        ]
        if any("gone" in state or _has_ended(state) for state in found.values()):
            self._store.add("alarms", 1)
            NOW.alarms = max(NOW.alarms, self.num_alarms())
        texts.sort(key=lambda each: ("ended" not in each[2], each[0], each[1]))
        shown = "; ".join(text for _, _, text in texts[:_MOST_NAMED])
        more = len(texts) - _MOST_NAMED
        return shown + (f"; and {more} more ranks" if more > 0 else "")

    def waits_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """The label of the operation that each rank's host waits for, of those that wait."""
        number, found, _ = self._answers(ranks)
        return {
            rank: state["waits"]
            for rank, state in found.items()
            if state["n"] >= number and state.get("waits") is not None
        }

    def give_reason(self, ranks: Sequence[int], text: str) -> None:
        """See :func:`give_reason`."""
        for rank in ranks:
            if rank != self._rank:
                self._store.set(f"reason/{rank}", text)

    def reason(self) -> str | None:
        """The text that another rank has left for this one; None: there is none."""
        key = f"reason/{self._rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _answers(self, ranks: Sequence[int]) -> tuple[int, dict[int, dict[str, Any]], list[int]]:
        """Ask ``ranks``: the number of the question, the latest state of each rank, and the ranks
        that have not answered in time."""
        number = self._store.add("asked", 1)
        # Ranks ask together: a thousand of them must not ask the store too often.
        pause = max(0.1, len(ranks) / MOST_LOOKS_PER_SECOND)
        deadline = time.monotonic() + max(ANSWER_SECONDS, 3 * pause)
        while True:
            self._answer()
            found = self._read(ranks)
            silent = [
                rank
                for rank, state in found.items()
                if "gone" not in state and state["n"] < number and not _has_ended(state)
            ]
            if not silent or time.monotonic() > deadline:
                return number, found, silent
            time.sleep(pause)

    def num_alarms(self) -> int:
        """How often a rank has found that another one has ended."""
        return self._store.add("alarms", 0)

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
                self._leave_word("has destroyed its process groups")
                return
            if self._is_still() and not self._try(self._answer):
                return  # the store is gone, and with it whoever could ask
            self._look_for_slow()

    def _is_still(self) -> bool:
        """Whether this rank does nothing new, and it is time to look into the store again."""
        before, self._did = self._did, (NOW.last, NOW.done, NOW.waits)
        now = time.monotonic()
        if now < self._next_look or any(map(operator.is_not, before, self._did)):
            return False
        self._next_look = now + self._size / MOST_LOOKS_PER_SECOND
        return True

    def _answer(self) -> None:
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            waits = NOW.waits
            self._say(
                {
                    "n": asked,
                    "last": NOW.last,
                    "waits": waits.label if waits is not None else None,
                    "failed": NOW.failed,
                    "at": _where(self._trains),
                }
            )

    def _say(self, state: dict[str, Any]) -> None:
        state["is"] = self._identity
        self._store.set(f"says/{self._rank}", json.dumps(state))

    def _leave_word(self, why: str) -> None:
        self._try(lambda: self._say({"gone": why, "last": NOW.last}))

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except RuntimeError:
            return False
        return True

    def _look_for_slow(self) -> None:
        """Log what has not been over for too long, once."""
        now, waits = time.monotonic(), NOW.waits
        if waits is not self._seen:
            self._seen, self._seen_at = waits, now
        elif waits is not None and now - self._seen_at > PATIENCE_SECONDS:
            self._seen_at = float("inf")
            self._log_slow(waits.label, waits.ranks)
        for lane in list(SLOW):
            if (label := lane.stuck(now, PATIENCE_SECONDS)) is not None:
                self._log_slow(label, lane.ranks)

    def _log_slow(self, label: str, ranks: Sequence[int]) -> None:
        missing = self.ask(label, ranks or range(self._size))
        _log.error(
            "rank %d has waited %.0f s for %s: %s",
            self._rank,
            PATIENCE_SECONDS,
            label,
            missing or "all ranks have come to it",
        )


_WATCHERS: list[_Watcher] = []


def start() -> None:
    """Watch this process, if nobody does. For ranks that share a store, more than one."""
    if _serving() is not None:
        return
    group = dist.group.WORLD
    assert group is not None
    if not _WATCHERS:
        atexit.register(_leave)
    _WATCHERS[:] = [_Watcher(group)]
    NOW.__init__()  # type: ignore[misc]


def _leave() -> None:
    error = getattr(sys, "last_value", None)
    why = "" if error is None else f" with {type(error).__name__}: {str(error)[:200]}"
    for watcher in _WATCHERS:
        watcher.end(f"has ended{why}")


def _serving() -> _Watcher | None:
    """The watcher of the present default group; None: it has none."""
    return _WATCHERS[0] if _WATCHERS and _WATCHERS[0].serves else None


def _num_alarms() -> int:
    watcher = _serving()
    return 0 if watcher is None else watcher.num_alarms()


def _reason() -> str | None:
    watcher = _serving()
    return None if watcher is None else watcher.reason()


def give_reason(ranks: Sequence[int], text: str) -> None:
    """Leave ``ranks`` a reason: a wait of theirs that fails raises a ValueError with ``text``."""
    if (watcher := _serving()) is not None:
        watcher.give_reason(ranks, text)


def waits_of(ranks: Sequence[int]) -> dict[int, str]:
    """By rank, the label of the operation that its host waits for, of those of ``ranks`` that wait.
    Takes up to some seconds."""
    watcher = _serving()
    return {} if watcher is None else watcher.waits_of(ranks)


def who_is_missing(what: str, ranks: Sequence[int] = ()) -> str:
    """Who has not come to ``what``, as far as they can be asked; takes up to some seconds.

    Args:
        what: the label of what has failed; ranks that wait for it, or failed in it, are there.
        ranks: global ranks; none: all.
    """
    NOW.failed = what
    watcher = _serving()
    return "" if watcher is None else watcher.ask(what, ranks or range(dist.get_world_size()))


def failure(what: str, ranks: Sequence[int], error: BaseException) -> Exception:
    """The exception for an operation whose wait has failed with ``error``."""
    try:
        reason = _reason()
    except RuntimeError:  # the store has gone with its rank
        reason = None
    if reason is not None:
        NOW.failed = what
        return ValueError(f"{what} did not complete: {reason}")
    missing = who_is_missing(what, ranks)
    return RuntimeError(
        f"{what} did not complete: another rank failed, or never came to it"
        f"{missing and ': '}{missing}. The last that did complete here was {NOW.done}. ({error})"
    )


@contextmanager
def naming(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """A small collective of ``group``; its error says what it was and who is missing."""
    NOW.last = what
    NOW.waits = small = Small(what, group)
    try:
        yield
    except RuntimeError as error:
        raise failure(what, small.ranks, error) from error
    finally:
        NOW.waits = None
    NOW.done = what


def _told(what: str, rank: int, state: dict[str, Any], number: int) -> str | None:
    """Where ``rank`` is; None: at ``what``, as it should be."""
    after = f"; the last it began was {state['last']}" if "last" in state else ""
    if "gone" in state:
        return f"rank {rank} {state['gone']}{after}"
    if state["n"] < number:
        if state["n"] < 0:
            return f"rank {rank} has not come to the engine yet"
        process = f"process {state['is'][1]} on {state['is'][0].split()[0]}"
        if _has_ended(state):
            return f"rank {rank} has ended ({process} is gone)"
        return (
            f"rank {rank} does not answer ({process}): it has ended, is stopped, out of reach, or "
            "trains on"
        )
    if what in (state["waits"], state["failed"]):
        return None
    if state["waits"] is not None:
        return f"rank {rank} waits for {state['waits']}"
    return f"rank {rank} is at {state['at']}{after}"


def _where(thread: int) -> str:
    """Where a thread is: the innermost place that is the user's."""
    frame = sys._current_frames().get(thread)
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "its end"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"


def _machine() -> str:
    """Where process numbers mean the same."""
    space = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(space) if space.is_symlink() else ''}"


def _has_ended(state: dict[str, Any]) -> bool:
    """Whether the process is gone for certain."""
    if state["n"] < 0 or state["is"][0] != _machine() or not Path("/proc/self/stat").exists():
        return False
    try:
        status = Path(f"/proc/{state['is'][1]}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"  # dead, and its parent has not looked yet
