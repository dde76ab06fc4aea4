"""When: which unit's gradients are reduced next, how many at once, and what users see after.

[Note: Order of reductions]
Reductions must be issued in one order on all ranks, but ranks may finish units in different
orders (a rank's batch may not reach an expert, say). So they are issued strictly in the reverse of
the *canonical order*: a unit that is ready early waits for those before it, and what autograd
never reached is closed, with zeros, when backward ends. The canonical order is the module order
until all ranks agree on a better one: the order of the last forward. They compare it, by a digest,
in the message of [Note: Who got a gradient] (``step_message.py``), and only if all digests are
equal all of them adopt it.

[Note: A step's gradients]
From cleared gradients to the next clearing, a step goes through:

    cleared --backward--> accumulating --backward of the last microbatch, or start--> issued
       ^                       ^                                                         |
       |                       +-- backward -- final <-- end of backward, or finish -----+
       +------ zero_grad, zero_grad_buffer ------+

A backward after the end adds to what is reduced: [Note: Reducing again] in ``reducing_again.py``.
``zero_grad`` is seen when the next backward begins.

``Timing`` says which of the two: ``shard``'s own engine goes all the way within the last backward;
under ``DistributedDataParallel`` the last backward issues (``overlap_grad_reduce``) or only
accumulates, and ``finish_grad_sync`` does what is left. Axes that cut gradients are reduced in
every backward, whatever the timing.

[Note: Reductions left in flight]
A backward that is not the step's last has said that gradients are not complete, so where lanes go
on without the host (``Lane.runs_ahead``) it ends without waiting for its reductions. They are over
before the next backward stages anything. Whoever gets, sets or clears ``.grad`` of a sharded
parameter, clips, scales, zeroes buffers or steps waits for them first (``GradientReads`` in
``flat_dtensor/outside_reads.py``). Who has looked may hold the tensor, which the next reduction
writes: from then until gradients are cleared, each backward waits as it ends. On CPU it always
does: the host drives the reductions, and a rank that looked and one that did not would drive them
in different orders.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Sequence

import torch

from fsdp_engine.config import StagingBudget, Timing
from fsdp_engine.devices.lane import Lanes
from fsdp_engine.devices.lanes import GradientStream
from fsdp_engine.devices.ranks import Ranks
from fsdp_engine.runtime.gradient_checks import GradientChecks
from fsdp_engine.runtime.step_message import StepMessage
from fsdp_engine.runtime.turns import Came, InFlight, Turns
from fsdp_engine.runtime.unit import Unit

_MOST_NAMED = 8


class Phase(enum.Enum):
    """Where a step's gradients are: see [Note: A step's gradients]."""

    CLEARED = "cleared"
    ACCUMULATING = "accumulating"
    ISSUED = "issued"
    FINAL = "final"


# Any may be cleared.
TRANSITIONS = {
    (Phase.CLEARED, Phase.ACCUMULATING),
    (Phase.CLEARED, Phase.ISSUED),  # no microbatch at all on this rank
    (Phase.ACCUMULATING, Phase.ACCUMULATING),
    (Phase.ACCUMULATING, Phase.ISSUED),
    (Phase.ISSUED, Phase.FINAL),
    (Phase.FINAL, Phase.ACCUMULATING),
}


class Reductions:
    """Issues reductions in canonical order within a memory budget.

    Args:
        units: all of them, in module order.
        lanes: of the engine.
        ranks: all ranks of the model.
        budget: staging that may be in flight.
        timing: how far a backward goes.
        checks: what looks at gradients before they travel; None: nothing does.

    Attributes:
        stream: on which gradients are written and reductions waited for.
        sync: this backward is the last microbatch of a step, or may be (``no_sync`` denies it).
        canonical_order: units in forward order, the same on all ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        lanes: Lanes,
        ranks: Ranks,
        budget: StagingBudget,
        timing: Timing,
        checks: GradientChecks | None,
    ) -> None:
        self._units = tuple(units)
        self._timing = timing
        self._checks = checks
        self.sync = True
        self._seen_order = [unit.index for unit in units]
        self.canonical_order = self._seen_order
        self._buffers = [buffer for unit in units for buffer in unit.trainable]
        self._message = StepMessage(self._buffers, ranks.message_group, ranks.device, checks)
        self._queue = self._make_queue()
        self.stream = GradientStream(ranks.device)
        self._in_flight = InFlight(lanes, budget, [unit.num_staged for unit in units])
        self._wait_later = weakref.WeakMethod(self.wait) if lanes.compute.runs_ahead else None
        self._turns = Turns(len(units))
        self._phase = Phase.CLEARED
        self._hooks_are_due = False

    @property
    def are_final(self) -> bool:
        """Whether the step's gradients are reduced, and shown."""
        return self._phase is Phase.FINAL

    @property
    def num_steps(self) -> int:
        """Steps whose last reductions were issued."""
        return self._message.num_started

    def are_reduced(self, unit: Unit) -> bool | None:
        """Whether what users see of the unit's gradients is reduced; None: some are accumulated
        that are not."""
        is_final = self._phase is Phase.FINAL and unit.index not in self._turns.partial
        if is_final or all(buffer.shown.are_cleared for buffer in unit.trainable):
            return is_final
        return False if self._phase is Phase.CLEARED else None

    def check_step(self, params: Iterable[torch.Tensor]) -> None:
        """An optimizer is about to step ``params`` with their ``.grad``.

        Raises:
            RuntimeError: one of these is accumulated and not reduced; names its parameter.
        """
        if self._phase is Phase.CLEARED or (self.are_final and not self._turns.partial):
            return
        stepped = {id(param) for param in params}
        for unit in self._units:
            if not unit.trainable or self.are_reduced(unit) is not None:
                continue
            for buffer in unit.trainable:
                name = buffer.name_of_unreduced(stepped)
                if name is not None:
                    raise RuntimeError(
                        f"optimizer step: expected a reduced gradient of {name}; found one that is "
                        "accumulated on this rank, under no_sync() or before finish_grad_sync(). "
                        "Run the backward of the last microbatch outside no_sync(), then step"
                    )

    def order_seen(self, order: list[int]) -> None:
        """Forward has recorded an order of all units."""
        self._seen_order = order

    def has_open_gradients(self, unit: Unit) -> bool:
        """Whether this backward has brought some of the unit's, not yet reduced."""
        return self._turns.came[unit.index] is Came.SOME

    def begin_backward(self, *, inputs_only: bool = False) -> None:
        """A backward begins.

        Args:
            inputs_only: it brings no gradients of parameters, on any rank.

        Raises:
            RuntimeError: reductions are issued and not finished; weight gradients of the last
                backward were put off and have not come; a gradient was edited between microbatches.
        """
        self.stream.begin()
        self._message.finish()
        if self._turns.is_closing:
            raise RuntimeError(
                f"backward: expected the weight gradients of {self._missing()}, which the last "
                "backward put off, to be computed first (backward_dw); found them missing"
            )
        if self._phase is Phase.ISSUED:
            raise RuntimeError(
                "backward: expected finish_grad_sync() after the last microbatch's backward; found "
                "another backward. Run all microbatches but the last under no_sync()"
            )
        if self._timing.finishes_backward or self._phase is not Phase.ACCUMULATING:
            for unit in self._queue:
                reduced = self._phase is Phase.FINAL and unit.index not in self._turns.partial
                for buffer in unit.trainable:
                    buffer.begin_backward(reduced=reduced)
        self._move_to(Phase.ACCUMULATING)
        # Settled now: gradients may come late, when a no_sync() is over.
        partial = frozenset(unit.index for unit in self._queue if not unit.options.syncs)
        is_last = self.sync and self._timing.reduces_in_backward and not inputs_only
        is_last = is_last and len(partial) < max(len(self._queue), 1)
        self._turns.begin(is_last=is_last, inputs_only=inputs_only, partial=partial)

    def open_unit(self, unit: Unit) -> None:
        """The unit's first gradient of this backward is about to be written."""
        came = self._turns.came
        if came[unit.index] is Came.SOME:
            return
        if came[unit.index] is Came.REDUCED:
            raise RuntimeError(
                f"a gradient for unit {unit.label} came after its reduction had started: expected "
                "one gradient per parameter and backward; found a second one (a parameter that is "
                "used in several re-entrant checkpoints?). Put the modules that share it into one "
                "unit, or use checkpoint(..., use_reentrant=False)"
            )
        self._in_flight.make_room(unit)
        came[unit.index] = Came.SOME
        for buffer in unit.trainable:
            assert buffer.grads is not None
            buffer.grads.begin()

    def unit_is_ready(self, unit: Unit) -> None:
        """All gradients of the unit that this backward brings have come, or will come later."""
        if unit.trainable:
            self._turns.unit_is_ready(unit)
            with self.stream.entered():
                self._advance()

    def late_gradient_came(self, unit: Unit) -> None:
        """The last weight gradient that ``unit``'s modules had put off has come."""
        with self.stream.entered():
            self._advance()
            if self._turns.is_closing and not self._turns.waiting(self._queue):
                self._close()

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for it, show the gradients, as far as this
        engine's timing has it."""
        self._turns.is_closing = True
        with self.stream.entered():
            self._advance()
            if not self._turns.waiting(self._queue):
                self._close()

    def start(self, *, wait: bool = False) -> None:
        """Issue the last reductions of the step, unless they are issued already.

        Args:
            wait: return when they are done.
        """
        if self._turns.is_open or self._phase in (Phase.ISSUED, Phase.FINAL):
            return  # backward issues them, or has
        self.wait()
        for buffer in self._buffers if self._phase is Phase.CLEARED else ():
            buffer.begin_backward(reduced=False)  # no microbatch at all on this rank: zeros
        for unit in self._queue:
            tickets = []
            for buffer in unit.trainable:
                grads = buffer.grads
                assert grads is not None
                grads.zero_fresh()
                if self._checks is not None and not grads.writes_to_staging:
                    self._checks.look(buffer)
                ticket = grads.reduce(microbatch=False, last=True)
                if ticket is not None:
                    tickets.append(ticket)
            self._in_flight.add(unit, tickets, staged=False)
        self._issued()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Compute waits for everything that is issued."""
        if len(self._in_flight):
            with self.stream.entered():
                self._in_flight.finish()
        for buffer in self._buffers:
            buffer.reads.gradients.in_flight = None

    def finish(self) -> None:
        """On return gradients are final, and shown.

        Raises:
            RuntimeError: a backward is not over, or its weight gradients have not all come; names
                parameters. Or what checks of gradients found, on all ranks.
        """
        if self._turns.is_open:
            raise RuntimeError(
                "finish_grad_sync: expected the gradients of all parameters; found a backward that "
                "is not over, or weight gradients put off by it (backward_dw): missing are those "
                f"of {self._missing()}"
            )
        if self._phase is Phase.FINAL:
            return
        self.start()
        self.wait()
        self._publish()
        self._turns.forget()
        self._move_to(Phase.FINAL)

    def run_hooks(self) -> None:
        """Run users' hooks on gradients that have become final, and add earlier gradients to them;
        the engine must be at rest."""
        if self._hooks_are_due:
            self._hooks_are_due = False
            for unit in self._queue:
                if unit.index not in self._turns.partial:
                    for buffer in unit.trainable:
                        buffer.run_hooks()

    def clear(self, *, zero: bool) -> None:
        """A new step begins: what is accumulated counts no more.

        Args:
            zero: and becomes zero. False: it is overwritten by the next gradients.

        Raises:
            RuntimeError: a backward is not over.
        """
        if self._turns.is_open:
            raise RuntimeError(
                "zero_grad_buffer: expected no backward under way; found one without the gradients "
                f"of {self._missing()} (after an exception, call engine.reset())"
            )
        self.wait()
        self._message.finish()
        self._turns.forget()
        for buffer in self._buffers:
            buffer.discard_gradients(keeps_memory=zero)
            if zero and buffer.grads is not None:
                buffer.grads.zero()
        self._phase = Phase.CLEARED

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients that are there, reduced or accumulated so far."""
        self.wait()
        for buffer in self._buffers:
            assert buffer.grads is not None
            buffer.grads.scale(factor, self._phase is Phase.FINAL)
            buffer.shown.scale_held(factor)

    def reset(self) -> None:
        """Forget this backward and all accumulated gradients."""
        self._in_flight.forget()
        self._turns.end()
        self._turns.forget()
        self._phase = Phase.CLEARED
        self._message.forget()
        for buffer in self._buffers:
            buffer.discard_gradients()

    def _make_queue(self) -> list[Unit]:
        """Trainable units in the order of their reductions."""
        order = [self._units[index] for index in reversed(self.canonical_order)]
        return [unit for unit in order if unit.trainable]

    def _advance(self) -> None:
        """Reduce, in order, what is ready."""
        while (unit := self._turns.next(self._queue)) is not None:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Issue what this backward has to reduce of ``unit``."""
        last = self._turns.is_last and unit.index not in self._turns.partial
        if not self.has_open_gradients(unit):
            if not last and (self._turns.inputs_only or not unit.num_staged):
                return  # nothing came, nothing travels: what was accumulated stays
            self.open_unit(unit)
        tickets = []
        for buffer in unit.trainable:
            grads = buffer.grads
            assert grads is not None
            buffer.shown.note_used()
            grads.finish_writing()
            if self._checks is not None and (last or grads.writes_to_staging):
                self._checks.look(buffer)
            ticket = grads.reduce(microbatch=True, last=last)
            if ticket is not None:
                tickets.append(ticket)
        self._turns.came[unit.index] = Came.REDUCED
        self._in_flight.add(unit, tickets, staged=True)

    def _close(self) -> None:
        """All that this backward brings has come and is issued."""
        self._turns.end()
        for buffer in self._buffers:
            buffer.shown.end_backward()
        if self._turns.is_last:
            self._issued()
            if self._timing.finishes_backward:
                self.finish()
            return
        if self._timing.finishes_backward:
            for unit in self._queue:
                self._publish_partial(unit)
        self._turns.forget()
        self._leave_in_flight()

    def _leave_in_flight(self) -> None:
        """See [Note: Reductions left in flight]."""
        reads = [buffer.reads.gradients for buffer in self._buffers]
        if self._wait_later is None or any(each.were_asked for each in reads):
            self.wait()
        elif len(self._in_flight):
            self._in_flight.end_backward()
            for each in reads:
                each.in_flight = self._wait_later

    def _issued(self) -> None:
        self._move_to(Phase.ISSUED)
        self._message.start(self._seen_order)

    def _publish_partial(self, unit: Unit) -> None:
        """Between microbatches: ``.grad`` is there wherever something is accumulated, on any rank,
        so that the user's clearing it can be seen."""
        for buffer in unit.trainable:
            if self._turns.came[unit.index] is Came.REDUCED:
                buffer.publish_gradients([True] * len(buffer.records), reduced=False)
            else:
                buffer.shown.put_back()

    def _publish(self) -> None:
        new_order = self._seen_order != self.canonical_order
        verdict = self._message.read(new_order)
        if new_order and verdict.same_order:
            self.canonical_order = self._seen_order
            self._queue = self._make_queue()
        if verdict.problem is not None:
            self.clear(zero=False)
            raise RuntimeError(verdict.problem)
        self._hooks_are_due = True
        for unit in self._queue:
            if unit.index in self._turns.partial:
                self._publish_partial(unit)
                continue
            for buffer in unit.trainable:
                used = verdict.used.get(id(buffer), buffer.shown.used)
                buffer.publish_gradients(used, reduced=True)

    def _move_to(self, phase: Phase) -> None:
        assert (self._phase, phase) in TRANSITIONS, (
            f"gradients: {self._phase.value} -> {phase.value} is not a legal transition"
        )
        self._phase = phase

    def _missing(self) -> str:
        """Names of parameters whose gradients this backward has not brought so far."""
        came = self._turns.came
        names = [
            record.name
            for unit in self._turns.waiting(self._queue)
            for buffer in unit.trainable
            if buffer.grads is not None and came[unit.index] is not Came.REDUCED
            for record, has_come in zip(buffer.records, buffer.grads.touched, strict=True)
            if not has_come
        ]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more
