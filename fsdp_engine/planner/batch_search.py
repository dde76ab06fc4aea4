"""Searches for the microbatch size, and the number of microbatches, that give a global batch.

[Note: Steps of many microbatches]
All microbatches of a step except the first and the last take the same time and send the same bytes:
gradients are accumulated from the first microbatch on, and nothing is prefetched across the end of
the step. So a step of m > 3 microbatches takes the time of a step of three, plus (m - 3) times the
time of the second microbatch. Its memory is that of a step of three.
(``tests/planner/test_batch_search.py`` compares with full simulations of such steps.)

The largest microbatch is determined for each strategy separately. Memory is linear in the size of
the microbatch. A further row adds at most the activation memory of the smallest microbatch, divided
by its rows. This bound selects a second size to simulate. The line through both sizes predicts the
largest size that fits, and simulations check that it fits and that the next larger size does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_engine.planner.candidates import Candidate
from fsdp_engine.planner.outcome import ACTIVATIONS, Outcome

# Largest accepted difference between a global batch and the nearest batch that all ranks can share
# equally, as a fraction of the global batch.
_TOLERANCE = 0.1


def rows_of_rank(global_batch: float, num_ranks: int, items: int, item: str) -> int:
    """Returns a rank's number of rows in the step whose batch is nearest to the global batch.

    Args:
        global_batch: Tokens or samples of a step on all ranks.
        num_ranks: Number of ranks, or groups of ranks, that have different rows.
        items: Tokens or samples of one row.
        item: Unit of ``items``.

    Raises:
        ValueError: The nearest multiple of one row per rank differs from the global batch by more
            than a tenth.
    """
    least = num_ranks * items
    rows = max(round(global_batch / least), 1)
    if abs(rows * least - global_batch) > _TOLERANCE * global_batch:
        raise ValueError(
            f"global_batch: expected a multiple of {least:,} {item} ({num_ranks:,} ranks x "
            f"{items:,} {item} of a row), or within {_TOLERANCE:.0%} of one; found "
            f"{global_batch:,.0f}"
        )
    return rows


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def fastest_fitting(
    candidate: Candidate,
    rows: int,
    sizes: Sequence[int],
    outcome_of: Callable[[Candidate], Outcome],
) -> Candidate:
    """Returns the candidate with the fastest microbatch size that fits, or the smallest size if
    none fits. Sizes are tried in order, until one does not fit or is slower than the one before.

    Args:
        candidate, rows, sizes, outcome_of: See :func:`largest_fitting`.
    """
    best = _sized(candidate, rows, sizes[0])
    for size in sizes:
        tried = _sized(candidate, rows, size)
        outcome = outcome_of(tried)
        if outcome.lacking or outcome.rate < outcome_of(best).rate:
            break
        best = tried
    return best


def _sized(candidate: Candidate, rows: int, size: int) -> Candidate:
    return replace(candidate, microbatch_size=size, microbatches=rows // size)


def largest_fitting(
    candidate: Candidate,
    rows: int,
    sizes: Sequence[int],
    limit: float,
    outcome_of: Callable[[Candidate], Outcome],
) -> Candidate:
    """Returns the candidate with the largest microbatch size that fits, or the smallest size if
    none fits.

    Args:
        candidate: The candidate without a microbatch size.
        rows: Number of rows of a rank in a step.
        sizes: Microbatch sizes to try, divisors of ``rows`` in ascending order.
        limit: Memory limit of a rank in bytes.
        outcome_of: Simulates a candidate.
    """

    @functools.cache
    def probe(size: int) -> Outcome:
        return outcome_of(_sized(candidate, rows, size))

    def select(slope: float, start: int) -> int:
        """Returns the index of the largest size that fits if memory grows by ``slope`` per row."""
        held = probe(start).peak_bytes
        fits = [held + slope * (size - start) <= limit for size in sizes]
        return max(index for index, each in enumerate(fits) if each or not index)

    first = sizes[0]
    if probe(first).lacking:
        return _sized(candidate, rows, first)
    fits, lacks = 0, len(sizes)  # largest index known to fit, smallest index known not to fit

    def narrow(index: int) -> None:
        nonlocal fits, lacks
        if fits < index < lacks:
            if probe(sizes[index]).lacking:
                lacks = index
            else:
                fits = index

    second = min(max(select(probe(first).memory[ACTIVATIONS] / first, first), 1), len(sizes) - 1)
    narrow(second)
    if second:
        grown = probe(sizes[second]).peak_bytes - probe(first).peak_bytes
        largest = select(max(grown, 0) / (sizes[second] - first), first)
        narrow(largest)
        narrow(largest + 1)
    while lacks - fits > 1:
        narrow((fits + lacks) // 2)
    return _sized(candidate, rows, sizes[fits])
