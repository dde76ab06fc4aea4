"""Batches of ranks whose loaders end at different times.

[Note: One batch ahead]
Every rank reads a batch ahead of the one that it trains, and sends whether there was one. The
message is sent before a batch is trained and read after it, so no rank waits for it longer than for
the slowest rank's step. A rank that has run out trains its last batch once more, with weight 0,
until all have run out: collectives of the step find every rank. A rank whose loader has no batch at
all is sent the first one of another rank.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.serialization import default_restore_location

from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.engine import Engine

T = TypeVar("T")

_WHAT = "even_batches()"


class EvenBatch(NamedTuple, Generic[T]):
    """A batch of a rank, in a step that all ranks take.

    Attributes:
        batch: The batch of this rank's loader, or of another rank's if it has none.
        is_repeated: this rank has run out, and others have not.
        num_ranks: ranks that have not.
    """

    batch: T
    is_repeated: bool
    num_ranks: int


class _Loaded(NamedTuple):
    """What ranks read from their loaders.

    Attributes:
        has: a batch was read; by rank.
        lacks: a loader has ended.
        failed: a loader has raised.
    """

    has: list[bool]
    lacks: bool
    failed: bool


class _Reader:
    """Reads a loader.

    Attributes:
        has_batch: the last read found one.
        batch: the last one.
        error: The error of the loader, where it failed.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.has_batch = True
        self.batch: Any = None
        self.error: Exception | None = None
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def read(self) -> None:
        """Read a batch, unless the loader has ended."""
        if not self.has_batch:
            return
        try:
            if self._batches is None:
                self._batches = iter(self._loader)
            self.batch = next(self._batches)
        except StopIteration:
            self.has_batch = False
        except Exception as error:  # the user's loader can raise any
            self.has_batch, self.error = False, error

    def message(self, rank: int, num_ranks: int) -> bytearray:
        """What :func:`_read_message` reads, after the maximum over ranks."""
        content = bytearray(num_ranks + 2)
        content[rank] = self.has_batch
        content[-2] = not self.has_batch and self.error is None
        content[-1] = self.error is not None
        return content


def _read_message(content: list[int]) -> _Loaded:
    *has, lacks, failed = map(bool, content)
    return _Loaded(has, lacks, failed)


def even_batches(
    engine: Engine, loader: Iterable[T], *, drop_last: bool = False
) -> Iterator[tuple[T, float]]:
    """Iterate over batches, on all ranks as often as on the rank that has most. Collective.

    A rank that has run out repeats its last batch with weight 0; one that has none at all gets
    a copy of another rank's first. Each rank reads one batch ahead, so that whether there is
    another one is known without waiting. Weight 0 takes a batch out of the loss alone: modules
    that update buffers in training (BatchNorm's running statistics) see it once more. Use
    ``drop_last=True`` with them, or ``eval()`` where the weight is 0.

    Example: a mean that is exact whatever the batches' sizes::

        for batch, weight in engine.even_batches(loader):
            loss, count = loss_sum_of(model, batch)
            engine.mean_loss(weight * loss, weight * count).backward()

    Args:
        engine: The engine of the model.
        loader: The loader of this rank; it can have another number of batches on each rank, or
            none.
        drop_last: end with the rank that has fewest instead; no batch is repeated.

    Yields:
        (batch, weight): weight is 1.0, or 0.0 for a batch that is repeated.

    Raises:
        Exception: on all ranks, after the batches before it: a rank's loader raised.
        ValueError: on all ranks: a rank has no batch, and ``torch.save`` refuses another's.
    """
    for each in even_steps(engine, loader, drop_last=drop_last):
        yield each.batch, float(not each.is_repeated)


def even_steps(
    engine: Engine, loader: Iterable[T], *, drop_last: bool = False
) -> Iterator[EvenBatch[T]]:
    """As :func:`even_batches`, for loops that need to know how many ranks have a batch.

    Args:
        engine, loader, drop_last: see :func:`even_batches`.

    Yields:
        The batch, whether it is repeated, and the number of ranks whose batch is not.

    Raises:
        Exception, ValueError: see :func:`even_batches`.
    """
    ranks, before_message = engine.ranks, engine.await_ranks
    reader, message = _Reader(loader), HostMessage(_WHAT, ranks)
    reader.read()
    before_message()
    message.start(reader.message(ranks.rank, ranks.size))
    is_first = True
    while True:
        before_message()
        found = _read_message(message.finish())
        if found.failed:
            agree(_WHAT, reader.error, ranks.control_group)
        if not any(found.has) or (drop_last and found.lacks):
            return
        if is_first and found.lacks:
            _share_first(reader, ranks, source=found.has.index(True))
        even = EvenBatch(reader.batch, not reader.has_batch, sum(found.has))
        reader.read()
        message.start(reader.message(ranks.rank, ranks.size))
        yield even
        is_first = False


def _share_first(reader: _Reader, ranks: Ranks, source: int) -> None:
    """Give the batch of rank ``source`` to ranks that have none. Collective.

    Raises:
        ValueError: it does not pickle; on all ranks.
    """
    content, error = b"", None
    if ranks.rank == source:
        file = io.BytesIO()
        try:
            torch.save(reader.batch, file)
            content = file.getvalue()
        except Exception as caught:  # objects of the user's raise any
            error = ValueError(
                "loader: expected at least one batch on each rank, or batches that torch.save "
                "takes, of which ranks without one are sent a copy; found a rank without one, and "
                f"a batch of type {type(reader.batch).__name__}: {caught}"
            )
    contents = agree(_WHAT, error, ranks.control_group, content)
    if not reader.has_batch:
        file = io.BytesIO(contents[source])
        reader.batch = torch.load(
            file,
            map_location=lambda storage, location: default_restore_location(
                storage, "cpu" if location == "cpu" else str(ranks.device)
            ),
            weights_only=False,
        )
