"""Everything about the engine that is neither mesh, strategy, units nor dtypes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """Options of the engine, by the names that Megatron-Core users know.

    Attributes:
        suggested_communication_unit_size: elements that may be gathered ahead of use; at least
            one unit is, unless it is 0. Gradient buffers in use (the one being filled and those
            being reduced) obey the same number: past it, the oldest reduction is waited for.
            None: twice the mean unit.
        reduce_scatter_with_fp32_accumulation: low-precision gradients travel as they are and are
            summed in fp32 by the receiving rank.
        average_in_collective: the collective averages. False: gradients are scaled as they are
            copied into the buffer, then summed. The result is the same.

    Raises:
        ValueError: a negative ``suggested_communication_unit_size``.
        TypeError: it is not an integer.
    """

    suggested_communication_unit_size: int | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False

    def __post_init__(self) -> None:
        size = self.suggested_communication_unit_size
        if size is None:
            return
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(
                "suggested_communication_unit_size: expected a number of elements (int) or None; "
                f"found {size!r}"
            )
        if size < 0:
            raise ValueError(
                "suggested_communication_unit_size: expected 0 or more elements, or None; "
                f"found {size}"
            )
