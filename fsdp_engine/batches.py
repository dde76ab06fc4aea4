"""Batches of ranks whose loaders end at different times.

[Note: One batch ahead]
Every rank reads a batch ahead of the one that it trains, and tells the others whether there was
one. The message is sent before a batch is trained and read after it, so no rank waits for it
longer than for the slowest rank's step. A rank that has run out trains its last batch once more,
with weight 0, until all have run out: collectives of the step find every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_message import HostMessage

T = TypeVar("T")

_WHAT = "even_batches()"


class _Loaded(NamedTuple):
    """What ranks read from their loaders: of this rank, or of any of them.

    Attributes:
        has: a batch was read.
        lacks: none was, since the loader has ended.
        failed: the loader has raised.
    """

    has: bool
    lacks: bool
    failed: bool


class _Reader:
    """Reads a loader.

    Attributes:
        state: what the last read found.
        batch: the last batch.
        error: of the loader, where it failed.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.state = _Loaded(has=True, lacks=False, failed=False)
        self.batch: Any = None
        self.error: Exception | None = None
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def read(self) -> None:
        """Read a batch, unless the loader has ended."""
        if not self.state.has:
            return
        try:
            if self._batches is None:
                self._batches = iter(self._loader)
            self.batch = next(self._batches)
        except StopIteration:
            self.state = _Loaded(has=False, lacks=True, failed=False)
        except Exception as error:  # the user's loader can raise any
            self.error = error
            self.state = _Loaded(has=False, lacks=False, failed=True)


def even_batches(
    ranks: Ranks,
    loader: Iterable[T],
    *,
    drop_last: bool = False,
    before_message: Callable[[], None] = lambda: None,
) -> Iterator[tuple[T, float]]:
    """See :meth:`fsdp_engine.engine.Engine.even_batches`."""
    reader, message = _Reader(loader), HostMessage(_WHAT, ranks)
    reader.read()
    before_message()
    message.start(bytearray(reader.state))
    is_first = True
    while True:
        before_message()
        found = _Loaded(*map(bool, message.finish()))
        if found.failed:
            agree(_WHAT, reader.error, ranks.control_group)
        if not found.has or (drop_last and found.lacks):
            return
        if is_first and found.lacks:
            agree(_WHAT, _no_batch(reader.state), ranks.control_group)
        batch, weight = reader.batch, float(reader.state.has)
        reader.read()
        message.start(bytearray(reader.state))
        yield batch, weight
        is_first = False


def _no_batch(state: _Loaded) -> Exception | None:
    if state.has:
        return None
    return ValueError(
        "loader: expected at least one batch on each rank, which it can repeat while others have "
        "more; found none on this one, and some on others. Give it one, or use drop_last=True"
    )
