"""An error on one rank is raised on all ranks, so that none waits for a rank that has left."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.comm.rendezvous import error_of_another


def agree(
    what: str, error: Exception | None, group: ProcessGroup | None, value: Any = None
) -> list[Any]:
    """Exchange errors: all ranks continue, or all raise. Collective.

    Args:
        what: the action, in the message.
        error: The error of this rank; None: it can continue.
        group: The group of all ranks; None: there is one.
        value: given to the other ranks.

    Returns:
        Every rank's ``value``, if none has an error.

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
