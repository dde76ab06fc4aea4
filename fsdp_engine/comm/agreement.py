"""An error on one rank is raised on all ranks, so that none waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Mapping
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


def agree_on_same(
    what: str,
    error: Exception | None,
    group: ProcessGroup | None,
    same: Mapping[str, object],
    value: Any = None,
) -> list[Any]:
    """As :func:`agree`, and check that arguments are equal on all ranks. Collective.

    Args:
        what, error, group, value: see :func:`agree`.
        same: arguments by name, which pickle; the same names on all ranks.

    Returns:
        Every rank's ``value``.

    Raises:
        Exception: as :func:`agree`.
        ValueError: on every rank, if an argument differs; names it, and the values found with the
            first rank of each.
    """
    told = agree(what, error, group, (dict(same), value))
    for name in same:
        first_ranks: dict[str, int] = {}
        for rank, (arguments, _) in enumerate(told):
            first_ranks.setdefault(repr(arguments[name]), rank)
        if len(first_ranks) > 1:
            values = [f"{value} on rank {rank}" for value, rank in list(first_ranks.items())[:4]]
            raise ValueError(
                f"{what}: {name}: expected the same on all ranks; found {', '.join(values)}"
            )
    return [each for _, each in told]
