"""Batches of ranks whose loaders have different lengths.

[Note: One batch ahead]
Every rank reads one batch ahead of the batch that it trains, and sends whether there was one. The
message is sent before a batch is trained and read afterwards, so it adds no wait beyond that for
the slowest rank's step. A rank whose loader has ended trains its last batch again with weight 0
until all loaders have ended, because the collectives of a step need every rank. A rank whose loader
has no batch at all receives the first batch of another rank.
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
    """A batch of one rank, in a step that all ranks run.

    Attributes:
        batch: The batch of this rank's loader, or of another rank's loader if this one is empty.
        is_repeated: Whether this rank's loader has ended while another one has not.
        num_ranks: Number of ranks whose loader has not ended.
    """

    batch: T
    is_repeated: bool
    num_ranks: int


class _Loaded(NamedTuple):
    """Results of reading one batch from the loader of each rank.

    Attributes:
        has: For each rank, whether it read a batch.
        lacks: Whether the loader of any rank has ended.
        failed: Whether the loader of any rank raised an exception.
    """

    has: list[bool]
    lacks: bool
    failed: bool


class _Reader:
    """Reads batches from a loader.

    Attributes:
        has_batch: Whether the last read returned a batch.
        batch: The last batch.
        error: The exception of the loader, if it raised one.
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
        except Exception as error:  # The loader of the user can raise any exception.
            self.has_batch, self.error = False, error

    def message(self, rank: int, num_ranks: int) -> bytearray:
        """Returns this rank's message. :func:`_read_message` reads its maximum over ranks."""
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
    """Iterate over batches, with as many on every rank as the longest loader has. Collective.

    A rank whose loader has ended repeats its last batch with weight 0. A rank whose loader is empty
    gets a copy of another rank's first batch. Each rank reads one batch ahead, so that the exchange
    of whether there is another batch overlaps with training. Weight 0 removes a batch only from the
    loss: modules that update buffers in training (BatchNorm's running statistics) process it again.
    With such modules use ``drop_last=True``, or call ``eval()`` when the weight is 0.

    Example: an exact mean for batches of any sizes::

        for batch, weight in engine.even_batches(loader):
            loss, count = loss_sum_of(model, batch)
            engine.mean_loss(weight * loss, weight * count).backward()

    Args:
        engine: The engine of the model.
        loader: The loader of this rank. The number of batches may differ between ranks and may
            be 0.
        drop_last: End when the shortest loader ends; no batch is repeated.

    Yields:
        The batch and its weight: 1.0, or 0.0 for a repeated batch.

    Raises:
        Exception: The loader of a rank raised an exception. Raised on all ranks, after the batches
            before it.
        ValueError: A loader is empty, and another rank's batch cannot be saved with ``torch.save``
            or cannot be loaded on this rank. Raised on all ranks.
    """
    for each in even_steps(engine, loader, drop_last=drop_last):
        yield each.batch, float(not each.is_repeated)


def even_steps(
    engine: Engine, loader: Iterable[T], *, drop_last: bool = False
) -> Iterator[EvenBatch[T]]:
    """Iterate like ``even_batches``, also yielding how many ranks have a batch.

    Args:
        engine, loader, drop_last: See ``even_batches``.

    Yields:
        The batch, whether it is repeated, and the number of ranks whose batch is not repeated.

    Raises:
        Exception, ValueError: See ``even_batches``.
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
    """Send the batch of rank ``source`` to the ranks that have none. Collective.

    Raises:
        ValueError: ``torch.save`` cannot save the batch, or a rank cannot load it. Raised on all
            ranks.
    """
    content, error = b"", None
    if ranks.rank == source:
        file = io.BytesIO()
        try:
            torch.save(reader.batch, file)
            content = file.getvalue()
        except Exception as caught:  # Pickling the user's objects can raise any exception.
            error = ValueError(
                "loader: expected at least one batch on each rank, or batches that torch.save can "
                "save, since ranks with an empty loader receive a copy; found an empty loader, and "
                f"a batch of type {type(reader.batch).__name__}: {caught}"
            )
    contents = agree(_WHAT, error, ranks.control_group, content)
    if not reader.has_batch:
        file = io.BytesIO(contents[source])
        try:
            reader.batch = torch.load(
                file,
                map_location=lambda storage, location: default_restore_location(
                    storage, "cpu" if location == "cpu" else str(ranks.device)
                ),
                weights_only=False,
            )
        except Exception as caught:  # Unpickling the user's objects can raise any exception.
            error = ValueError(
                "loader: expected at least one batch on each rank, or batches that every rank can "
                "load, since ranks with an empty loader receive a copy; found an empty loader, and "
                f"that torch.load failed there: {caught}"
            )
    agree(_WHAT, error, ranks.control_group)
