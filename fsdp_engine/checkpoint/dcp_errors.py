"""Converts exceptions of ``torch.distributed.checkpoint`` (DCP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from fsdp_engine.devices.rendezvous import ERROR_KINDS


@contextmanager
def convert_dcp_errors(what: str) -> Iterator[None]:
    """Context that converts ``CheckpointException`` to an ``Exception``, the same on all ranks.

    ``CheckpointException`` is a ``BaseException``, which ``except Exception`` does not catch.

    Args:
        what: name of the operation, for the message.

    Raises:
        Exception: of the class of the first failed rank's exception, if the operation failed.
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
