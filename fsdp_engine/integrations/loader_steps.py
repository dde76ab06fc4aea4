"""Steps that all ranks take with loaders of different lengths, for trainers."""

from __future__ import annotations

from typing import Any, Protocol


class LoaderStep(Protocol):
    """What ``engine.even_steps`` yields.

    Attributes:
        batch: The batch of this rank's loader, or of another rank's if it has none.
        is_repeated: this rank has run out, and others have not.
        num_ranks: ranks that have not.
    """

    batch: Any
    is_repeated: bool
    num_ranks: int


def length_of(loader: Any) -> int | None:
    """Returns the length of a loader or data set; None: it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
