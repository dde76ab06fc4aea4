"""What DCP raises, as errors that callers expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from fsdp_engine.devices.rendezvous import ERROR_KINDS


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
