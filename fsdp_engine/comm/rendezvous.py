"""Rendezvous of ranks in the store of the default group, before they have a group of their own.

A process group is created by all of its ranks together, under one name. Names that torch generates
depend on the other groups of a rank, so ranks in different numbers of groups would wait for each
other under different names. The engine's ranks therefore meet first in the store of the default
group. The store counts, for each rank, its rendezvous with the same set of ranks. This number names
the rendezvous, and the rendezvous names the groups that are created after it.

A rendezvous has one verdict. The first verdict that is written is valid on all ranks:

    all ranks have arrived                      all continue
    a rank reports an error                     all raise the error; that rank does not wait
    ranks have different notes                  all raise, with both notes
    two ranks wait in different rendezvous      the ranks of both raise
    a rank waits in a later operation           all raise, including that rank
    the timeout has expired                     all raise, also the missing ranks, which are named
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fsdp_engine.comm import activity
from fsdp_engine.comm.activity import ACTIVITY, missing_ranks, monitor, start_monitor
from fsdp_engine.memory import allocator

# Time until the first check of where missing ranks wait, the longest time between two checks, and
# the longest time between two reads of the verdict.
FIRST_CHECK_SECONDS = 2.0
MOST_SECONDS_BETWEEN_CHECKS = 60.0
LONGEST_SLEEP_SECONDS = 0.1
# A tag that no message has.
_NO_TAG = 2**30
_MOST_NAMED = 8

# Types of errors that are raised with the same type on other ranks. Other errors of a rank are
# raised as RuntimeError there.
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
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        name: A unique name, which is the same on all ranks.
        all_have: Whether ``has`` was True on all ranks.
    """

    name: str
    all_have: bool


def error_of_another(what: str, who: str, kind: str, text: str) -> Exception:
    """Returns the exception for an error of another rank.

    It has the type of the error, if this is in ``ERROR_KINDS``; else it is a RuntimeError.
    """
    return ERROR_KINDS.get(kind, RuntimeError)(f"{what} failed on {who}: {kind}: {text}")


def meet(
    what: str,
    ranks: Sequence[int],
    timeout: timedelta,
    *,
    note: str = "",
    has: bool = False,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Rendezvous:
    """Wait until all ``ranks`` have arrived. Collective over them.

    Args:
        what: Name of the operation, for error messages.
        ranks: Global ranks in any order, this rank included.
        timeout: Maximum time to wait.
        note: A text that must be the same on all ranks.
        has: Whether this rank already has the object that the rendezvous is for.
        groups: Groups that are used after the rendezvous. Their earlier collectives must be
            complete, so a rank that keeps waiting in one of these groups has skipped the
            rendezvous. The rendezvous then fails, and the connections of gloo groups are closed,
            so that the waiting rank raises an error with the same text.

    Raises:
        RuntimeError: A rank did not arrive, and the message names the ranks; or a rank has reported
            an error, which is raised as in :func:`error_of_another`.
        ValueError: Notes differ, or a rank waits in a later operation. Raised on all ranks.
    """
    if len(ranks) == 1 or dist.get_backend() == "fake":
        return Rendezvous(f"alone{next(_alone)}", has)
    start_monitor()
    place = _Place(what, ranks, checks_waits=bool(groups))
    try:
        return place.wait_for_all(timeout, note, has)
    except (RuntimeError, ValueError) as error:
        if groups and (missing := place.missing()):
            monitor().give_reason(missing, str(error))
            for group in groups:
                _close_connections(group)
        raise


def _close_connections(group: dist.ProcessGroup) -> None:
    """Close this rank's connections of a gloo group, so that waits in it raise on all its ranks.

    The group cannot be used afterwards. gloo closes its connections after any timeout, so a receive
    with a short timeout is enough.
    """
    with suppress(RuntimeError):  # the timeout, or a group of another backend
        probe, other = allocator.empty(1, torch.uint8, "cpu"), (group.rank() + 1) % group.size()
        group.recv([probe], other, _NO_TAG).wait(timedelta(milliseconds=1))


def report_error(what: str, ranks: Sequence[int], error: Exception) -> None:
    """Make the next rendezvous of ``ranks`` fail with this rank's error, without waiting."""
    if len(ranks) > 1 and dist.get_rank() in ranks and dist.get_backend() != "fake":
        text = [what, f"rank {dist.get_rank()}", type(error).__name__, str(error)]
        _Place(what, ranks).decide("error", text)


@contextmanager
def reporting(what: str, ranks: Sequence[int]) -> Iterator[None]:
    """Context whose errors are reported to ``ranks`` and raised. The ranks meet after it."""
    try:
        yield
    except Exception as error:
        report_error(what, ranks, error)
        raise


class _Place:
    """One rendezvous on this rank. Creating this object counts as the arrival of this rank.

    The store contains, for each set of ranks, the number of arrivals of each rank; for each
    rendezvous, the number of ranks that have arrived, the number of these with ``has``, the first
    note, and the verdict; and for each rank, the rendezvous in which it waits.
    """

    def __init__(self, what: str, ranks: Sequence[int], *, checks_waits: bool = False) -> None:
        self._checks_waits = checks_waits
        self._waits: dict[int, str] = {}  # operations in which ranks waited at the last check
        self._store = dist.PrefixStore("fsdp_engine/rendezvous", _get_default_store())
        self._rank = dist.get_rank()
        self._what = what
        self._ranks = sorted(ranks)
        self._crowd = hashlib.sha256(str(self._ranks).encode()).hexdigest()[:20]
        self._number = self._count_arrivals(self._crowd, self._rank, 1)
        self._base = f"{self._crowd}.{self._number}"

    def wait_for_all(self, timeout: timedelta, note: str, has: bool) -> Rendezvous:
        """See :func:`meet`."""
        here = json.dumps([self._what, self._ranks, self._crowd, self._number])
        ACTIVITY.last = self._what
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
            self.decide("continue", self._store.add(f"{self._base}/have", 0) == len(self._ranks))
            self._delete_previous()
        kind, content = self._wait_for_verdict(timeout, note)
        self._store.set(f"at/{self._rank}", "null")
        if kind == "error":
            raise error_of_another(*content)
        if kind in ("differs", "later"):
            raise ValueError(content)
        if kind == "elsewhere":
            content, both = content
            for crowd, number, ranks in both:
                if self._rank in ranks and self._count_arrivals(crowd, self._rank, 0) < number:
                    # This rank counts as arrived in the other rendezvous, which has failed, too.
                    self._count_arrivals(crowd, self._rank, 1)
        if kind in ("missing", "elsewhere"):
            raise RuntimeError(content)
        return Rendezvous(self._base, content)

    def decide(self, kind: str, content: object) -> None:
        """Write the verdict, unless there is one."""
        self._store.compare_set(f"{self._base}/verdict", "", json.dumps([kind, content]))

    def _wait_for_verdict(self, timeout: timedelta, note: str) -> tuple[str, Any]:
        key = f"{self._base}/verdict"
        began = time.monotonic()
        next_check, next_line = FIRST_CHECK_SECONDS, activity.PATIENCE_SECONDS
        # The store is polled because its own wait logs to stderr and blocks other threads' calls.
        while not self._store.check([key]):
            waited = time.monotonic() - began
            if waited > timeout.total_seconds():
                self.decide("missing", self._missing_after(waited))
            elif waited > next_line:
                next_line *= 10
                text = self._missing_after(waited)
                if monitor().any_is_over(self.missing()):  # such a rank will not arrive
                    self.decide("missing", text)
                else:
                    advice = activity.advice_on_calls(self._what)
                    _log.error("%s. This rank keeps waiting. %s", text, advice)
            elif waited > next_check:
                next_check += min(next_check, MOST_SECONDS_BETWEEN_CHECKS)
                self._check_other_rendezvous()
                if self._checks_waits:
                    self._check_later_operations(note)
            else:
                time.sleep(min(waited / 8, LONGEST_SLEEP_SECONDS))
        kind, content = json.loads(self._store.get(key))
        return kind, content

    def missing(self) -> list[int]:
        """Returns the ranks that have not arrived."""
        return [
            rank
            for rank in self._ranks
            if self._count_arrivals(self._crowd, rank, 0) < self._number
        ]

    def _count_arrivals(self, crowd: str, rank: int, more: int) -> int:
        return self._store.add(f"{crowd}/{rank}", more)

    def _waits_at(self, rank: int) -> tuple[str, list[int], str, int] | None:
        """Returns the rendezvous in which ``rank`` waits: operation, ranks, digest, number."""
        key = f"at/{rank}"
        found = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return None if found is None else tuple(found)

    def _check_other_rendezvous(self) -> None:
        """Fail if a missing rank waits for this rank in another rendezvous, which is a deadlock."""
        for rank in self.missing()[:_MOST_NAMED]:
            there = self._waits_at(rank)
            if there is None or self._rank not in there[1]:
                continue
            what, ranks, crowd, number = there
            verdict = f"{crowd}.{number}/verdict"
            waits = self._count_arrivals(crowd, self._rank, 0) < number
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

    def _check_later_operations(self, note: str) -> None:
        """Fail if a missing rank waits in a collective that follows this rendezvous.

        The rank must be in the same operation at two checks, because a collective that is complete
        on this rank may take longer on another one.
        """
        before, self._waits = self._waits, monitor().waits_of(self.missing())
        for rank, label in self._waits.items():
            if before.get(rank) == label:
                self.decide(
                    "later",
                    f"{self._what}: expected on all ranks; found on rank {self._rank} [{note}] and "
                    f"not on rank {rank}, which waits for {label}",
                )
                return

    def _missing_after(self, seconds: float) -> str:
        missing = self.missing()
        where = missing_ranks(self._what, missing)
        return (
            f"{self._what}: expected ranks {_shown(self._ranks)}; ranks {_shown(missing)} did not "
            f"call within {seconds:.0f} s{where and ': '}{where}"
        )

    def _delete_previous(self) -> None:
        # All ranks have arrived at this rendezvous, so none reads the keys of the previous one.
        for key in ("note", "have", "came", "verdict"):
            self._store.delete_key(f"{self._crowd}.{self._number - 1}/{key}")


def _shown(ranks: Sequence[int]) -> str:
    if len(ranks) <= 2 * _MOST_NAMED:
        return str(list(ranks))
    return f"{str(list(ranks[:_MOST_NAMED]))[:-1]}, ... {len(ranks)} in all]"
