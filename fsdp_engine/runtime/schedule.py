"""When units are gathered and freed: the recorded order of uses, and the prefetches based on it.

[Note: Recorded order]
    f0 f1 .. fn | bn .. b1 b0

Units are numbered. A *use* is a unit and a phase, in which its weights are read. In forward, a use
is recorded when a unit is entered; a unit that is called twice is recorded twice. In backward, a
use is recorded when a gradient reaches a unit, and when a checkpoint repeats a unit's forward. The
next microbatch is expected to follow the same order. The position in this order determines

- the units to prefetch: the next uses, within the budget (a *prefetch window*). No window extends
  from forward into backward, because the loss between them has the peak memory of the step;
- whether a unit is kept unsharded when it is left: it is kept if the next use is its own. So the
  last block is kept for its backward, and so are the units that contain it.

Before the first backward, units are expected in the reverse of the order in which forward has left
them, so that a unit that contains others precedes them in both orders. If execution differs from
the recorded order, prefetched units are freed, units are gathered on demand, and a new order is
recorded.

[Note: One order on all ranks]
Collectives of one group must be issued in one order on all ranks. Units with sharded parameters are
gathered when they are entered, so all ranks must enter the same units, unless a subclass of
:class:`Schedule` is in use. Units whose parameters are never sharded are gathered only after their
weights have changed (a *refresh*), and ranks may enter different ones. So refreshes are issued in
the canonical order of units, up to the unit that is entered. The rest is issued when forward ends.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD, Call, Unit


class Use(NamedTuple):
    """One use of a unit: the number of the unit, and a phase (FORWARD, BACKWARD or BOTH)."""

    unit: int
    phase: int


class Step(NamedTuple):
    """A position in the recorded order.

    Attributes:
        phase: The recorded phase of the use.
        window: The uses to prefetch, nearest first.
        expected: Whether the use was the next one of the recorded order.
    """

    phase: int
    window: tuple[Use, ...]
    expected: bool


def prefetch_windows(
    uses: Sequence[Use], sizes: Sequence[int], budget: int
) -> list[tuple[Use, ...]]:
    """Returns the prefetch window of each position in ``uses``, nearest uses first.

    Units are added to a window while its number of elements is less than ``budget``. So a window
    has at least one unit, unless the budget is 0, and exceeds the budget by less than one unit.

    Args:
        uses: The uses, in their order.
        sizes: Number of elements of each unit. Units of 0 elements are not gathered, and skipped.
        budget: The prefetch window in elements.

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


class _PhaseUses:
    """The recorded uses of forward or of backward, and the position of the next one."""

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
        """Returns the prefetch window of a position."""
        return self._steps[place].window

    def advance(self, unit: int, phase: int) -> Step:
        """Advance the position past the use that begins, and return its recorded step. A use out of
        order is searched for after the current position, then from the start. A use that is not
        recorded has no window, and does not change the position."""
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
        forward: Units in the order in which the first forward is expected to enter them.
        backward: Units in the order in which the first backward is expected to enter them.
        sizes, budget: See :func:`prefetch_windows`.
    """

    def __init__(
        self, forward: Sequence[int], backward: Sequence[int], sizes: Sequence[int], budget: int
    ) -> None:
        self._sizes = sizes
        self._budget = budget
        self._forward = self._phase_uses([Use(unit, FORWARD) for unit in forward])
        self._backward = self._phase_uses([Use(unit, BACKWARD) for unit in backward])
        self._current = self._forward
        self._seen: list[Use] = []
        self._left: list[int] = []

    @property
    def units_in_forward(self) -> list[int]:
        """The units in the order in which forward enters them."""
        return [use.unit for use in self._forward.uses]

    @property
    def first(self) -> tuple[Use, ...]:
        """The first use of forward, and its prefetch window."""
        uses = self._forward.uses
        return (uses[0], *self._forward.window(0)) if uses else ()

    def next_uses(self) -> Iterator[Use]:
        """Returns the next uses of the running forward or backward."""
        recorded = self._current
        return itertools.islice(recorded.uses, recorded.next, None)

    def begin_forward(self) -> None:
        """Begin the record of a forward."""
        self._begin(self._forward)

    def begin_backward(self) -> None:
        """Begin the record of a backward."""
        self._begin(self._backward)

    def use(self, unit: int, phase: int) -> Step:
        """Record a use of ``unit``. Returns its position in the order that was recorded before."""
        self._seen.append(Use(unit, phase))
        return self._current.advance(unit, phase)

    def repeats(self, unit: int) -> None:
        """Change the phase of the last recorded use of ``unit`` to BOTH, because the unit's forward
        is repeated within its backward."""
        for place in range(len(self._seen) - 1, -1, -1):
            if self._seen[place].unit == unit:
                self._seen[place] = Use(unit, BOTH)
                return

    def leave(self, unit: int) -> None:
        """Record that a forward of ``unit`` has ended and that its backward will follow."""
        self._left.append(unit)

    def next_phase(self, unit: int, open_units: Collection[int], has_backward: bool) -> int:
        """Returns the phase of the next use if it is a use of ``unit``, else 0.

        Args:
            unit: The unit that was just left.
            open_units: Units that are still in use, whose uses are skipped.
            has_backward: A backward follows the forward.
        """
        uses, place = self._current.uses, self._current.next
        while True:
            while place < len(uses) and uses[place].unit in open_units:
                place += 1
            if place < len(uses):
                return uses[place].phase if uses[place].unit == unit else 0
            if not has_backward or uses is not self._forward.uses:
                return 0
            uses, place = self._backward.uses, 0

    def end_forward(self) -> None:
        """End a forward of the model. Its order is expected for the next forward."""
        if self._seen != self._forward.uses:
            self._forward = self._phase_uses(self._seen)
            self._forward.next = len(self._seen)
            # Without autograd no unit was recorded by leave().
            left = self._left or self.units_in_forward
            self._backward = self._phase_uses([Use(unit, BACKWARD) for unit in reversed(left)])
            self._current = self._forward

    def end_backward(self) -> None:
        """End a backward. Its order is expected for the next backward, unless it was only the
        beginning of the expected order."""
        if self._seen != self._backward.uses[: len(self._seen)]:
            self._backward = self._phase_uses(self._seen)

    def _begin(self, recorded: _PhaseUses) -> None:
        self._current = recorded
        recorded.next = 0
        self._seen = []
        self._left = []

    def _phase_uses(self, uses: Sequence[Use]) -> _PhaseUses:
        return _PhaseUses(uses, self._sizes, self._budget)


class Place(enum.IntEnum):
    """The places in a step at which a rank waits until all other ranks have reached them."""

    BACKWARD = 0
    LAST_BACKWARD = 1
    OUTERMOST = 2
    CALL = 3
    EXIT = 4


class Refreshes:
    """The refreshes of one forward: see [Note: One order on all ranks].

    Args:
        order: The canonical order of units.

    Attributes:
        done: Numbers of the units that were refreshed, or needed no refresh.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.done: set[int] = set()
        self._order = order

    def through(self, last: Unit | None, units: Sequence[Unit]) -> None:
        """Refresh units whose weights have changed, in canonical order, up to ``last``. None: up to
        the end of the order."""
        # One ticket serves all gathers of this call, since compute gets no work between them.
        compute_now: Ticket | None = None
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

    A seam: with this class, all ranks use the same units. An extension for ranks that use different
    units has a subclass, which :meth:`.Scheduler.use_schedule` installs.

    Args:
        units: All units of the model, in module order, the root first.
        record: The recorded order of uses.

    Attributes:
        ranks_differ: Whether ranks may use different units.
        record: The recorded order of uses.
    """

    ranks_differ = False

    def __init__(self, units: Sequence[Unit], record: Record) -> None:
        self.record = record
        self._units = units
        # The numbers of units that are gathered, or being gathered, for an expected use, each with
        # the phase of this use.
        self._reserved: dict[int, int] = {}
        # The refreshes of the running forward.
        self._refreshes: Refreshes | None = None

    # Methods for subclasses to override.

    def gather(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather of ``unit`` for a use of ``phase``, if it is needed. See
        :meth:`.Unit.gather`."""
        if unit.needs_gather(phase):
            unit.gather(phase, compute_now)

    def gather_ahead(self, window: Sequence[Use], compute_now: Ticket | None) -> None:
        """Prefetch the units of the next uses.

        Args:
            window: The next uses of the recorded order, which are to be prefetched.
            compute_now: See :meth:`.Unit.gather`.
        """
        for use in window:
            unit = self._units[use.unit]
            if unit.needs_gather(use.phase) and not unit.uses:
                unit.gather(use.phase, compute_now)
                self._reserved[use.unit] = use.phase

    def forward_begins(self) -> None:
        """Called when the outermost module of a forward is called."""

    def forward_ends(self) -> None:
        """Called when a forward has ended."""

    def backward_begins(self) -> None:
        """Called when a backward begins."""

    def backward_ends(self) -> None:
        """Called when a backward has ended."""

    def check_backward(self, call: Call, schedule: Schedule) -> None:
        """Called when the backward of ``call``, whose forward ran with this schedule, begins with
        another one, ``schedule``. May raise an error."""

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """Wait until all ranks have reached ``place``, and take part in their gathers until then.
        Called before each collective outside of the recorded order, and before weights change."""

    def await_reductions(self, place: Place) -> None:
        """Called before this rank waits for the reductions that it has submitted."""

    def before_reduction(self, num_submitted: int, place: Place) -> None:
        """Called before this rank submits reduction number ``num_submitted`` of its backward."""

    def after_reduction(self, num_submitted: int) -> None:
        """Called when this rank has submitted ``num_submitted`` reductions in its backward."""

    def has_another_pass(self) -> bool:
        """Returns whether another rank reduces gradients of its units once more in this backward,
        while this rank does not. Collective."""
        return False

    # Uses of units.

    def begin_forward(self, order: Sequence[int], *, refreshes_now: bool) -> None:
        """Begin a forward.

        Args:
            order: The canonical order of units.
            refreshes_now: Issue all refreshes now, which needs no additional memory.
        """
        self.record.begin_forward()
        self.forward_begins()
        self._refreshes = Refreshes(order)
        if refreshes_now:
            self._refreshes.through(None, self._units)

    def end_forward(self, *, has_refreshes: bool) -> None:
        """End a forward.

        Args:
            has_refreshes: The model has units that are refreshed, some of which this rank may not
                have entered.
        """
        refreshes, self._refreshes = self._refreshes, None
        self.free_reserved(phase=FORWARD)
        self.forward_ends()
        if has_refreshes and refreshes is not None:
            refreshes.through(None, self._units)
            for unit in self._units:
                # Refreshes of units that this rank did not enter must be done before the next
                # optimizer step writes the main weights.
                unit.wait()

    def use(self, unit: Unit, phase: int, *, in_forward: bool = False) -> None:
        """Begin a use of ``unit``: provide its full parameters, and prefetch the next units.

        Args:
            unit: The unit.
            phase: The phase of the use.
            in_forward: No backward is running.
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
        # One ticket serves all gathers of this call, since compute gets no work between them.
        compute_now: Ticket | None = None
        if window and unit.reshards and unit.needs_refresh and not unit.is_current:
            compute_now = unit.record_compute()
        self.provide(unit, step.phase, compute_now)
        self._reserved.pop(unit.index, None)
        self.gather_ahead(window, compute_now)
        unit.install()

    def use_once(self, unit: Unit, phase: int) -> None:
        """Begin a one-off use of ``unit``, which is not recorded."""
        self.provide(unit, phase)
        unit.install()

    def provide(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather of ``unit``, unless it is unsharded and current.

        Args:
            unit, phase: The unit and the phase of the use.
            compute_now: See :meth:`.Unit.gather`.
        """
        refreshes = self._refreshes
        if unit.reshards or refreshes is None or unit.index in refreshes.done:
            self.gather(unit, phase, compute_now)
        elif unit.needs_gather(phase):
            refreshes.through(unit, self._units)

    def leave_forward(self, unit: Unit, entered: Collection[int], *, reads_again: bool) -> None:
        """End the last of the running uses of ``unit`` in forward.

        Args:
            unit: The unit.
            entered: Numbers of the units that are still in use.
            reads_again: A backward will follow and read the weights of the unit.
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
        """End the last of the running uses of ``unit`` in backward.

        Args:
            unit: The unit.
            entered: Numbers of the units that are still in use.
        """
        phase = self.record.next_phase(unit.index, entered, False)
        if phase:
            self._reserved[unit.index] = phase
            unit.uninstall()
        else:
            unit.end_backward()

    def is_reserved(self, unit: Unit) -> bool:
        """Returns whether ``unit`` is held for an expected use."""
        return unit.index in self._reserved

    def use_reserved(self, unit: Unit) -> None:
        """Begin the expected use of ``unit``: it is no longer held for this use."""
        self._reserved.pop(unit.index, None)

    def free_reserved(self, keep: Collection[int] = (), phase: int = BOTH) -> None:
        """Free units that are held for a use of ``phase`` that is no longer expected.

        A use of both phases counts as a use of backward.

        Args:
            keep: Numbers of units that are not freed.
            phase: The phase of the uses.
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
        """Issue the gathers with which the next forward would begin.

        Args:
            order: The canonical order of units.
            wait: Make compute wait for the gathers.
            sharded: Gather the first units of the recorded order. False: only refresh units whose
                parameters are never sharded and whose weights have changed.
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
        """Free all units that are not in use, so that all ranks hold the same units."""
        self._reserved.clear()
        for unit in self._units:
            if unit.reshards and not unit.uses:
                unit.release()

    def reset(self) -> None:
        """Drop the state of a forward or backward that an exception has interrupted."""
        self._refreshes = None
        self._reserved.clear()


def first_use_order(order: Sequence[int], num_units: int) -> list[int]:
    """Returns the numbers of all units, in the order of their first use in ``order``. A unit that
    is not in ``order`` follows its predecessor by number.

    Example: for ``[2, 0, 2]`` and four units, of which 1 and 3 are not used, the result is
    ``[2, 3, 0, 1]``.
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
    """Returns a digest of an order of units, which has 8 bytes."""
    return hashlib.sha256(",".join(map(str, order)).encode()).digest()[:8]
