"""Whose turn it is to be reduced in a backward, and which reductions are in flight."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

from fsdp_engine.config import StagingBudget
from fsdp_engine.devices.lane import Lanes, Ticket
from fsdp_engine.runtime.unit import Unit


class Came(enum.Enum):
    """What a backward has brought of one unit's gradients."""

    NOTHING = "nothing"
    SOME = "some"
    REDUCED = "all, and their reduction is issued"


class Turns:
    """One backward: what it has brought so far, and whose turn it is to be reduced.

    Attributes:
        is_open: it is under way.
        is_closing: autograd is done with it; weight gradients that modules put off may be missing.
        is_last: of the step.
        partial: units of which it is not, though it is of others: all that one backward leaves of
            them, until the next begins, is accumulated.
        inputs_only: it brings no gradients of parameters.
        came: what has come, by unit.
    """

    def __init__(self, num_units: int) -> None:
        self.is_open = False
        self.is_closing = False
        self.is_last = False
        self.partial: frozenset[int] = frozenset()
        self.inputs_only = False
        self.came = [Came.NOTHING] * num_units
        self._ready: set[int] = set()
        self._num_reduced = 0

    def begin(
        self, *, is_last: bool, inputs_only: bool, partial: frozenset[int] = frozenset()
    ) -> None:
        """A backward begins."""
        self.is_open, self.is_last, self.inputs_only = True, is_last, inputs_only
        self.partial = partial

    def unit_is_ready(self, unit: Unit) -> None:
        """All that this backward brings of ``unit`` has come, or will come later."""
        self._ready.add(unit.index)

    def next(self, queue: Sequence[Unit]) -> Unit | None:
        """The unit whose turn it is, if it can be reduced."""
        if self._num_reduced == len(queue):
            return None
        unit = queue[self._num_reduced]
        if unit.num_late or not (self.is_closing or unit.index in self._ready):
            return None
        self._num_reduced += 1
        return unit

    def waiting(self, queue: Sequence[Unit]) -> Sequence[Unit]:
        """Units whose turn is yet to come."""
        return queue[self._num_reduced :]

    def end(self) -> None:
        """All has come and is issued, or nothing of it counts any more; ``came`` stays until
        :meth:`forget`."""
        self.is_open = self.is_closing = False
        self._ready.clear()
        self._num_reduced = 0

    def forget(self) -> None:
        """What the last backward brought is of no interest any more."""
        self.came = [Came.NOTHING] * len(self.came)


class InFlight:
    """Reductions that compute has not waited for, oldest first.

    What one backward leaves here is over before the next one stages anything, so that no more is
    staged at a time than within one backward.

    Args:
        lanes: of the engine.
        budget: staging that may be in flight.
        num_staged: elements of staging that writing gradients takes, by unit.
    """

    def __init__(self, lanes: Lanes, budget: StagingBudget, num_staged: Sequence[int]) -> None:
        self._lanes = lanes
        self._budget = budget
        self._num_staged = num_staged
        self._reductions: deque[tuple[Unit, list[Ticket], int]] = deque()
        self._num_elements = 0
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._reductions)

    def end_backward(self) -> None:
        """What there is stays in flight until the next backward."""
        self._num_left = len(self._reductions)

    def make_room(self, unit: Unit) -> None:
        """Staging of ``unit`` is about to be taken: wait for the oldest, as far as is needed."""
        self._retire(self._num_left)
        opening = self._num_staged[unit.index]
        while self._reductions and self._budget.is_exceeded(
            len(self._reductions), self._num_elements, opening
        ):
            self._retire(1)

    def add(self, unit: Unit, tickets: list[Ticket], *, staged: bool) -> None:
        """A reduction of ``unit`` is issued; ``staged``: out of its staging."""
        num_staged = self._num_staged[unit.index] if staged else 0
        self._reductions.append((unit, tickets, num_staged))
        self._num_elements += num_staged

    def finish(self) -> None:
        """Compute waits for all."""
        self._retire(len(self._reductions))

    def forget(self) -> None:
        """They are over, whatever became of them."""
        self._reductions.clear()
        self._num_elements = self._num_left = 0

    def _retire(self, num: int) -> None:
        """Compute waits for the ``num`` oldest, and their staging is freed."""
        self._num_left = max(self._num_left - num, 0)
        while num:
            # A host that drives them frees the staging of each before it goes on with the next.
            oldest = [
                self._reductions.popleft()
                for _ in range(num if self._lanes.compute.runs_ahead else 1)
            ]
            num -= len(oldest)
            self._lanes.compute.wait(*(ticket for _, tickets, _ in oldest for ticket in tickets))
            for unit, _, num_staged in oldest:
                self._num_elements -= num_staged
                for buffer in unit.trainable:
                    assert buffer.grads is not None
                    buffer.grads.release()
