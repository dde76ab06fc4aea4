"""Gathers on demand, for ranks that use different units in training, evaluation or generation.

[Note: Gather rounds]
Sharded weights are gathered from all ranks, so ranks that use different units have to take part in
each other's gathers. Within ``engine.together()`` gathers are issued in *rounds*. In a round each
rank votes for the units that it needs next, in a small message on a separate group. Then all
ranks gather the units that have votes, in module order, or in its reverse while all ranks are in
backward; a rank that did not vote for a unit frees it. A rank without a vote takes part until no
rank is *busy*. So ranks can use any units, in any order and any number of times.

A rank votes for a unit before it uses it. While it computes with one unit, the gather of the next
unit of its own recorded order is in flight, and the vote for the unit after that has been sent.
Where ranks agree, the message has arrived when a rank needs its result.

Ranks that skip different units drift apart. A unit would then be gathered several times, once for
each time at which a rank needs it. So a vote also contains the units that the rank expects to use
afterwards, and a unit that another rank will use soon is *held back* until that rank needs it, too.
If all units with votes are held back, those that a rank waits for are gathered. So in each round at
least one waiting rank gets its unit, unless no rank waits. No unit is held back while some ranks
are in forward and others in backward, because they use units in opposite orders.

On an accelerator compute waits for a gather before its memory can be freed, so a rank keeps the
last two units that were gathered for other ranks, and can use them without another gather. Besides
the units in use, a rank holds the full weights of at most three units for its own next uses, and of
three for other ranks.

A mixture of experts uses other units in each forward, so its recorded order predicts nothing.
``engine.will_use(experts)`` *names* the units that this rank uses next, once routing has chosen
them. A rank votes for all of them in one message, up to ``max_elements`` at a time, and for the
unit that follows them in the recorded order. In forward, a unit that was named before is not
expected until it is named again: nothing is prefetched beyond the place in the recorded order at
which units will be named. In backward the order is known, since it is the reverse of the forward.
Units that one call has named are then gathered in one round as well, together with the unit that
precedes them. A rank holds at most ``max_elements`` elements of full weights of named units, or
twice as many if it waits for reductions or uses units in another order.

A reduction needs all ranks as well, and its staging buffer is freed when it is done. If a rank
waited for a reduction that another rank has not submitted, it would not vote, and the other rank
could not gather the units it needs to submit the reduction. So votes also contain the number of
reductions that the rank has submitted in this backward. A rank waits for a reduction only once all
ranks have submitted it, and takes part in rounds until then. On an accelerator the same order
matters on the device: a stream that waits for a reduction blocks the gathers queued behind it.

At the end of backward, before an optimizer step, and before any other collective of the engine, all
ranks take part until no rank is busy. Then all reductions are submitted, and no rank needs weights
that another rank is about to change. Ranks could wait for each other without end: a rank at the end
of the context never submits the reductions for which a rank within a backward waits. So a rank that
waits at such a place, or for reductions, sends its place with its vote. If ranks wait at different
places, all of them exchange their places and raise an error.

If a rank raises an exception while others may need its votes, it sends a failure instead, so that
all ranks raise.

On a CPU the host drives the lanes. An operation over two axes continues only when its rank waits
for it, which a rank that blocks in a vote cannot do. So, before the next round, each rank waits for
the gathers of the last one and for the reductions that all ranks have submitted. With two axes,
submitting a reduction waits for the previous one, so all ranks submit each reduction in the same
round. Weights in a file are read when their rank waits for the gather, which ranks do in different
orders; so each rank waits for each gather before it submits the next one.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from torch.distributed import ProcessGroup

from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.engine import Engine
from fsdp_engine.runtime.schedule import Place, Schedule, Use
from fsdp_engine.runtime.unit import BACKWARD, FORWARD, Call, State, Unit


class _Status(enum.IntEnum):
    """Status of a rank. A round yields the maximum over all ranks."""

    IDLE = 0
    BUSY = 1
    FAILED = 2


_PLACES = {
    Place.BACKWARD: "in a backward that is not the last of a step",
    Place.LAST_BACKWARD: "in the last backward of a step",
    Place.OUTERMOST: "at the end of a backward with others within it",
    Place.CALL: "at an optimizer step, engine.await_ranks() or another call of all ranks",
    Place.EXIT: "at the end of the context",
    None: "elsewhere",
}


class _Vote(enum.IntEnum):
    """Vote for one unit. A round yields the maximum over all ranks."""

    NONE = 0
    AHEAD = 1  # The rank still computes with another unit.
    NEEDED = 2  # The rank waits for the unit.


# Number of `GatherRounds` made over a group, modulo 255. Equal on all ranks of the group.
_NUM_MADE: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_LARGEST = 255  # largest value of a byte
# Maximum number of units that were gathered for other ranks and are kept. Before such a unit can be
# freed, compute must wait for its gather. This rank may also use it without having expected that.
_MOST_FOR_OTHERS = 2
# Number of coming uses in the recorded order among which the units to gather next are searched.
# Units that one call of `will_use` has named count as one use.
_NUM_EXPECTED = 8
_MOST_NAMED = 8
_IN_BACKWARD = b"\0\1"  # All ranks with votes are in backward.


class _Hint(NamedTuple):
    """One call of ``will_use``.

    Attributes:
        number: The number of the call.
        max_elements: The number of elements of named units to gather at once.
    """

    number: int
    max_elements: int


class _Uses:
    """The uses of units that a rank remembers from one context to the next.

    Attributes:
        record: The order of uses that was recorded in rounds.
        units: Indices of the units used since the first forward after a backward.
        are_over: Whether a backward has followed these uses.
        hints: For each unit that was named before its last forward, the call that named it.
        num_hints: Number of calls that named units.
    """

    def __init__(self, engine: Engine) -> None:
        self.record = engine.scheduler.make_record()
        self.units: set[int] = set()
        self.are_over = False
        self.hints: dict[int, _Hint] = {}
        self.num_hints = 0


class GatherRounds(Schedule):
    """Gathers in rounds; see the module docstring. All ranks must construct one together.

    Args:
        engine: The engine of the model.
    """

    ranks_differ = True

    def __init__(self, engine: Engine) -> None:
        self._uses = engine.extension(_Uses)
        super().__init__(engine.units, self._uses.record)
        self._ranks = engine.ranks
        self._message = HostMessage("together()", engine.ranks)
        self._scheduler, self._reductions = engine.scheduler, engine.reductions
        self._num_reductions = len(engine.reductions.order)
        # The position of each unit in the expected order of backward, which all ranks share.
        expected = engine.scheduler.make_record()
        expected.begin_backward()
        uses = expected.next_uses()
        self._place_in_backward = {use.unit: place for place, use in enumerate(uses)}
        self._host_drives = not engine.lanes.compute.runs_ahead
        self._submitting_waits = engine.reductions.submitting_waits
        self._reads_files = self._host_drives and any(
            not each.weights.main_shard.is_resident
            for unit in engine.units
            for each in unit.buffers
        )
        group = engine.ranks.message_group
        number = 0
        if group is not None:
            number = _NUM_MADE[group] = (_NUM_MADE.get(group, 0) + 1) % _LARGEST
        # The maxima of both bytes add up to `_LARGEST` only if all ranks vote for one engine.
        self._identity = bytes((number, _LARGEST - number))
        # Numbers of reductions submitted in the current backward.
        self._num_submitted = 0
        self._num_submitted_by_all = 0
        # Units of the pending vote. None: no vote is pending.
        self._vote: Sequence[int] | None = None
        self._vote_is_stale = False  # The vote was sent before a reset.
        # Whether some ranks still reduce in a pass of nested backwards ([Note: Passes] in
        # `nested_backwards/reductions.py`), while others are at the end of the outermost backward.
        self._has_another_pass = False
        # Whether other ranks may need votes of this rank.
        self._is_awaited = True
        # Phase of the last use, and indices of the units expected next, in order of use.
        self._phase = FORWARD
        self._expected: list[int] = []
        # Units that `will_use` has named and that are not used yet, in the order given.
        self._named: list[int] = []
        # Whether only named units were used since the last call of `will_use`.
        self._uses_named = False
        # Units gathered for votes of this rank and not used yet.
        self._ahead: list[Unit] = []
        # Units gathered only for votes of other ranks, oldest first.
        self._for_others: list[Unit] = []
        # Units gathered in the last round.
        self._last_round: list[Unit] = []

    def forward_begins(self) -> None:
        """See the base class."""
        if self._uses.are_over:
            self._uses.are_over = False
            self._uses.units.clear()

    def forward_ends(self) -> None:
        """Free the units gathered for other ranks, or for uses that have not happened."""
        for unit in (*self._ahead, *self._for_others):
            self._free(unit)
        self._ahead.clear()
        self._for_others.clear()
        self._named.clear()
        self._uses_named = False

    def backward_begins(self) -> None:
        """Report unused units as ready, since other ranks may wait for their reductions."""
        for unit in self._reductions.order:
            is_used = unit.index in self._uses.units or unit.num_calls > 0
            if not is_used and not unit.awaits_backward(None):
                self._reductions.unit_is_ready(unit)

    def backward_ends(self) -> None:
        """See the base class."""
        self._uses.are_over = True
        self._named.clear()

    def check_backward(self, call: Call, schedule: Schedule) -> None:
        """Check that a backward runs within the context if its forward did.

        Raises:
            RuntimeError: The backward needs a gather, and other ranks may have used other units.
        """
        if call.unit.reshards and not schedule.ranks_differ:
            raise RuntimeError(
                f"backward of unit {call.unit.label}: expected it within engine.together(), as its "
                "forward was, since other ranks may have used other units; found that the context "
                "was left. Call backward() within it, or enter it again (after this exception, "
                "call engine.reset())"
            )

    def gather(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """See the base class.

        Raises:
            RuntimeError: Another rank has raised an exception or is in rounds of another engine, or
                ranks wait for each other at different places.
        """
        self._uses.units.add(unit.index)
        if not unit.reshards:
            super().gather(unit, phase, compute_now)
            return
        self._is_awaited = True
        self._phase = BACKWARD if phase & BACKWARD else FORWARD
        self._note_use(unit.index)
        self._hand_over(unit)
        if self._vote is not None and not self._ahead:
            self._take_part()
        while unit.needs_gather(phase):
            if self._vote is None:
                self._expected = self._next_uses()
                self._send([unit.index], vote=_Vote.NEEDED)
            self._take_part()
        self._hand_over(unit)
        if phase & BACKWARD:
            unit.keep_for(phase)

    def gather_ahead(self, window: Sequence[Use], compute_now: Ticket | None) -> None:
        """Vote for the units that are expected next."""
        self._expect()

    def leave_forward(self, unit: Unit, entered: Collection[int], *, reads_again: bool) -> None:
        """See the base class. A unit is kept if the recorded order has its next use directly after
        this one. Uses of named units in between are skipped, since the next forward may not have
        them."""
        hints = self._uses.hints
        if hints and unit.index not in hints:
            entered = {*entered, *hints}
        super().leave_forward(unit, entered, reads_again=reads_again)

    def will_use(self, units: Iterable[int], max_elements: int | None) -> None:
        """Vote for the units that this rank uses next, and gather them.

        Args:
            units: Indices of the units, in the order of their uses.
            max_elements: The number of elements to gather at once. None: all.

        Raises:
            RuntimeError: As in :meth:`gather`.
        """
        self._named = named = [each for each in units if self._units[each].reshards]
        if max_elements is None:
            max_elements = sum(self._units[each].num_elements for each in named)
        self._uses.num_hints += 1
        self._uses.hints.update(dict.fromkeys(named, _Hint(self._uses.num_hints, max_elements)))
        self._uses_named = True
        self._is_awaited = True
        if self._vote is not None:
            self._take_part()
        self._expect()

    def _note_use(self, index: int) -> None:
        """Remove a unit that is used now from the units that are named or expected."""
        if index in self._named:
            self._named.remove(index)
        else:
            if self._phase == FORWARD:
                self._uses.hints.pop(index, None)
                self._uses_named = False
            if index in self._expected:
                self._named.clear()  # they were named, but not used
        if index in self._expected:
            del self._expected[: self._expected.index(index) + 1]

    def _next_uses(self) -> list[int]:
        """Returns the units that are expected next: those that were named, then those of the
        recorded order. The list is empty if the prefetch window is 0."""
        if not self._scheduler.prefetches:
            return []
        hints, found = self._uses.hints, dict.fromkeys(self._named)
        follows_named, num_stretches, last = self._uses_named, 0, None
        for use in self.record.next_uses():
            hint = hints.get(use.unit)
            if hint is not None and self._phase == FORWARD:
                if follows_named:
                    continue  # The last forward used this unit in place of those named now.
                break
            follows_named = False
            num_stretches += hint is None or hint is not last
            if num_stretches > _NUM_EXPECTED:
                break
            last = hint
            found[use.unit] = None
        return list(found)

    def _at_once(self, wanted: Iterable[int]) -> list[int]:
        """Returns the first units of ``wanted`` to vote for in one message: units that one call of
        ``will_use`` has named, up to its limit, and at most one other unit."""
        found: list[int] = []
        hint: _Hint | None = None
        num_elements, has_other = 0, False
        for index in wanted:
            named = self._uses.hints.get(index)
            if named is None:
                # In backward this unit shares a message with the named units after it, not with
                # those before it. The computation between these two hides the gather.
                if has_other or (found and self._phase == BACKWARD):
                    break
                has_other = True
            else:
                num_elements += self._units[index].num_elements
                if hint is not None and (named is not hint or num_elements > hint.max_elements):
                    break
                hint = named
            found.append(index)
        return found

    def _expect(self) -> None:
        """Vote for the next units of this rank, until one gather is in flight and one vote for the
        units after it is pending. Units that are in one vote count as one gather.

        Raises:
            RuntimeError: As in :meth:`gather`.
        """
        self._expected = wanted = self._next_uses()
        hints = self._uses.hints
        gathered = {unit.index: unit for unit in (*self._ahead, *self._for_others)}
        # The units to hold, some of which may be gathered for other ranks already: all named units,
        # and the next two others. More are not held, since orders can change.
        others = [each for each in wanted if each not in hints]
        others = [each for each in others if each in gathered or self._needs_gather(each)]
        coming = {*(each for each in wanted if each in hints), *others[:2]}
        for unit in self._ahead:
            if unit.index not in coming:
                self._free(unit)
        self._ahead = [unit for unit in self._ahead if unit.index in coming]
        for unit in self._for_others:
            if unit.index in coming and not self._has_enough([unit.index]):
                self._ahead.append(unit)
        self._for_others = [unit for unit in self._for_others if unit not in self._ahead]
        while self._vote is None:
            following = self._at_once(filter(self._needs_gather, wanted))
            if not following or self._has_enough(following):
                return
            self._send(following)
            if not self._ahead:
                self._take_part()
                if not self._ahead:  # The units are held back.
                    self._send(following)

    def _has_enough(self, following: Sequence[int]) -> bool:
        """Returns whether the named units that are gathered exceed the limit of ``following``."""
        hints = self._uses.hints
        limits = [hints[each].max_elements for each in following if each in hints]
        num_elements = sum(unit.num_elements for unit in self._ahead if unit.index in hints)
        return bool(limits) and num_elements > limits[0]

    def before_reduction(self, num_submitted: int, place: Place) -> None:
        """Wait until all ranks submit the reduction, if submitting waits for the previous one."""
        if self._submitting_waits:
            self._num_submitted = num_submitted
            self.await_reductions(place)

    def after_reduction(self, num_submitted: int) -> None:
        """Record the number of submitted reductions, which the next vote sends."""
        self._num_submitted = num_submitted

    def await_reductions(self, place: Place) -> None:
        """Take part in rounds until all ranks have submitted as many reductions as this one.

        Args:
            place: The place where this rank waits: BACKWARD or LAST_BACKWARD.

        Raises:
            RuntimeError: As in :meth:`gather`, or a rank waits at another place.
        """
        while self._num_submitted_by_all < self._num_submitted:
            if self._vote is None:
                self._send(place=place)
            self._take_part(place)

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """Take part in rounds, without votes, until all other ranks have reached ``place``.

        Raises:
            RuntimeError: As in :meth:`gather`, or a rank waits at another place.
        """
        self._is_awaited = True
        status = _Status.BUSY
        while status is not _Status.IDLE or self._has_another_pass:
            self.forward_ends()
            if self._vote is None:
                self._send(status=_Status.IDLE, place=place)
            status = self._take_part(place)
            if self._has_another_pass and place is Place.OUTERMOST:
                return
        self._num_submitted = self._num_submitted_by_all = 0
        self._is_awaited = False

    def has_another_pass(self) -> bool:
        """Returns whether another rank has begun another pass of reductions while this rank is at
        the end of a backward with nested ones. All ranks take part in that pass.

        Raises:
            RuntimeError: As in :meth:`await_ranks`.
        """
        self.await_ranks(Place.OUTERMOST)
        return self._has_another_pass

    def fail(self) -> None:
        """Report an exception of this rank, so that ranks that may wait for its votes raise."""
        if not self._is_awaited:
            return
        self.forward_ends()
        if self._vote is not None:
            status = self._exchange()
            self._vote = None
            if status is _Status.FAILED:
                return
        self._send(status=_Status.FAILED)
        self._finish_last_round()
        self._message.finish()

    def reset(self) -> None:
        """Drop the gathers and the state of the backward. Communication must be finished, except
        for a vote, which other ranks answer later."""
        super().reset()
        self._uses.units.clear()
        self._last_round.clear()
        self._ahead.clear()
        self._for_others.clear()
        self._named.clear()
        self._uses_named = False
        self._num_submitted = self._num_submitted_by_all = 0
        self._vote_is_stale = self._vote is not None

    def _hand_over(self, unit: Unit) -> None:
        """Remove a unit that is used now from the units to free: it is freed after its use."""
        for gathered in (self._ahead, self._for_others):
            if unit in gathered:
                gathered.remove(unit)

    def _needs_gather(self, index: int) -> bool:
        unit = self._units[index]
        return unit.reshards and not unit.uses and unit.needs_gather(FORWARD)

    def _send(
        self,
        units: Sequence[int] = (),
        *,
        vote: _Vote = _Vote.AHEAD,
        status: _Status = _Status.BUSY,
        place: Place | None = None,
    ) -> None:
        """Send a vote for ``units``. ``place`` is where this rank waits, or None."""
        num_units = len(self._units)
        content = bytearray(2 * num_units)
        phases = [False, False]
        if status is _Status.BUSY:
            for each in filter(self._needs_gather, self._expected):
                content[num_units + each] = 1
            for each in units:
                content[each], content[num_units + each] = vote, 0
            phases[self._phase == BACKWARD] = True
        content += bytes(phases)
        content += bytes(self._num_submitted)
        content += b"\1" * (self._num_reductions - self._num_submitted)
        content += bytes(each is place for each in Place)
        content.append(status)
        content += self._identity
        self._message.start(content)
        self._vote = units

    def _take_part(self, place: Place | None = None) -> _Status:
        """Gather the units with votes, or raise if a rank has failed.

        Args:
            place: The place that this rank has sent.

        Returns:
            The maximum status over all ranks.

        Raises:
            RuntimeError: As in :meth:`gather`, or a rank waits at another place.
        """
        status = self._exchange(place)
        self._vote = None
        if status is _Status.FAILED:
            self._is_awaited = False
            raise RuntimeError(
                "together(): expected no exception on any rank; found one on another rank: see its "
                "output"
            )
        return status

    def _exchange(self, place: Place | None = None) -> _Status:
        """Finish the pending vote and gather the units with votes; returns the maximum status."""
        self._finish_last_round()
        *found, number, complement = bytes(self._message.finish())
        votes, status = bytes(found[: -1 - len(Place)]), _Status(found[-1])
        if number + complement != _LARGEST:
            self._is_awaited = False
            raise RuntimeError(
                "together(): expected all ranks in forwards and backwards of one engine; found "
                "ranks in those of two. Enter the context of one engine at a time"
            )
        if status is _Status.FAILED:
            return status
        places = [each for each in Place if found[each - 1 - len(Place)]]
        self._has_another_pass = places == [Place.BACKWARD, Place.OUTERMOST]
        if len(places) > 1 and not self._has_another_pass:
            self._raise_places(place)
        num_units = len(self._units)
        at = 2 * num_units
        own, phases = self._vote or (), votes[at : at + 2]
        indices = to_gather(votes[:num_units], votes[num_units:at], phases)
        if phases == _IN_BACKWARD:
            # Embeddings have no place and come last: backward reads their weights only if a
            # checkpoint repeats their forward.
            indices.sort(key=lambda index: self._place_in_backward.get(index, num_units))
        for index in indices:
            self._gather(self._units[index], is_own=index in own)
            while len(self._for_others) > _MOST_FOR_OTHERS:
                self._free(self._for_others.pop(0))
        at += 2
        missing = votes.find(1, at)
        if self._vote_is_stale:
            self._vote_is_stale = False
        else:
            by_all = self._num_reductions if missing < 0 else missing - at
            self._num_submitted_by_all = by_all
        return status

    def _raise_places(self, own: Place | None) -> NoReturn:
        """Raise an error on all ranks that lists the ranks at each place."""
        self._is_awaited = False
        places = bytearray(self._ranks.size)
        places[self._ranks.rank] = len(Place) if own is None else own
        message = HostMessage("together()", self._ranks)
        message.start(places)
        ranks_at: dict[int, list[int]] = {}
        for rank, place in enumerate(message.finish()):
            ranks_at.setdefault(place, []).append(self._ranks.ranks[rank])
        texts = []
        for number, text in enumerate(_PLACES.values()):
            if ranks := ranks_at.get(number):
                more = len(ranks) - _MOST_NAMED
                named = ", ".join(map(str, ranks[:_MOST_NAMED])) + (
                    f" and {more} more" if more > 0 else ""
                )
                texts.append(f"rank{'s' if len(ranks) > 1 else ''} {named} {text}")
        raise RuntimeError(
            "together(): expected the same number of backwards and of collective calls on all "
            f"ranks within the context; found {'; '.join(texts)}. Give all ranks the same number "
            "of batches (engine.even_batches), or let a rank that has none run a forward with loss "
            "0"
        )

    def _gather(self, unit: Unit, *, is_own: bool) -> None:
        if unit.state is not State.SHARDED:
            unit.gather_again()
            return
        # Weights may have two encodings, for forward and for backward. Other ranks may need either.
        unit.gather(unit.unknown_phase)
        if self._reads_files:
            unit.wait()
        self._last_round.append(unit)
        (self._ahead if is_own else self._for_others).append(unit)

    def _finish_last_round(self) -> None:
        """Wait for the operations that all ranks have submitted, if the host drives the lanes."""
        if self._host_drives:
            for unit in self._last_round:
                unit.wait()
            self._reductions.finish_first(self._num_submitted_by_all)
        self._last_round.clear()

    @staticmethod
    def _free(unit: Unit) -> None:
        if not unit.uses:
            unit.release()


@contextmanager
def together(engine: Engine) -> Iterator[None]:
    """Context within which ranks may use different modules, for training, evaluation and
    generation. Collective: all ranks enter and leave it together.

    Ranks may leave out modules, and use them in any order and any number of times. Under
    ``no_grad`` they may run different numbers of forwards. With gradients, each rank must run the
    same number of backwards; gradients are means over all ranks, as outside of the context. A rank
    that finishes its backward or leaves the context takes part in the gathers of other ranks until
    all ranks have done so. From the start of forward until then no other collective may run. Each
    gather takes one additional small message. At levels below ``optim_grads_params``, where ranks
    may use different modules anyway, the context costs one message per backward.

    Example: towers for images and sound, where a rank's batch has either or neither::

        for batch in loader:
            with engine.together():
                model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        engine: The engine of the model.

    Raises:
        RuntimeError: A forward or backward is running, contexts are nested, or another rank raised
            an exception within the context. Also raised, on all ranks, if the numbers of backwards
            differ. The message names the ranks and the places at which they wait.
    """
    if not any(unit.reshards or unit.needs_refresh for unit in engine.units):
        yield
        return
    scheduler = engine.scheduler
    if not scheduler.is_at_rest or scheduler.ranks_differ:
        found = "such a context" if scheduler.ranks_differ else f"a {scheduler.phase}"
        raise RuntimeError(
            "together(): expected no forward or backward in progress and no such context; "
            f"found {found} (after an exception, call engine.reset())"
        )
    scheduler.gather_before_forward(wait=True, sharded=False)
    scheduler.schedule.free_all()
    rounds = GatherRounds(engine)
    scheduler.use_schedule(rounds)
    try:
        try:
            yield
        except GeneratorExit:  # A generator of the user was closed within the context.
            rounds.await_ranks(Place.EXIT)
            raise
        rounds.await_ranks(Place.EXIT)
    except Exception:
        rounds.fail()
        raise
    finally:
        scheduler.use_schedule(None)


def _ranks_can_differ(engine: Engine) -> bool:
    """Returns whether ranks may now run different numbers of forwards under ``no_grad``: within
    ``together``, or if forwards do not communicate."""
    full_main = engine.guard.full_main
    if engine.scheduler.ranks_differ or all(full_main(b, 0) is not None for b in engine.buffers):
        return True
    return not any(unit.reshards or unit.needs_refresh for unit in engine.units)


ranks_can_differ = property(_ranks_can_differ)


def to_gather(votes: bytes, expected: bytes, phases: bytes) -> list[int]:
    """Returns the indices of the units to gather in a round; see [Note: Gather rounds].

    Args:
        votes: Maximum vote of all ranks for each unit.
        expected: For each unit, whether a rank will use it after the units that it votes for.
        phases: Whether any rank is in forward, and whether any is in backward.
    """
    voted = [index for index, vote in enumerate(votes) if vote]
    if all(phases):
        return voted
    return [index for index in voted if not expected[index]] or [
        index for index in voted if votes[index] == _Vote.NEEDED
    ]
