"""Options of the engine, and the classes that are derived from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from torch import nn

# A function of a parameter's name and the parameter. It returns the number of consecutive elements
# that must be on one rank.
Granule = Callable[[str, nn.Parameter], int]

# Default size of a bucket. Collectives of smaller buckets are dominated by latency.
_LEAST_BUCKET_ELEMENTS = 40_000_000
_BUCKET_ELEMENTS_PER_RANK = 1_000_000

_COUNTS = {  # optional integer fields: the smallest legal value
    "prefetch_window": 0,
    "staging_limit": 0,
    "bucket_size": 1,
    "num_buckets": 1,
    "min_unit_size": 0,
}


class StagingBudget(NamedTuple):
    """Limit on the gradients in flight when the first gradient of a unit arrives.

    Attributes:
        elements: Maximum number of staged elements, including those of the arriving unit.
        least: Number of reductions that may be in flight regardless of ``elements``.
    """

    elements: int
    least: int

    def is_exceeded(self, num_reductions: int, num_elements: int, opening: int) -> bool:
        """Returns whether the oldest reduction must finish before more gradients are staged.

        Args:
            num_reductions: Number of reductions in flight.
            num_elements: Number of elements of these reductions.
            opening: Number of elements of the unit whose first gradient arrives.
        """
        return num_reductions > self.least and num_elements + opening > max(self.elements, opening)


@dataclass(frozen=True)
class Options:
    """Options of the engine other than mesh, units and dtypes. Sizes are numbers of elements.

    Attributes:
        prefetch_window: Number of elements to prefetch. At least one unit is prefetched, unless the
            window is 0. None: the mean size of a unit, so that one unit is gathered while another
            unit of the same size computes.
        staging_limit: Maximum number of elements in staging buffers of gradients: the buffer being
            written and those being reduced. At the limit, the engine waits for the oldest
            reduction. None: twice the mean size of a unit. One reduction may then be in flight
            regardless of its size.
        bucket_size: Parameters outside of units are grouped into buckets, in reverse registration
            order. A bucket ends with the parameter that brings it to this number of elements. None:
            40,000,000, or 1,000,000 per data-parallel rank if that is more.
        num_buckets: Number of buckets, whose sizes are as equal as the parameters allow. An
            alternative to ``bucket_size``.
        min_unit_size: If ``shard`` chooses the units (``units=None``), units of fewer elements are
            joined with their neighbours. 0: no unit is joined. None: 1,000,000, because
            smaller units cost more time than they save.
        granule: ``granule(name, parameter)`` returns the number of consecutive elements that must
            be on one rank. It must divide the number of elements of the parameter.
        pad_shards: Pad each rank's shard of a flat buffer to a multiple of 2^16 elements.
        sum_in_fp32: Where the compute dtype is bf16 or fp16, send gradients in that dtype, and sum
            them in fp32 on the receiving rank.
        average_in_collective: The collective averages gradients. False: gradients are scaled while
            they are copied into the buffer, and the collective sums them. The result is the same.
        scale_while_copying: Scale gradients while they are copied into the buffer. False: scale
            them in a separate pass before they are sent.

    Raises:
        TypeError: A field does not have its type.
        ValueError: A value or a combination is not legal. The message names the fields and their
            legal values.
    """

    prefetch_window: int | None = None
    staging_limit: int | None = None
    bucket_size: int | None = None
    num_buckets: int | None = None
    min_unit_size: int | None = None
    # Not in the repr: ranks compare the repr of their options, and the address of a function
    # differs between ranks.
    granule: Granule | None = field(default=None, repr=False)
    pad_shards: bool = False
    sum_in_fp32: bool = False
    average_in_collective: bool = False
    scale_while_copying: bool = True

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(each.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{each.name}: expected True or False; found {value!r}")
        for name, least in _COUNTS.items():
            if (value := getattr(self, name)) is not None:
                check_count(name, value, least)
        if self.granule is not None and not callable(self.granule):
            raise TypeError(
                "granule: expected a function of a name and a parameter, or None; found "
                f"{self.granule!r}"
            )
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                "bucket_size, num_buckets: expected at most one of them; found "
                f"{self.bucket_size} and {self.num_buckets}"
            )

    def closing_size(self, num_ranks: int) -> int:
        """Returns the number of elements at which a bucket ends, if ``num_buckets`` is not set."""
        if self.bucket_size is not None:
            return self.bucket_size
        return max(_LEAST_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * num_ranks)

    def budgets(self, blocks: Sequence[int], others: Sequence[int]) -> tuple[int, StagingBudget]:
        """Returns the prefetch window in elements, and the limit on staged gradients.

        By default the window is the mean of ``blocks`` (of ``others`` if there are no blocks; 0 if
        both are empty). The limit on staged gradients is twice that mean. One reduction is allowed
        regardless of its size, so that one unit is reduced while another computes gradients.

        Args:
            blocks: Number of elements of each unit that is a block.
            others: Number of elements of each unit with parameters.
        """
        sizes = blocks or others or [0]
        window, limit = self.prefetch_window, self.staging_limit
        if window is None:
            window = sum(sizes) // len(sizes)
        if limit is not None:
            return window, StagingBudget(limit, 0)
        return window, StagingBudget(2 * sum(sizes) // len(sizes), 1)


@dataclass(frozen=True)
class Timing:
    """When gradients are reduced and weights are gathered, and which calls trigger this.

    Attributes:
        reduces_in_backward: The last backward of a step issues reductions as gradients arrive.
            False: ``finish_grad_sync`` issues them.
        finishes_backward: Gradients are reduced and published when the last backward ends. False:
            only ``finish_grad_sync`` publishes them, and only ``zero_grad_buffer`` or cleared
            gradients begin a new step.
        gathers_in_forward: Updated weights are gathered in the forward after an optimizer step.
            False: they are gathered directly after the optimizer step.
        gathers_ahead: Forward begins by prefetching all updated weights.
    """

    reduces_in_backward: bool = True
    finishes_backward: bool = True
    gathers_in_forward: bool = True
    gathers_ahead: bool = True


def check_count(name: str, value: object, least: int) -> None:
    """Check that ``value`` is an integer of ``least`` or more.

    Raises:
        TypeError, ValueError: ``value`` is not an integer, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer of {least} or more; found {value!r}")
    if value < least:
        raise ValueError(f"{name}: expected {least} or more; found {value}")
