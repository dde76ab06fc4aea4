"""Raises an error of one rank on all ranks, so that no rank waits for a rank that has stopped."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import DifferentCallsError, gather_objects
from fsdp_engine.comm.rendezvous import error_of_another


def agree(
    what: str,
    error: Exception | None,
    group: ProcessGroup | None,
    value: Any = None,
    *,
    call: str | None = None,
) -> list[Any]:
    """Exchange errors: all ranks continue, or all ranks raise. Collective.

    Args:
        what: Name of the operation in the message.
        error: The error of this rank. None: this rank can continue.
        group: The group of all ranks. None: there is a single rank.
        value: An object that is sent to the other ranks.
        call: See :func:`.gather_objects`.

    Returns:
        The ``value`` of every rank, if no rank has an error.

    Raises:
        Exception: ``error``, or an exception of the type of the first rank's error: see
            :func:`~fsdp_engine.comm.rendezvous.error_of_another`.
        DifferentCallsError: Ranks have called different operations. All ranks raise.
    """
    if isinstance(error, DifferentCallsError) and error.group is group:
        raise error  # all ranks of the group raise this error, so none enters this exchange
    found = None if error is None else (type(error).__name__, str(error))
    try:
        gathered: list[Any] = gather_objects((found, value), group, what, call=call)
    except DifferentCallsError as different:
        raise different from error
    if error is not None:
        raise error
    for rank, (other, _) in enumerate(gathered):
        if other is not None:
            raise error_of_another(what, f"data-parallel rank {rank}", *other)
    return [each for _, each in gathered]
