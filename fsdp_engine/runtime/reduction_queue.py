"""The order in which one backward reduces units, and the reductions that are pending."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Sequence

from fsdp_engine.comm.lane import Lanes, Ticket
from fsdp_engine.config import StagingBudget
from fsdp_engine.runtime.unit import Unit


class GradientArrival(enum.Enum):
    """Which gradients of one unit a backward has brought."""

    NOTHING = "nothing"
    SOME = "some"
    REDUCED = "all, and their reduction is submitted"


class ReductionQueue:
    """The reductions of one backward, in canonical order.

    Args:
        units: trainable units, in the order of their reductions.
        is_last: this is the last backward of the step.
        inputs_only: it brings no gradients of parameters.
        partial: units whose gradients it leaves accumulated, though it may be the last of others.

    Attributes:
        is_last, inputs_only, partial: see the arguments.
        autograd_is_done: autograd has returned; weight gradients that modules compute later may be
            missing.
        num_submitted: units whose reduction was submitted, or not needed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        is_last: bool,
        inputs_only: bool,
        partial: frozenset[int],
    ) -> None:
        self._units = units
        self.is_last = is_last
        self.inputs_only = inputs_only
        self.partial = partial
        self.autograd_is_done = False
        self.num_submitted = 0
        self._arrivals: dict[int, GradientArrival] = {}
        self._ready: set[int] = set()

    def arrival(self, unit: Unit) -> GradientArrival:
        """Returns which gradients of ``unit`` have arrived."""
        return self._arrivals.get(unit.index, GradientArrival.NOTHING)

    def set_arrival(self, unit: Unit, arrival: GradientArrival) -> None:
        """Note which gradients of ``unit`` have arrived."""
        self._arrivals[unit.index] = arrival

    def set_ready(self, unit: Unit) -> None:
        """All gradients that this backward brings of ``unit`` have arrived, or are put off."""
        self._ready.add(unit.index)

    def next(self) -> Unit | None:
        """Takes the next unit off the queue; None: it is not ready, or there is none."""
        if self.num_submitted == len(self._units):
            return None
        unit = self._units[self.num_submitted]
        if unit.num_late or not (self.autograd_is_done or unit.index in self._ready):
            return None
        self.num_submitted += 1
        return unit

    @property
    def waiting(self) -> Sequence[Unit]:
        """Units that are not taken yet."""
        return self._units[self.num_submitted :]

    @property
    def reduced(self) -> Collection[int]:
        """Units whose gradients were reduced, as far as this backward reduces them."""
        return {index for index, each in self._arrivals.items() if each is GradientArrival.REDUCED}


class PendingReductions:
    """Reductions that compute has not waited for, oldest first.

    Those that one backward leaves pending are done before the next one stages anything, so that no
    more is staged at a time than within one backward.

    Args:
        lanes: of the engine.
        budget: staging of pending reductions.
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

    @property
    def oldest(self) -> Unit:
        """The unit of the oldest reduction."""
        return self._reductions[0][0]

    def end_backward(self) -> None:
        """Pending reductions stay pending until the next backward stages gradients."""
        self._num_left = len(self._reductions)

    def make_room(self, unit: Unit) -> None:
        """Staging of ``unit`` is about to be allocated: wait for the oldest reductions, as far as
        the budget needs."""
        self._wait_for_oldest(self._num_left)
        opening = self._num_staged[unit.index]
        while self._reductions and self._budget.is_exceeded(
            len(self._reductions), self._num_elements, opening
        ):
            self._wait_for_oldest(1)

    def add(self, unit: Unit, tickets: list[Ticket], *, staged: bool) -> None:
        """A reduction of ``unit`` is submitted; ``staged``: from its staging buffer."""
        num_staged = self._num_staged[unit.index] if staged else 0
        self._reductions.append((unit, tickets, num_staged))
        self._num_elements += num_staged

    def finish(self) -> None:
        """Compute waits for all."""
        self._wait_for_oldest(len(self._reductions))

    def discard(self) -> None:
        """Communication has ended, with whatever result."""
        self._reductions.clear()
        self._num_elements = self._num_left = 0

    def _wait_for_oldest(self, num: int) -> None:
        """Let compute wait for the ``num`` oldest reductions, and free their staging buffers."""
        self._num_left = max(self._num_left - num, 0)
        # A host that drives reductions frees the staging of each before it drives the next.
        num_at_once = num if self._lanes.compute.runs_ahead else 1
        while num:
            oldest = [self._reductions.popleft() for _ in range(num_at_once)]
            num -= num_at_once
            self._lanes.compute.wait(*(ticket for _, tickets, _ in oldest for ticket in tickets))
            for unit, _, num_staged in oldest:
                self._num_elements -= num_staged
                for buffer in unit.trainable:
                    assert buffer.grads is not None
                    buffer.grads.release()
