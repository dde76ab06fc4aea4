"""The activity of this rank, and the errors of operations whose wait has failed.

Lanes and collectives of the host write their operations down (``ACTIVITY``: a few attributes,
nothing is sent), so that the error of a wait can name its operation and the last one that
completed. A :class:`Monitor` is a seam: an extension has one that knows other ranks, too.
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


class RankActivity:
    """The activity of this rank. Written at every operation, read only on request.

    Attributes:
        last: label of the operation that was begun last.
        done: label of the operation that was seen to end last.
        waits: the operation that the host waits for, a new object each time: its ``label``, and
            ``ranks``, the global ranks that take part (empty: all).
        failed: label of the operation that failed last.
    """

    __slots__ = ("done", "failed", "last", "waits")

    def __init__(self) -> None:
        self.last = self.done = self.failed = "nothing"
        self.waits: Any = None


ACTIVITY = RankActivity()


class GroupCollective(NamedTuple):
    """A small collective outside lanes."""

    label: str
    group: dist.ProcessGroup

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks."""
        return dist.get_process_group_ranks(self.group)


class Monitor:
    """Knows the activity of other ranks. This one knows nothing; a subclass may."""

    @property
    def is_present(self) -> bool:
        """Whether it is of the present default group."""
        return False

    def watch(self, lanes: Sequence[Any]) -> None:
        """Note what these lanes of streams have submitted, by giving each another ``recent``."""

    def host_work(self, work: dist.Work) -> Any:
        """Returns an object with the ``wait()`` of ``work``, a collective of the host."""
        return work

    def missing_at(self, what: str, ranks: Sequence[int]) -> str:
        """Returns those of ``ranks`` that are not at ``what``, each with its place."""
        return ""

    def waits_of(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the label of the operation that its host waits for, by rank, of those of
        ``ranks`` that wait."""
        return {}

    def give_reason(self, ranks: Sequence[int], text: str) -> None:
        """Leave ``ranks`` a reason: if a wait of theirs fails, it raises a ValueError with
        ``text``."""

    def reason(self) -> str | None:
        """Returns the reason that another rank has left for this one, if any."""
        return None


_PLAIN = Monitor()
_MONITORS: list[Monitor] = []
_MAKERS: list[Callable[[], Monitor]] = []


def monitor_by(maker: Callable[[], Monitor]) -> None:
    """Register what makes a monitor of the present default group, whose ranks share a store."""
    _MAKERS[:] = [maker]


def start_monitor() -> None:
    """Make a monitor of the present default group, unless there is one. Ranks must share a
    store."""
    if not monitor().is_present:
        for make in _MAKERS:
            _MONITORS[:] = [make()]
        ACTIVITY.__init__()  # type: ignore[misc]


def monitor() -> Monitor:
    """Returns the monitor of the present default group."""
    return _MONITORS[0] if _MONITORS and _MONITORS[0].is_present else _PLAIN


def missing_ranks(what: str, ranks: Sequence[int] = ()) -> str:
    """Ranks that have not come to ``what``, each with its place; "" where none can be asked. Takes
    up to some seconds.

    Args:
        what: the label of the operation that has failed; ranks that wait for it, or failed in it,
            are not missing.
        ranks: global ranks; none: all.
    """
    ACTIVITY.failed = what
    return monitor().missing_at(what, ranks)


def failure(what: str, ranks: Sequence[int], error: BaseException) -> Exception:
    """The exception for an operation whose wait has failed with ``error``."""
    if (reason := monitor().reason()) is not None:
        ACTIVITY.failed = what
        return ValueError(f"{what} did not complete: {reason}")
    missing, advice = missing_ranks(what, ranks), advice_for(what)
    return RuntimeError(
        f"{what} did not complete: another rank failed, or never came to it"
        f"{missing and ': '}{missing}. The last that did complete here was {ACTIVITY.done}. "
        f"{advice}{advice and ' '}({error})"
    )


@contextmanager
def naming(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Within it, a small collective of ``group``; its error names it and the missing ranks."""
    ACTIVITY.last = what
    ACTIVITY.waits = small = GroupCollective(what, group)
    try:
        yield
    except RuntimeError as error:
        raise failure(what, small.ranks, error) from error
    finally:
        ACTIVITY.waits = None
    ACTIVITY.done = what
