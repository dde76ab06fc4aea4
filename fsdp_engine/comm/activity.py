"""The activity of this rank, and errors for operations that do not complete.

Lanes and collectives of the host record their operations in ``ACTIVITY`` (a few attributes, without
communication), so that an error can name the operation that failed and the last one that completed.
A :class:`Monitor` is a seam: an extension has a monitor that also observes other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp_engine.extension_list import advice_for

# Waits that take longer are logged. Groups have timeouts of 10 (NCCL) or 30 minutes (gloo).
PATIENCE_SECONDS = float(os.environ.get("FSDP_ENGINE_PATIENCE_SECONDS", "60"))


# The text after the name of the operation in the error of a failed wait.
ANOTHER_FAILED = "did not complete: another rank failed"


class RankActivity:
    """The activity of this rank, which is written at every operation.

    Attributes:
        last: Label of the operation that started last.
        done: Label of the operation whose end the host observed last.
        waits: The operation that the host waits for, or None. It has a ``label`` and ``ranks``, the
            global ranks that take part (empty: all). It is a new object for each operation.
        failed: Label of the operation that failed last.
    """

    __slots__ = ("done", "failed", "last", "waits")

    def __init__(self) -> None:
        self.last = self.done = self.failed = "nothing"
        self.waits: Any = None


ACTIVITY = RankActivity()


class GroupCollective(NamedTuple):
    """A small collective that the host runs outside of lanes."""

    label: str
    group: dist.ProcessGroup

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of the group."""
        return dist.get_process_group_ranks(self.group)


class Monitor:
    """Observes the activity of other ranks. This class observes nothing; subclasses do."""

    @property
    def is_present(self) -> bool:
        """Whether the monitor belongs to the current default group."""
        return False

    def begin_forward(self) -> None:
        """Record the line of the user's code that begins a forward pass."""

    def watch(self, lanes: Sequence[Any]) -> None:
        """Observe the submissions to these device lanes, by replacing ``recent`` of each lane."""

    def host_work(self, work: dist.Work) -> Any:
        """Returns an object whose ``wait()`` waits for ``work``, a collective of the host."""
        return work

    def missing_at(self, what: str, ranks: Sequence[int]) -> str:
        """Returns a text with the ranks that have not reached operation ``what``.

        The text has the current operation of each of these ranks.
        """
        return ""

    def waits_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the label of the operation that the host of a rank waits for, by rank.

        Ranks that wait for no operation are left out.
        """
        return {}

    def any_is_over(self, ranks: Sequence[int]) -> bool:
        """Returns whether one of ``ranks`` is known to have ended or to have destroyed its process
        groups, so that it will not reach any operation."""
        return False

    def give_reason(self, ranks: Sequence[int], text: str) -> None:
        """Publish ``text`` to ``ranks``. When a wait fails there, the rank raises a ValueError with
        this text."""

    def reason(self) -> str | None:
        """Returns the text that another rank has published for this rank, if any."""
        return None


_PLAIN = Monitor()
_MONITORS: list[Monitor] = []
_MAKERS: list[Callable[[], Monitor]] = []


def monitor_by(maker: Callable[[], Monitor]) -> None:
    """Register the function that makes monitors. A monitor needs a store that the ranks share."""
    _MAKERS[:] = [maker]


def start_monitor() -> None:
    """Make a monitor of the current default group, unless there is one.

    The ranks must share a store.
    """
    if not monitor().is_present:
        for make in _MAKERS:
            _MONITORS[:] = [make()]
        ACTIVITY.__init__()  # type: ignore[misc]


def monitor() -> Monitor:
    """Returns the monitor of the current default group."""
    return _MONITORS[0] if _MONITORS and _MONITORS[0].is_present else _PLAIN


def missing_ranks(what: str, ranks: Sequence[int] = ()) -> str:
    """Returns a text with the ranks that have not reached ``what``. Takes up to some seconds.

    The text has the current operation of each of these ranks. It is "" without a monitor of other
    ranks.

    Args:
        what: Label of the operation that has failed. Ranks that wait for it, or failed in it, are
            not missing.
        ranks: The global ranks that take part. Empty: all.
    """
    ACTIVITY.failed = what
    return monitor().missing_at(what, ranks)


def failure(what: str, ranks: Sequence[int], error: BaseException) -> Exception:
    """Returns the exception to raise when the wait for operation ``what`` fails with ``error``."""
    if (reason := monitor().reason()) is not None:
        ACTIVITY.failed = what
        return ValueError(f"{what} did not complete: {reason}")
    missing = missing_ranks(what, ranks)
    return RuntimeError(
        f"{what} {ANOTHER_FAILED}, or did not begin it"
        f"{missing and ': '}{missing}. The last operation that completed here was {ACTIVITY.done}. "
        f"{advice_on_calls(what)} ({error})"
    )


def advice_on_calls(what: str) -> str:
    """Returns advice for an operation that some ranks have not reached."""
    advice = advice_for(what)
    return (
        "All ranks must make the same calls, including evaluation, saving and gradient norms"
        f"{advice and '; '}{advice}. The cause can also be an earlier call that some ranks have "
        "skipped."
    )


@contextmanager
def naming(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Context of a small collective of ``group``. Errors name the operation and missing ranks."""
    ACTIVITY.last = what
    ACTIVITY.waits = small = GroupCollective(what, group)
    try:
        yield
    except RuntimeError as error:
        raise failure(what, small.ranks, error) from error
    finally:
        ACTIVITY.waits = None
    ACTIVITY.done = what
