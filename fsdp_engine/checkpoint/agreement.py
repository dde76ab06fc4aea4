"""An error on one rank is an error on all, so that nobody waits for somebody who left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from fsdp_engine.collectives import gather_objects
from fsdp_engine.meeting import ERROR_KINDS, error_of_another


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """What DCP found wrong on some ranks becomes an ``Exception``, the same on all of them.

    Its own is a ``BaseException``, which nobody expects who catches errors.

    Raises:
        Exception: of the kind of the first rank's, if ``what`` failed.
    """
    try:
        yield
    except CheckpointException as caught:
        causes = {rank: cause[0] for rank, cause in sorted(caught.failures.items())}
        first = next(iter(causes.values()))
        if not isinstance(first, Exception):
            raise first from caught  # an interrupt, or an exit
        kind = next((each for each in type(first).__mro__ if each.__name__ in ERROR_KINDS), None)
        found = "; ".join(
            f"on data-parallel rank {rank}: {type(cause).__name__}: {cause}"
            for rank, cause in causes.items()
        )
        made = RuntimeError if kind is None else ERROR_KINDS[kind.__name__]
        raise made(f"{what} failed {found}") from first


def agree(
    what: str, error: Exception | None, group: ProcessGroup | None, value: Any = None
) -> list[Any]:
    """Tell all ranks whether this one can go on. Collective.

    Args:
        what: what is being done, for the message.
        error: why this rank cannot go on; None: it can.
        group: of all ranks; None: there is one.
        value: something to tell the others.

    Returns:
        Every rank's ``value``, if all can go on.

    Raises:
        Exception: ``error``; or one of the kind of the first rank's that has one.
    """
    found = None if error is None else (type(error).__name__, str(error))
    gathered: list[Any] = gather_objects((found, value), group, what)
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(gathered):
        if other is not None:
            raise error_of_another(what, f"data-parallel rank {rank}", *other)
    return [each for _, each in gathered]
