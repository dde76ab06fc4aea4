"""The interface of the steps of ``engine.even_steps``, for trainers of other libraries. All ranks
take the same number of steps, even if their loaders have different lengths."""

from __future__ import annotations

from typing import Any, Protocol


class LoaderStep(Protocol):
    """A step of ``engine.even_steps``.

    Attributes:
        batch: The next batch of this rank's loader. If it has ended: the last batch again, or the
            first batch of another rank if this rank's loader had no batch.
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
