"""The interface of steps that all ranks take with loaders of different lengths, for trainers."""

from __future__ import annotations

from typing import Any, Protocol


class LoaderStep(Protocol):
    """A step of ``engine.even_steps``.

    Attributes:
        batch: The batch of this rank's loader, or of another rank's loader if this rank has no
            batch.
        is_repeated: Whether this rank has no batches left, but other ranks have.
        num_ranks: The number of ranks that have a batch in this step.
    """

    batch: Any
    is_repeated: bool
    num_ranks: int


def length_of(loader: Any) -> int | None:
    """Returns the length of a loader or data set; None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
