"""Weights that are always full, brought up to date after a step.

[Note: One order on all ranks]
Collectives of one group must be issued in one order on all ranks. Units whose parameters are cut
gather when they are entered: all ranks must enter the same units, as everywhere. Units that are
always full only *refresh* after the weights changed, and there ranks may differ in what they
enter: so refreshes are always issued in the canonical order of units, whoever asks first, and what
is left is refreshed when forward ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_engine.codecs.phase import FORWARD
from fsdp_engine.devices.lane import Ticket
from fsdp_engine.runtime.unit import Unit


class Refreshes:
    """Which units that are always full have been brought up to date in this forward.

    Attributes:
        are_needed: there are such units.
        ahead: all of them are brought up to date when forward begins.
    """

    def __init__(self, units: Sequence[Unit], *, ahead: bool) -> None:
        self._units = units
        self.are_needed = any(unit.needs_refresh and not unit.reshards for unit in units)
        self.ahead = ahead and self.are_needed
        # By their places in the canonical order.
        self._num_issued = 0
        self._issued: set[int] = set()

    def begin(self) -> None:
        """A forward begins."""
        self._num_issued = 0
        self._issued.clear()

    def awaits(self, unit: Unit) -> bool:
        """Whether the turn of ``unit`` is yet to come."""
        return unit.index not in self._issued

    def issue_through(self, last: Unit | None, order: Sequence[int]) -> None:
        """Refresh what is stale, in canonical order, up to ``last`` (None: all)."""
        compute_now: Ticket | None = None  # nothing of the model runs in between
        while self._num_issued < len(order):
            unit = self._units[order[self._num_issued]]
            self._num_issued += 1
            self._issued.add(unit.index)
            if not unit.reshards and unit.needs_gather(FORWARD):
                compute_now = compute_now or unit.record_compute()
                unit.gather(FORWARD, compute_now)
            if unit is last:
                return
