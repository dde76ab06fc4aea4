"""Reductions that the compute lane has not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

from fsdp_engine.buffers.gradient_memory import SubmittedReduction
from fsdp_engine.comm.lanes import Lanes, Ticket
from fsdp_engine.options import StagingBudget
from fsdp_engine.runtime.unit import Unit


class PendingReductions:
    """Reductions that the compute lane has not waited for, oldest first.

    Reductions that one backward leaves pending are waited for, and their staging buffers freed,
    before the next backward stages gradients. So two backwards never need more staging memory than
    one.

    Args:
        lanes: The lanes of the engine.
        budget: The limit on staging buffers of pending reductions.
        num_staged: Number of elements of each unit's staging buffers.
    """

    def __init__(self, lanes: Lanes, budget: StagingBudget, num_staged: Sequence[int]) -> None:
        self._lanes = lanes
        self._budget = budget
        self._num_staged = num_staged
        # Reductions whose transient memory was not freed yet: unit, tickets, elements of staging.
        self._reading: deque[tuple[Unit, list[Ticket], int]] = deque()
        self._num_elements = 0
        self._num_left = 0
        self._done: list[Ticket] = []  # one ticket for each pending reduction of a buffer

    def __bool__(self) -> bool:
        return bool(self._reading or self._done)

    def end_backward(self) -> None:
        """Leave pending reductions pending until the next backward stages gradients."""
        self._num_left = len(self._reading)

    def have_room(self, unit: Unit) -> bool:
        """Returns whether staging buffers of ``unit`` can be allocated within the budget."""
        opening, num_pending = self._num_staged[unit.index], len(self._reading)
        return not num_pending or not self._budget.is_exceeded(
            num_pending, self._num_elements, opening
        )

    def make_room(self, unit: Unit) -> None:
        """Free staging buffers of the oldest reductions until those of ``unit`` can be allocated
        within the budget."""
        if self._num_left:
            self._free_oldest(self._num_left)
        while not self.have_room(unit):
            self._free_oldest(1)

    def finish_first(self, units: Collection[Unit]) -> None:
        """Wait for the oldest reductions, as long as they are reductions of ``units``."""
        while self._reading and self._reading[0][0] in units:
            self._free_oldest(1)

    def add(self, unit: Unit, submitted: Sequence[SubmittedReduction], *, staged: bool) -> None:
        """Add submitted reductions of ``unit``. ``staged``: they read its staging buffers."""
        num_staged = self._num_staged[unit.index] if staged else 0
        self._reading.append((unit, [each.transient_read for each in submitted], num_staged))
        self._num_elements += num_staged
        self._done += [each.done for each in submitted]

    def finish(self) -> None:
        """Make compute wait for all pending reductions, and free their transient memory."""
        compute = self._lanes.compute
        if compute.runs_ahead:
            compute.wait(*self._done)  # this includes waiting for reads of transient memory
            self._free(len(self._reading))
        else:
            # The host drives reductions: it frees the staging buffer of one before it runs another.
            while self._reading:
                self._free_oldest(1)
            compute.wait(*self._done)
        self._done.clear()

    def discard(self) -> None:
        """Drop all pending reductions. Communication must have ended, successfully or not."""
        self._reading.clear()
        self._done.clear()
        self._num_elements = self._num_left = 0

    def _free_oldest(self, num: int) -> None:
        """Wait until the ``num`` oldest reductions have read their transient memory. Free it."""
        oldest = islice(self._reading, num)
        self._lanes.compute.wait(*(ticket for _, tickets, _ in oldest for ticket in tickets))
        self._free(num)

    def _free(self, num: int) -> None:
        """Free the transient memory of the ``num`` oldest reductions, which no longer read it."""
        self._num_left = max(self._num_left - num, 0)
        for _ in range(num):
            unit, _, num_staged = self._reading.popleft()
            self._num_elements -= num_staged
            for buffer in unit.trainable:
                assert buffer.grads is not None
                buffer.grads.release()
