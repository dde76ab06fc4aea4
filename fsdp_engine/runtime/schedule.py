"""Which units are unsharded when: the recorded order of uses, and the gathers that follow from it.

[Note: Recorded order]
    f0 f1 .. fn | bn .. b1 b0

Units are numbered. A *use* is a unit and the phase that its weights are read for. Forward is
recorded as units are entered; a unit that is called twice is recorded twice. Backward is recorded
as gradients reach units, with the forwards that checkpoints run again in between. The next
microbatch is expected to follow the same order, so a place in it determines

- the units to prefetch: the next uses, within the budget (a *prefetch window*). No window reaches
  from forward into backward: the loss is between them, and its memory is the largest of the step;
- whether a unit is kept unsharded when it is left: if the next use is its own. So the last block is
  kept for its backward, and so are the units that contain it.

Before the first backward, units are expected in the reverse of the order in which forward left
them, so that a unit that contains others precedes them both times. Where execution leaves the
recorded order, prefetched units are freed, the unit is gathered on demand, and a new order is
recorded.

[Note: One order on all ranks]
Collectives of one group must be issued in one order on all ranks. Sharded units are gathered when
they are entered: all ranks must enter the same units, unless another :class:`Schedule` is in place.
Units that are never sharded are only *refreshed* after their weights changed, and ranks may enter
different ones. So refreshes are issued in the canonical order of units, up to the unit that is
entered; the rest is issued when forward ends.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD, Call, Unit


class Use(NamedTuple):
    """One use of a unit: its number, and FORWARD, BACKWARD or BOTH."""

    unit: int
    phase: int


class Step(NamedTuple):
    """The place of a use in the recorded order.

    Attributes:
        phase: of the use, as recorded.
        window: uses to prefetch, nearest first.
        expected: it was the next use of the recorded order.
    """

    phase: int
    window: tuple[Use, ...]
    expected: bool


def prefetch_windows(
    uses: Sequence[Use], sizes: Sequence[int], budget: int
) -> list[tuple[Use, ...]]:
    """Returns the prefetch window of each place in ``uses``, nearest uses first.

    Units are taken while the elements taken so far stay below ``budget``: at least one, unless
    the budget is 0, and never more than one unit over it.

    Args:
        uses: in their order.
        sizes: elements of each unit; units of 0 elements are not gathered and are skipped.
        budget: elements.

    Example: forward through four units of 10 elements, budget 20, has windows of the units
    ``[(1, 2), (2, 3), (3,), ()]``.
    """
    windows = []
    for place, (unit, _) in enumerate(uses):
        window: dict[int, Use] = {}
        ahead = 0
        for following in range(place + 1, len(uses)):
            if ahead >= budget:
                break
            use = uses[following]
            if use.unit != unit and use.unit not in window and sizes[use.unit]:
                window[use.unit] = use
                ahead += sizes[use.unit]
        windows.append(tuple(window.values()))
    return windows


class _Half:
    """The uses of forward or of backward, and the number of those that have begun."""

    def __init__(self, uses: Sequence[Use], sizes: Sequence[int], budget: int) -> None:
        self.uses = list(uses)
        windows = prefetch_windows(self.uses, sizes, budget)
        self._steps = [
            Step(use.phase, window, True) for use, window in zip(self.uses, windows, strict=True)
        ]
        self._kinds = [_kind(use) for use in self.uses]
        self._places: dict[tuple[int, bool], list[int]] = {}
        for place, kind in enumerate(self._kinds):
            self._places.setdefault(kind, []).append(place)
        self.next = 0

    def window(self, place: int) -> tuple[Use, ...]:
        """The prefetch window of a place."""
        return self._steps[place].window

    def advance(self, unit: int, phase: int) -> Step:
        """Advance to the use that begins. A use out of order is searched for after the current
        place, then from the start; a use that is not recorded has no window, and the place does not
        change."""
        kind = (unit, phase >= BACKWARD)
        place = self.next
        if place < len(self._kinds) and kind == self._kinds[place]:
            self.next = place + 1
            return self._steps[place]
        places = self._places.get(kind)
        if not places:
            return Step(phase, (), False)
        place = next((each for each in places if each >= place), places[0])
        self.next = place + 1
        return self._steps[place]._replace(expected=False)


def _kind(use: Use) -> tuple[int, bool]:
    return use.unit, use.phase >= BACKWARD


class Record:
    """The recorded order of uses of a microbatch, in integers: see [Note: Recorded order].

    Args:
        forward: units in the order in which the first forward is expected to enter them.
        backward: the same for the first backward.
        sizes, budget: see :func:`prefetch_windows`.
    """

    def __init__(
        self, forward: Sequence[int], backward: Sequence[int], sizes: Sequence[int], budget: int
    ) -> None:
        self._sizes = sizes
        self._budget = budget
        self._forward = self._half([Use(unit, FORWARD) for unit in forward])
        self._backward = self._half([Use(unit, BACKWARD) for unit in backward])
        self._half_now = self._forward
        self._seen: list[Use] = []
        self._left: list[int] = []

    @property
    def units_in_forward(self) -> list[int]:
        """Units in the order in which forward enters them."""
        return [use.unit for use in self._forward.uses]

    @property
    def first(self) -> tuple[Use, ...]:
        """The first use of forward, and its prefetch window."""
        uses = self._forward.uses
        return (uses[0], *self._forward.window(0)) if uses else ()

    def next_uses(self, num: int) -> Sequence[Use]:
        """The next ``num`` uses of the forward or backward that runs."""
        half = self._half_now
        return half.uses[half.next : half.next + num]

    def begin_forward(self) -> None:
        """A forward begins."""
        self._begin(self._forward)

    def begin_backward(self) -> None:
        """A backward begins."""
        self._begin(self._backward)

    def use(self, unit: int, phase: int) -> Step:
        """A use of ``unit`` begins."""
        self._seen.append(Use(unit, phase))
        return self._half_now.advance(unit, phase)

    def repeats(self, unit: int) -> None:
        """A forward of ``unit`` is repeated within its backward."""
        for place in range(len(self._seen) - 1, -1, -1):
            if self._seen[place].unit == unit:
                self._seen[place] = Use(unit, BOTH)
                return

    def leave(self, unit: int) -> None:
        """A forward of ``unit`` is over, and its backward will come."""
        self._left.append(unit)

    def next_phase(self, unit: int, open_units: Collection[int], has_backward: bool) -> int:
        """Returns the phase of the next use, if it is a use of ``unit``; else 0.

        Args:
            unit: the unit that was just left.
            open_units: units in use, which are skipped.
            has_backward: a backward follows the forward.
        """
        uses, place = self._half_now.uses, self._half_now.next
        while True:
            while place < len(uses) and uses[place].unit in open_units:
                place += 1
            if place < len(uses):
                return uses[place].phase if uses[place].unit == unit else 0
            if not has_backward or uses is not self._forward.uses:
                return 0
            uses, place = self._backward.uses, 0

    def end_forward(self) -> None:
        """A forward of the whole model is over: its order is expected from now on."""
        if self._seen != self._forward.uses:
            self._forward = self._half(self._seen)
            self._forward.next = len(self._seen)
            left = self._left or self.units_in_forward  # without autograd no unit is left for it
            self._backward = self._half([Use(unit, BACKWARD) for unit in reversed(left)])
            self._half_now = self._forward

    def end_backward(self) -> None:
        """A backward is over: its order is expected from now on, unless it was the beginning of the
        expected one."""
        if self._seen != self._backward.uses[: len(self._seen)]:
            self._backward = self._half(self._seen)

    def _begin(self, half: _Half) -> None:
        self._half_now = half
        half.next = 0
        self._seen = []
        self._left = []

    def _half(self, uses: Sequence[Use]) -> _Half:
        return _Half(uses, self._sizes, self._budget)


class Place(enum.IntEnum):
    """Where a rank waits until all others are there, too."""

    BACKWARD = 0
    LAST_BACKWARD = 1
    OUTERMOST = 2
    CALL = 3
    EXIT = 4


class Refreshes:
    """The refreshes of one forward: see [Note: One order on all ranks].

    Args:
        order: the canonical order of units.

    Attributes:
        done: numbers of the units that are refreshed.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.done: set[int] = set()
        self._order = order

    def through(self, last: Unit | None, units: Sequence[Unit]) -> None:
        """Refresh those of ``units`` that changed, in canonical order, up to ``last``; None: all of
        them."""
        compute_now: Ticket | None = None  # the model runs nothing in between
        while len(self.done) < len(self._order):
            unit = units[self._order[len(self.done)]]
            self.done.add(unit.index)
            if not unit.reshards and unit.needs_gather(FORWARD):
                compute_now = compute_now or unit.record_compute()
                unit.gather(FORWARD, compute_now)
            if unit is last:
                return


class Schedule:
    """Gathers units before their uses, and frees them.

    A seam: here all ranks use the same units. The extension for ranks that differ has a subclass,
    which :meth:`.Scheduler.use_schedule` puts in place of this one.

    Args:
        units: all of them, in module order, the root first.
        record: the recorded order.

    Attributes:
        ranks_differ: ranks may use different units.
        record: the recorded order of the uses that come now.
    """

    ranks_differ = False

    def __init__(self, units: Sequence[Unit], record: Record) -> None:
        self.record = record
        self._units = units
        # Units that are unsharded, or in flight, for a use that is expected, with its phase.
        self._reserved: dict[int, int] = {}
        # Of the forward that runs.
        self._refreshes: Refreshes | None = None

    # What a subclass decides.

    def gather(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """On return the gather of ``unit`` for a use of ``phase`` is issued. See
        :meth:`.Unit.gather`."""
        if unit.needs_gather(phase):
            unit.gather(phase, compute_now)

    def gather_ahead(self, window: Sequence[Use], compute_now: Ticket | None) -> None:
        """Issue the gathers of the uses that follow the present one.

        Args:
            window: those uses, as the recorded order has them.
            compute_now: see :meth:`.Unit.gather`.
        """
        for use in window:
            unit = self._units[use.unit]
            if unit.needs_gather(use.phase) and not unit.uses:
                unit.gather(use.phase, compute_now)
                self._reserved[use.unit] = use.phase

    def forward_begins(self) -> None:
        """The outermost module of a forward is called."""

    def forward_ends(self) -> None:
        """A forward is over."""

    def backward_begins(self) -> None:
        """A backward begins."""

    def backward_ends(self) -> None:
        """A backward is over."""

    def check_backward(self, call: Call, schedule: Schedule) -> None:
        """The backward of a call begins whose forward ran with this schedule. Now there is
        ``schedule``."""

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """This rank needs no gather until all ranks are at ``place``. Called before each collective
        outside of the recorded order, and before weights change."""

    def await_reductions(self, place: Place) -> None:
        """This rank is about to wait for the reductions that it has submitted."""

    def before_reduction(self, num_submitted: int, place: Place) -> None:
        """This rank is about to submit a reduction, the ``num_submitted``-th of its backward."""

    def after_reduction(self, num_submitted: int) -> None:
        """This rank has submitted that many reductions in its backward."""

    def has_another_pass(self) -> bool:
        """Whether another rank reduces gradients of its units once more in this backward, and this
        one does not. Collective."""
        return False

    # Uses.

    def begin_forward(self, order: Sequence[int], *, refreshes_now: bool) -> None:
        """A forward begins.

        Args:
            order: the canonical order of units.
            refreshes_now: all refreshes are issued now, into memory that is held anyway.
        """
        self.record.begin_forward()
        self.forward_begins()
        self._refreshes = Refreshes(order)
        if refreshes_now:
            self._refreshes.through(None, self._units)

    def end_forward(self, *, has_refreshes: bool) -> None:
        """A forward is over.

        Args:
            has_refreshes: units are refreshed, which ranks may have entered or not.
        """
        refreshes, self._refreshes = self._refreshes, None
        self.free_reserved(phase=FORWARD)
        self.forward_ends()
        if has_refreshes and refreshes is not None:
            refreshes.through(None, self._units)
            for unit in self._units:
                # Units that this rank did not enter must not read main weights that the next
                # optimizer step writes.
                unit.wait()

    def use(self, unit: Unit, phase: int, *, in_forward: bool = False) -> None:
        """A use of ``unit`` begins: provide its full parameters, and prefetch the next units.

        Args:
            unit: the unit.
            phase: what its weights are read for.
            in_forward: no backward runs.
        """
        if not unit.buffers:
            return
        step = self.record.use(unit.index, phase)
        window, options = step.window, unit.options
        asked = options.prefetch_in_backward if phase & BACKWARD else options.prefetch_in_forward
        if asked is not None:
            each_phase = BACKWARD if phase & BACKWARD else FORWARD
            window = tuple(Use(each.index, each_phase) for each in asked if each.reshards)
        if self._reserved and (in_forward or not step.expected):
            self.free_reserved(
                keep={unit.index, *(use.unit for use in window)},
                phase=BACKWARD if step.expected else BOTH,
            )
        compute_now: Ticket | None = None  # the model runs nothing between these gathers
        if window and unit.reshards and unit.needs_refresh and not unit.is_current:
            compute_now = unit.record_compute()
        self.provide(unit, step.phase, compute_now)
        self._reserved.pop(unit.index, None)
        self.gather_ahead(window, compute_now)
        unit.install()

    def use_once(self, unit: Unit, phase: int) -> None:
        """A use of ``unit`` begins that is not part of the recorded order."""
        self.provide(unit, phase)
        unit.install()

    def provide(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather of ``unit``, unless it is unsharded and current.

        Args:
            unit, phase: the use.
            compute_now: see :meth:`.Unit.gather`.
        """
        refreshes = self._refreshes
        if unit.reshards or refreshes is None or unit.index in refreshes.done:
            self.gather(unit, phase, compute_now)
        elif unit.needs_gather(phase):
            refreshes.through(unit, self._units)

    def leave_forward(self, unit: Unit, entered: Collection[int], *, reads_again: bool) -> None:
        """The last use of ``unit`` in forward, so far, is over.

        Args:
            unit: the unit.
            entered: numbers of units that are still in use.
            reads_again: a backward will come to it, and read its weights.
        """
        phase = self.record.next_phase(unit.index, entered, reads_again)
        if phase:
            self._reserved[unit.index] = phase
        if phase or unit.kept or unit.options.keeps_after_forward:
            unit.uninstall()
            unit.keep_for(phase or BACKWARD)
        else:
            unit.release()

    def leave_backward(self, unit: Unit, entered: Collection[int]) -> None:
        """The last use of ``unit`` in backward, so far, is over.

        Args:
            unit: the unit.
            entered: numbers of units that are still in use.
        """
        phase = self.record.next_phase(unit.index, entered, False)
        if phase:
            self._reserved[unit.index] = phase
            unit.uninstall()
        else:
            unit.end_backward()

    def is_reserved(self, unit: Unit) -> bool:
        """Whether ``unit`` is unsharded for a use that is expected."""
        return unit.index in self._reserved

    def use_reserved(self, unit: Unit) -> None:
        """The use of ``unit`` that was expected, if any was, is the one that begins."""
        self._reserved.pop(unit.index, None)

    def free_reserved(self, keep: Collection[int] = (), phase: int = BOTH) -> None:
        """Free units that are unsharded for a use of ``phase`` that is no longer expected.

        A use of both phases counts as one of backward.
        """
        for index, reserved_for in sorted(self._reserved.items()):
            counts_as = BACKWARD if reserved_for & BACKWARD else FORWARD
            if index in keep or not counts_as & phase:
                continue
            del self._reserved[index]
            unit = self._units[index]
            if unit.uses == 0 and unit.reshards:
                unit.release()

    def gather_before_forward(
        self, order: Sequence[int], *, wait: bool, sharded: bool = True
    ) -> None:
        """Issue the gathers that the next forward would begin with: those of units that are never
        sharded and changed, and (``sharded``) the first ones of the recorded order.

        Args:
            order: the canonical order of units.
            wait: compute waits for them.
            sharded: see above.
        """
        Refreshes(order).through(None, self._units)
        for use in self.record.first if sharded else ():
            unit = self._units[use.unit]
            if unit.reshards and unit.needs_gather(FORWARD):
                unit.gather(FORWARD)
                self._reserved[use.unit] = FORWARD
        if wait:
            for unit in self._units:
                unit.wait()

    def wait(self) -> None:
        """Wait for the gathers in flight, and free prefetched units."""
        for unit in self._units:
            unit.wait()
        self.free_reserved(phase=FORWARD)

    def free_all(self) -> None:
        """Free what ranks may hold differently, so that all hold the same again."""
        self._reserved.clear()
        for unit in self._units:
            if unit.reshards and not unit.uses:
                unit.release()

    def reset(self) -> None:
        """Drop what an exception has interrupted."""
        self._refreshes = None
        self._reserved.clear()


def first_use_order(order: Sequence[int], num_units: int) -> list[int]:
    """Returns all units, each once: those of ``order`` by first use, every other one directly after
    its predecessor by number.

    Example: ``[2, 0, 2]`` of four units, of which 1 and 3 were not used, gives ``[2, 3, 0, 1]``.
    """
    seen = set(order)
    missing: dict[int, list[int]] = {}
    before = -1
    for unit in range(num_units):
        if unit in seen:
            before = unit
        else:
            missing.setdefault(before, []).append(unit)
    result = missing.get(-1, [])
    for unit in dict.fromkeys(order):
        result += [unit, *missing.get(unit, ())]
    return result


def order_digest(order: Sequence[int]) -> bytes:
    """Returns a digest of an order, 8 bytes."""
    return hashlib.sha256(",".join(map(str, order)).encode()).digest()[:8]
