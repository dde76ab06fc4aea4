"""Batches of ranks whose loaders end at different times.

[Note: One batch ahead]
Every rank reads a batch ahead of the one that it trains, and tells the others whether there was
one. The message is sent before a batch is trained and read after it, so no rank waits for it
longer than for the slowest rank's step. A rank that has run out trains its last batch once more,
with weight 0, until all have run out: collectives of the step find every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.distributed import Work

from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.collectives import start_all_reduce
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.lanes import SideStream
from fsdp_engine.comm.stall_monitor import naming
from fsdp_engine.memory.host_memory import bytes_to

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


class _Exchange:
    """Exchanges what ranks have read; one message is in flight at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._group = ranks.message_group
        self._device = ranks.device
        self._stream = SideStream(ranks.device)
        self._sent: Tensor | None = None
        self._work: Work | None = None

    def start(self, mine: _Loaded) -> None:
        """Send what this rank has read."""
        if self._group is not None:
            with self._stream.entered():
                self._sent = bytes_to(bytearray(mine), self._device)
                self._work = start_all_reduce(self._sent, self._group, "max")

    def finish(self, mine: _Loaded) -> _Loaded:
        """Returns which of the three any rank has read; ``mine`` was sent."""
        if self._group is None:
            return mine
        assert self._sent is not None
        assert self._work is not None
        with naming(_WHAT, self._group), self._stream.entered():
            self._work.wait()
            found = self._sent.tolist()
        self._sent = self._work = None
        return _Loaded(*map(bool, found))


class _Reader(Generic[T]):
    """Reads a loader.

    Attributes:
        state: what the last read found.
        batch: the last batch.
        error: of the loader, where it failed.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.state = _Loaded(has=True, lacks=False, failed=False)
        self.batch: Any = None
        self.error: Exception | None = None
        self._loader = loader
        self._batches: Iterator[T] | None = None

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
    ranks: Ranks, loader: Iterable[T], *, drop_last: bool = False
) -> Iterator[tuple[T, float]]:
    """See :meth:`fsdp_engine.engine.Engine.even_batches`."""
    reader, exchange = _Reader(loader), _Exchange(ranks)
    reader.read()
    exchange.start(reader.state)
    is_first = True
    while True:
        found = exchange.finish(reader.state)
        if found.failed:
            agree(_WHAT, reader.error, ranks.control_group)
        if not found.has or (drop_last and found.lacks):
            return
        if is_first and found.lacks:
            agree(_WHAT, _no_batch(reader.state), ranks.control_group)
        batch, weight = reader.batch, float(reader.state.has)
        reader.read()
        exchange.start(reader.state)
        yield batch, weight
        is_first = False


def _no_batch(state: _Loaded) -> Exception | None:
    if state.has:
        return None
    return ValueError(
        "loader: expected at least one batch on each rank, which it can repeat while others have "
        "more; found none on this one, and some on others. Give it one, or use drop_last=True"
    )
