"""Compares arguments that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed import ProcessGroup

from fsdp_engine.comm.agreement import agree


def agree_on_same(
    what: str,
    error: Exception | None,
    group: ProcessGroup | None,
    same: Mapping[str, object],
    value: Any = None,
    *,
    call: str | None = None,
) -> list[Any]:
    """Call :func:`agree`, and check that arguments are equal on all ranks. Collective.

    Args:
        what, error, group, value, call: The arguments of :func:`agree`.
        same: The arguments by name. They can be pickled, and all ranks pass the same names.

    Returns:
        The ``value`` of every rank.

    Raises:
        Exception: An error of :func:`agree`.
        ValueError: An argument differs. The message contains each value, with the first rank that
            has it. All ranks raise.
    """
    answers = agree(what, error, group, (dict(same), value), call=call)
    for name in same:
        first_ranks: dict[str, int] = {}
        for rank, (arguments, _) in enumerate(answers):
            first_ranks.setdefault(repr(arguments[name]), rank)
        if len(first_ranks) > 1:
            values = [f"{value} on rank {rank}" for value, rank in list(first_ranks.items())[:4]]
            raise ValueError(
                f"{what}: {name}: expected the same on all ranks; found {', '.join(values)}"
            )
    return [each for _, each in answers]
