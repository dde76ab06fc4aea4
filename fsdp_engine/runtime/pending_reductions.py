"""Reductions that compute has not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice

from fsdp_engine.buffers.gradient_memory import SubmittedReduction
from fsdp_engine.comm.lanes import Lanes, Ticket
from fsdp_engine.options import StagingBudget
from fsdp_engine.runtime.unit import Unit


class PendingReductions:
    """Reductions that compute has not waited for, oldest first.

    Those that one backward leaves pending no longer read staging when the next one stages
    gradients, so that no more is staged at a time than within one backward.

    Args:
        lanes: of the engine.
        budget: staging of pending reductions.
        num_staged: elements of staging that writing gradients takes, by unit.
    """

    def __init__(self, lanes: Lanes, budget: StagingBudget, num_staged: Sequence[int]) -> None:
        self._lanes = lanes
        self._budget = budget
        self._num_staged = num_staged
        # Those whose transient memory is not freed.
        self._reading: deque[tuple[Unit, list[Ticket], int]] = deque()
        self._num_elements = 0
        self._num_left = 0
        self._done: list[Ticket] = []  # of all

    def __bool__(self) -> bool:
        return bool(self._reading or self._done)

    def end_backward(self) -> None:
        """Pending reductions stay pending until the next backward stages gradients."""
        self._num_left = len(self._reading)

    def have_room(self, unit: Unit) -> bool:
        """Whether staging of ``unit`` can be allocated within the budget."""
        opening, num_pending = self._num_staged[unit.index], len(self._reading)
        return not num_pending or not self._budget.is_exceeded(
            num_pending, self._num_elements, opening
        )

    def make_room(self, unit: Unit) -> None:
        """Staging of ``unit`` is about to be allocated: free that of the oldest reductions, as far
        as the budget needs."""
        if self._num_left:
            self._free_oldest(self._num_left)
        while not self.have_room(unit):
            self._free_oldest(1)

    def finish_first(self, units: Collection[Unit]) -> None:
        """Wait for the oldest reductions, as far as they are of ``units``."""
        while self._reading and self._reading[0][0] in units:
            self._free_oldest(1)

    def add(self, unit: Unit, submitted: Sequence[SubmittedReduction], *, staged: bool) -> None:
        """Reductions of ``unit`` are submitted; ``staged``: from its staging buffer."""
        num_staged = self._num_staged[unit.index] if staged else 0
        self._reading.append((unit, [each.transient_read for each in submitted], num_staged))
        self._num_elements += num_staged
        self._done += [each.done for each in submitted]

    def finish(self) -> None:
        """Compute waits for all."""
        compute = self._lanes.compute
        if compute.runs_ahead:
            compute.wait(*self._done)  # and so for the reads of transient memory
            self._free(len(self._reading))
        else:
            while self._reading:  # a host frees the staging of each before it drives the next
                self._free_oldest(1)
            compute.wait(*self._done)
        self._done.clear()

    def discard(self) -> None:
        """Communication has ended, with whatever result."""
        self._reading.clear()
        self._done.clear()
        self._num_elements = self._num_left = 0

    def _free_oldest(self, num: int) -> None:
        """Free the transient memory of the ``num`` oldest reductions once it is read."""
        oldest = islice(self._reading, num)
        self._lanes.compute.wait(*(ticket for _, tickets, _ in oldest for ticket in tickets))
        self._free(num)

    def _free(self, num: int) -> None:
        """Free the transient memory of the ``num`` oldest reductions, which is read."""
        self._num_left = max(self._num_left - num, 0)
        for _ in range(num):
            unit, _, num_staged = self._reading.popleft()
            self._num_elements -= num_staged
            for buffer in unit.trainable:
                assert buffer.grads is not None
                buffer.grads.release()
