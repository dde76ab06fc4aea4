"""How ranks meet before they have a group: who has come, who cannot go on, and who is missing.

A process group can only be made by ranks that all come to make it, and its name must be the same on
all of them. Names that torch makes depend on what else a rank has made, so ranks in different
numbers of groups would wait for each other under different names. Here ranks meet in the store of
the default group first. Every rank counts, in the store, how often it has come to meet *these*
ranks; that number names the meeting, and the meeting names what is made after it.

A meeting has one verdict, and the first one that is written holds for all of them:

    all have come                       go on
    a rank cannot go on                 all raise, with its number and error; it waits for nobody
    ranks came for different things     all raise, with both
    a rank waits elsewhere, for us      all raise: neither would ever come
    a rank waits in a later operation   all raise, and that rank, too
    somebody has waited too long        all raise, with the ranks that did not come, also these
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fsdp_engine.devices import watch

# How long ranks that are missing may take before somebody looks where they are, and at most between
# two looks.
FIRST_LOOK_SECONDS = 2.0
MOST_SECONDS_BETWEEN_LOOKS = 60.0
LONGEST_SLEEP_SECONDS = 0.1
_MOST_NAMED = 8

# What another rank's error becomes here, by name; any other a RuntimeError.
ERROR_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        ImportError,
        OSError,
        FileExistsError,
        FileNotFoundError,
        NotADirectoryError,
        PermissionError,
    )
}
_alone = itertools.count()
_log = logging.getLogger("fsdp_engine")


@dataclass(frozen=True)
class Meeting:
    """What came of a meeting.

    Attributes:
        name: the same on all its ranks, and no other meeting's.
        all_have: whether all came with ``has``.
    """

    name: str
    all_have: bool


class Precedence(Protocol):
    """A meeting that precedes operations: a rank that waits in one of them will not come."""

    def precedes(self, label: str) -> bool:
        """Whether it precedes an operation that another rank waits for."""
        ...

    def end_waits(self) -> None:
        """End waits in such operations, of all ranks: the meeting has failed."""
        ...


def error_of_another(what: str, who: str, kind: str, text: str) -> Exception:
    """What to raise for the error that another rank has: of its kind, if that is a known one."""
    return ERROR_KINDS.get(kind, RuntimeError)(f"{what} failed on {who}: {kind}: {text}")


def meet(
    what: str,
    ranks: Sequence[int],
    timeout: timedelta,
    *,
    note: str = "",
    has: bool = False,
    precedence: Precedence | None = None,
) -> Meeting:
    """Wait until all ``ranks`` have come. Collective over them.

    Args:
        what: what is to be done, for messages.
        ranks: global ranks, this one among them, in any order.
        timeout: how long to wait.
        note: must be the same on all of them.
        has: this rank has already what it came for.
        precedence: over operations that a rank which does not come may wait in. If the meeting
            fails, ranks that have not come get its error in place of that operation's result.

    Raises:
        RuntimeError: a rank did not come; names the ranks. Or its error, of the kinds that it has.
        ValueError: notes differ, or a rank waits in a later operation; on all ranks.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return Meeting(f"alone{next(_alone)}", has)
    watch.start()
    place = _Place(what, ranks, precedence)
    try:
        return place.wait_for_all(timeout, note, has)
    except (RuntimeError, ValueError) as error:
        if precedence is not None and (missing := place.missing()):
            watch.give_reason(missing, str(error))
            precedence.end_waits()
        raise


def say_no(what: str, ranks: Sequence[int], error: Exception) -> None:
    """Tell ``ranks``, which meet now or later, that this one cannot go on. Waits for nobody."""
    if len(ranks) > 1 and dist.get_rank() in ranks and dist.get_backend() != "fake":
        text = [what, f"rank {dist.get_rank()}", type(error).__name__, str(error)]
        _Place(what, ranks).decide("error", text)


@contextmanager
def telling(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """An error within it is told to ``ranks``, who will meet after it; then it is raised here."""
    try:
        yield
    except Exception as error:
        say_no(what, ranks, error)
        raise


class _Place:
    """One meeting as this rank sees it; making one counts as having come.

    In the store: of every set of ranks, how often each of them has come; of each meeting, how many
    have come, how many of them have it, the first note, the verdict; of each rank, where it waits.
    """

    def __init__(
        self,
        what: str,
        ranks: Sequence[int],
        precedence: Precedence | None = None,
    ) -> None:
        self._precedence = precedence
        self._waits: dict[int, str] = {}  # what ranks waited for at the last look
        self._store = dist.PrefixStore("fsdp_engine/meetings", _get_default_store())
        self._rank = dist.get_rank()
        self._what = what
        self._ranks = sorted(ranks)
        self._crowd = hashlib.sha256(str(self._ranks).encode()).hexdigest()[:20]
        self._number = self._times_come(self._crowd, self._rank, 1)
        self._base = f"{self._crowd}.{self._number}"

    def wait_for_all(self, timeout: timedelta, note: str, has: bool) -> Meeting:
        """See :func:`meet`."""
        here = json.dumps([self._what, self._ranks, self._crowd, self._number])
        watch.NOW.last = self._what
        self._store.set(f"at/{self._rank}", here)
        mine = json.dumps([self._rank, note])
        first = self._store.compare_set(f"{self._base}/note", "", mine).decode()
        if json.loads(first)[1] != note:
            other, found = json.loads(first)
            self.decide(
                "differs",
                f"{self._what}: expected the same on all ranks; found on rank {other} [{found}] "
                f"and on rank {self._rank} [{note}]",
            )
        if has:
            self._store.add(f"{self._base}/have", 1)
        if self._store.add(f"{self._base}/came", 1) == len(self._ranks):
            self.decide("go on", self._store.add(f"{self._base}/have", 0) == len(self._ranks))
            self._forget_the_one_before()
        kind, content = self._wait_for_verdict(timeout, note)
        self._store.set(f"at/{self._rank}", "null")
        if kind == "error":
            raise error_of_another(*content)
        if kind in ("differs", "later"):
            raise ValueError(content)
        if kind == "elsewhere":
            content, meetings = content
            for crowd, number, ranks in meetings:
                if self._rank in ranks and self._times_come(crowd, self._rank, 0) < number:
                    self._times_come(crowd, self._rank, 1)  # it will not come to that one either
        if kind in ("missing", "elsewhere"):
            raise RuntimeError(content)
        return Meeting(self._base, content)

    def decide(self, kind: str, content: object) -> None:
        """Write the verdict, if there is none."""
        self._store.compare_set(f"{self._base}/verdict", "", json.dumps([kind, content]))

    def _wait_for_verdict(self, timeout: timedelta, note: str) -> tuple[str, Any]:
        key = f"{self._base}/verdict"
        began = time.monotonic()
        next_look, next_line = FIRST_LOOK_SECONDS, watch.PATIENCE_SECONDS
        # The store can wait, too, but says so on stderr, and nobody else can use it meanwhile.
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                self.decide("missing", self._who_is_missing(waited))
            elif waited > next_line:
                next_line *= 10
                _log.error("%s. Waiting on", self._who_is_missing(waited))
            elif waited > next_look:
                next_look += min(next_look, MOST_SECONDS_BETWEEN_LOOKS)
                self._look_for_others_elsewhere()
                self._look_for_others_in_later_operations(note)
            else:
                time.sleep(min(waited / 8, LONGEST_SLEEP_SECONDS))
        kind, content = json.loads(self._store.get(key))
        return kind, content

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [
            rank for rank in self._ranks if self._times_come(self._crowd, rank, 0) < self._number
        ]

    def _times_come(self, crowd: str, rank: int, more: int) -> int:
        return self._store.add(f"{crowd}/{rank}", more)

    def _waits_at(self, rank: int) -> tuple[str, list[int], str, int] | None:
        """What ``rank`` has come for, with which ranks, and that meeting's crowd and number."""
        key = f"at/{rank}"
        found = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return None if found is None else tuple(found)

    def _look_for_others_elsewhere(self) -> None:
        """A rank that waits for this one in another meeting will not come to ours."""
        for rank in self.missing()[:_MOST_NAMED]:
            there = self._waits_at(rank)
            if there is None or self._rank not in there[1]:
                continue
            what, ranks, crowd, number = there
            verdict = f"{crowd}.{number}/verdict"
            waits = self._times_come(crowd, self._rank, 0) < number
            if waits and not self._store.check([verdict]):
                text = (
                    f"expected all ranks to do the same; found rank {self._rank} in {self._what} "
                    f"over ranks {_shown(self._ranks)}, where it waits for rank {rank}, and rank "
                    f"{rank} in {what} over ranks {_shown(ranks)}, where it waits for rank "
                    f"{self._rank}"
                )
                both = [[self._crowd, self._number, self._ranks], [crowd, number, ranks]]
                self.decide("elsewhere", [text, both])
                same = json.dumps(["elsewhere", [text, both]])
                self._store.compare_set(verdict, "", same)

    def _look_for_others_in_later_operations(self, note: str) -> None:
        """A rank that waits in an operation that comes after this meeting will not come. It has to
        be seen there twice: what is over on this rank may take a moment longer on another."""
        precedence = self._precedence
        if precedence is None:
            return
        before, self._waits = self._waits, watch.waits_of(self.missing())
        for rank, label in self._waits.items():
            if before.get(rank) == label and precedence.precedes(label):
                self.decide(
                    "later",
                    f"{self._what}: expected the same on all ranks; found on rank {self._rank} "
                    f"[{note}] and on rank {rank} none: it waits for {label}",
                )
                return

    def _who_is_missing(self, seconds: float) -> str:
        missing = self.missing()
        where = watch.who_is_missing(self._what, missing)
        return (
            f"{self._what}: expected ranks {_shown(self._ranks)}; ranks {_shown(missing)} did not "
            f"come in {seconds:.0f} s{where and ': '}{where}"
        )

    def _forget_the_one_before(self) -> None:
        # All have come to this one, so nobody reads that one any more.
        for key in ("note", "have", "came", "verdict"):
            self._store.delete_key(f"{self._crowd}.{self._number - 1}/{key}")


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) <= 2 * _MOST_NAMED:
        return str(list(ranks))
    return f"{str(list(ranks[:_MOST_NAMED]))[:-1]}, ... {len(ranks)} in all]"
