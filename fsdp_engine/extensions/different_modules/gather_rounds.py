"""Gathers on demand, where ranks use different units: training, evaluation and generation.

[Note: Gather rounds]
Sharded weights are gathered from all ranks, so ranks that compute different things have to take
part in each other's gathers. Within ``engine.together()`` gathers are issued in *rounds*. In a
round each rank votes for the unit that it needs next, in a small message beside training. Then
all ranks gather units with votes, in module order; a rank that did not vote for a unit frees it.
A rank without a vote takes part until no rank is *busy*. So ranks can use any units, in any order
and as often as they like.

A rank votes for a unit before it uses it: while it computes with one unit, the gather of the next
one (of its own recorded order) is in flight, and the vote for the one after that is sent. Where
ranks agree, the message is over when a rank needs its result.

Ranks that leave out different units drift apart, and would gather each unit once for each place.
So a vote also says which units the rank expects to use after that, and a unit that another rank
will use soon is *held back* until that rank needs it, too. If all units with votes are held back,
those that a rank waits for are gathered. So each round serves a rank that waits, or none waits.
Where some ranks are in forward and others in backward, which go in opposite directions, no unit is
held back.

On an accelerator compute waits for a gather before its memory can be freed, so the last two units
that were gathered for other ranks are kept. A rank that needs one of them unexpectedly has it. So
beside units that it uses a rank has the full weights of at most three for its own next uses, of two
for other ranks, and during a round of those that others have voted for: one for each other rank.

A reduction needs all ranks, too, and its staging is freed when it is over. A rank that waited for
a reduction which another rank has not submitted would not vote, and the other rank could not
gather what it needs to get there. So votes also say which units' reductions a rank has submitted
in this backward. A rank waits for a reduction once all have submitted it, and takes part in rounds
until then. On an accelerator the same order matters on the device: a stream that waits for a
reduction would hold up gathers that are queued behind it.

At the end of backward, before an optimizer steps, and before any other collective of the engine,
all ranks take part until none is busy. Then all reductions are submitted, and no rank needs weights
that another one is about to change. A rank that is there says where it is, as does one that waits
for reductions: a rank at the end of the context will never submit those of another's backward. If
ranks wait at different places, all of them tell each other where they are, and raise.

A rank that raises an exception while others may need its votes sends a failure instead, so that all
ranks raise.

Lanes on CPU are driven by the host. An operation of two axes continues only when its rank waits
for it, which a rank that blocks in a vote does not do. So there each rank waits, before the next
round, for the gathers of the last one, and for reductions that all ranks have submitted. And with
two axes to submit a reduction is to wait for the one before: all ranks submit each in one round.
Weights in a file are read before they are sent, when their rank waits for them, which ranks do in
different orders: there they wait for each gather before they submit the next one.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from torch.distributed import ProcessGroup

from fsdp_engine.comm.host_message import HostMessage
from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.engine import Engine
from fsdp_engine.runtime.schedule import Place, Schedule, Use
from fsdp_engine.runtime.unit import BACKWARD, FORWARD, Call, State, Unit


class _Status(enum.IntEnum):
    """What a rank does; of all ranks the maximum is known after a round."""

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
    """Of one unit; of all ranks the maximum is known after a round."""

    NONE = 0
    AHEAD = 1  # the rank computes with another unit
    NEEDED = 2  # the rank waits for it


# Rounds that were made over the ranks of a group: all of these have made as many.
_NUM_MADE: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
_LARGEST = 255  # byte
# Units that are not freed at once, so that compute waits for no gather that is in flight, and that
# this rank may use although it does not expect to.
_MOST_FOR_OTHERS = 2
# Places of the recorded order among which the next two units to gather are.
_NUM_EXPECTED = 8
_MOST_NAMED = 8


class _Uses:
    """What a rank remembers from one context to the next: its uses of units.

    Attributes:
        record: the order of uses that it has recorded in rounds.
        units: numbers of the units used since the first forward after a backward.
        are_over: a backward has followed them.
    """

    def __init__(self, engine: Engine) -> None:
        self.record = engine.scheduler.make_record()
        self.units: set[int] = set()
        self.are_over = False


class GatherRounds(Schedule):
    """See the module docstring. Collective: all ranks make one, and take part until none is busy.

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
        # If maximum and complement still add up, all ranks vote about one engine.
        self._identity = bytes((number, _LARGEST - number))
        # Of this backward.
        self._num_submitted = 0
        self._num_submitted_by_all = 0
        # The vote that is sent and not answered; -1: for no unit; None: there is none.
        self._vote: int | None = None
        self._vote_is_stale = False  # sent before a reset
        # Ranks wait in a pass of nested backwards, and others for the outermost one.
        self._has_another_pass = False
        # Other ranks may need this one's votes.
        self._is_awaited = True
        # Of its last use; and units that it expects to use next, by number, in order.
        self._phase = FORWARD
        self._expected: list[int] = []
        # Gathered for votes of this rank, and not used so far.
        self._ahead: list[Unit] = []
        # Gathered for votes of other ranks alone, oldest first.
        self._for_others: list[Unit] = []
        # Gathered in the last round.
        self._last_round: list[Unit] = []

    def forward_begins(self) -> None:
        """See the base class."""
        if self._uses.are_over:
            self._uses.are_over = False
            self._uses.units.clear()

    def forward_ends(self) -> None:
        """Free units that were gathered for uses that did not come, or for other ranks."""
        for unit in (*self._ahead, *self._for_others):
            self._free(unit)
        self._ahead.clear()
        self._for_others.clear()

    def backward_begins(self) -> None:
        """Others can wait for the reductions of units that this rank does not use."""
        for unit in self._reductions.order:
            is_used = unit.index in self._uses.units or unit.num_calls > 0
            if not is_used and not unit.awaits_backward(None):
                self._reductions.unit_is_ready(unit)

    def backward_ends(self) -> None:
        """See the base class."""
        self._uses.are_over = True

    def check_backward(self, call: Call, schedule: Schedule) -> None:
        """Refuse a backward outside of the context.

        Raises:
            RuntimeError: its unit is gathered, and other ranks may have used other units.
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
            RuntimeError: another rank has raised an exception, or is in rounds of another engine;
                or ranks wait for each other at different places.
        """
        self._uses.units.add(unit.index)
        if not unit.reshards:
            super().gather(unit, phase, compute_now)
            return
        self._is_awaited = True
        self._phase = BACKWARD if phase & BACKWARD else FORWARD
        if unit.index in self._expected:
            del self._expected[: self._expected.index(unit.index) + 1]
        self._hand_over(unit)
        if self._vote is not None and not self._ahead:
            self._take_part()
        while unit.needs_gather(phase):
            if self._vote is None:
                self._send(unit.index, vote=_Vote.NEEDED)
            self._take_part()
        self._hand_over(unit)
        if phase & BACKWARD:
            unit.keep_for(phase)

    def gather_ahead(self, window: Sequence[Use], compute_now: Ticket | None) -> None:
        """Vote for units that are expected."""
        self._expect(self.record.next_uses(_NUM_EXPECTED if self._scheduler.prefetches else 0))

    def _expect(self, uses: Iterable[Use]) -> None:
        """Vote for units that this rank will use next: one is in flight while another is voted for.

        Args:
            uses: the next ones of its recorded order; none: nothing is gathered ahead.

        Raises:
            RuntimeError: as :meth:`gather`.
        """
        self._expected = wanted = list(dict.fromkeys(use.unit for use in uses))
        gathered = {unit.index: unit for unit in (*self._ahead, *self._for_others)}
        # Also one that another rank has voted for earlier; no more, since orders can change.
        coming = [each for each in wanted if each in gathered or self._needs_gather(each)][:2]
        for unit in self._ahead:
            if unit.index not in coming:
                self._free(unit)
        self._ahead = [gathered[each] for each in coming if each in gathered]
        self._for_others = [unit for unit in self._for_others if unit not in self._ahead]
        while self._vote is None:
            following = next(filter(self._needs_gather, wanted), None)
            if following is None:
                return
            self._send(following)
            if not self._ahead:
                self._take_part()
                if not self._ahead:  # it is held back
                    self._send(following)

    def before_reduction(self, num_submitted: int, place: Place) -> None:
        """Wait until all ranks submit it, where to submit is to wait for the one before."""
        if self._submitting_waits:
            self._num_submitted = num_submitted
            self.await_reductions(place)

    def after_reduction(self, num_submitted: int) -> None:
        """Tell other ranks with the next vote."""
        self._num_submitted = num_submitted

    def await_reductions(self, place: Place) -> None:
        """Take part until all ranks have announced as many reductions as this one.

        Args:
            place: BACKWARD or LAST_BACKWARD.

        Raises:
            RuntimeError: as :meth:`gather`; or a rank waits at another place.
        """
        while self._num_submitted_by_all < self._num_submitted:
            if self._vote is None:
                self._send(place=place)
            self._take_part(place)

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """This rank needs nothing until all others have reached ``place``: take part until then.

        Raises:
            RuntimeError: as :meth:`gather`; or a rank waits at another place.
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
        """Whether another rank has begun another pass of reductions, where this one is at the end
        of a backward within which others have run. All take part in it.

        Raises:
            RuntimeError: as :meth:`await_ranks`.
        """
        self.await_ranks(Place.OUTERMOST)
        return self._has_another_pass

    def fail(self) -> None:
        """This rank has raised an exception: others, which may wait for its votes, raise one."""
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
        """Drop gathers and the backward; communication is over, but for a vote, which others
        answer."""
        super().reset()
        self._uses.units.clear()
        self._last_round.clear()
        self._ahead.clear()
        self._for_others.clear()
        self._num_submitted = self._num_submitted_by_all = 0
        self._vote_is_stale = self._vote is not None

    def _hand_over(self, unit: Unit) -> None:
        """The unit is used: it is freed when it is left."""
        for gathered in (self._ahead, self._for_others):
            if unit in gathered:
                gathered.remove(unit)

    def _needs_gather(self, index: int) -> bool:
        unit = self._units[index]
        return unit.reshards and not unit.uses and unit.needs_gather(FORWARD)

    def _send(
        self,
        unit: int = -1,
        *,
        vote: _Vote = _Vote.AHEAD,
        status: _Status = _Status.BUSY,
        place: Place | None = None,
    ) -> None:
        """Vote for the unit of that number; -1: for none. ``place``: where this rank waits."""
        num_units = len(self._units)
        content = bytearray(2 * num_units)
        phases = [False, False]
        if status is _Status.BUSY:
            later = self._expected
            if unit >= 0:
                content[unit] = vote
                if unit in later:
                    later = later[later.index(unit) + 1 :]
            for each in filter(self._needs_gather, later):
                content[num_units + each] = 1
            phases[self._phase == BACKWARD] = True
        content += bytes(phases)
        content += bytes(self._num_submitted)
        content += b"\1" * (self._num_reductions - self._num_submitted)
        content += bytes(each is place for each in Place)
        content.append(status)
        content += self._identity
        self._message.start(content)
        self._vote = unit

    def _take_part(self, place: Place | None = None) -> _Status:
        """Gather what ranks have voted for; returns the status of all. ``place``: as sent."""
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
        """The vote that is sent is answered: gather what ranks have voted for."""
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
        for index in to_gather(votes[:num_units], votes[num_units:at], votes[at : at + 2]):
            self._gather(self._units[index], is_own=index == self._vote)
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
        """Ranks wait at different places: raise, on all ranks, with the ranks at each place."""
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
            "together(): expected all ranks to run equally many backwards and calls of all ranks "
            f"within the context; found {'; '.join(texts)}. Give all ranks equally many batches "
            "(engine.even_batches), or let a rank that has none run a forward with loss 0"
        )

    def _gather(self, unit: Unit, *, is_own: bool) -> None:
        if unit.state is not State.SHARDED:
            unit.gather_again()
            return
        # Of two encodings of weights ranks can need either.
        unit.gather(unit.unknown_phase)
        if self._reads_files:
            unit.wait()
        self._last_round.append(unit)
        (self._ahead if is_own else self._for_others).append(unit)

    def _finish_last_round(self) -> None:
        """Wait for the operations that all ranks have submitted, if the host drives them."""
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
    """Context within which ranks can use different modules: for training, evaluation and
    generation. Collective: all ranks enter it, and leave it together.

    Ranks may leave out modules, use them in any order and as often as they like, and without
    gradients run different numbers of forwards. With gradients each rank runs as many
    backwards; gradients are those of the mean over ranks, as at other levels. A rank that has
    finished its backward, or leaves the context, takes part in the gathers of the others until
    all have. No other collective may run between a forward's begin and that. Each gather takes
    one small message more. At levels below ``optim_grads_params``, where ranks may differ
    anyway, it costs one message for each backward.

    Example: towers for images and sound, of which a rank's batch has one, or none::

        for batch in loader:
            with engine.together():
                model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        engine: The engine of the model.

    Raises:
        RuntimeError: a forward or backward is running, or contexts are nested; or another rank
            raised an exception within the context. On all ranks: they ran different numbers of
            backwards; names the ranks and where they wait.
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
        except GeneratorExit:  # a generator of the user's was closed within the context
            rounds.await_ranks(Place.EXIT)
            raise
        rounds.await_ranks(Place.EXIT)
    except Exception:
        rounds.fail()
        raise
    finally:
        scheduler.use_schedule(None)


def _ranks_can_differ(engine: Engine) -> bool:
    """Whether ranks may now run different numbers of forwards without gradients: within
    :func:`together`, or where forwards do not communicate."""
    full_main = engine.guard.full_main
    if engine.scheduler.ranks_differ or all(full_main(b, 0) is not None for b in engine.buffers):
        return True
    return not any(unit.reshards or unit.needs_refresh for unit in engine.units)


ranks_can_differ = property(_ranks_can_differ)


def to_gather(votes: bytes, expected: bytes, phases: bytes) -> list[int]:
    """Units that are gathered in a round; see [Note: Gather rounds].

    Args:
        votes: The votes of all ranks, by unit.
        expected: whether a rank will use it after the unit that it votes for.
        phases: whether ranks are in forward, and in backward.
    """
    voted = [index for index, vote in enumerate(votes) if vote]
    if all(phases):
        return voted
    return [index for index in voted if not expected[index]] or [
        index for index in voted if votes[index] == _Vote.NEEDED
    ]
