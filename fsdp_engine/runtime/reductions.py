"""The order of reductions, their number in flight, and when gradients are published.

[Note: Order of reductions]
Reductions must be issued in one order on all ranks, but ranks may finish units in different orders
(for example, a rank's batch may not reach an expert). So reductions are issued strictly in the
reverse of the *canonical order*: a unit that is ready early waits for the units before it, and
units that autograd has not reached are reduced, with zeros, when backward ends. The canonical order
is the module order until all ranks agree on the order of the last forward, which is usually better.
Each rank sends a digest of its order in the message of [Note: Who got a gradient]
(``step_message.py``), and the order is adopted if all digests are equal. Units without hooks are
not part of the order of forward, and keep the module order. These are units that send nothing in
forward, such as all units at ``no_shard`` in one dtype.

[Note: A step's gradients]
From one clearing of gradients to the next, the gradients of a step have these phases:

    cleared --backward--> accumulating --backward of the last microbatch, or start--> issued
       ^                       ^                                                         |
       |                       +-- backward -- final <-- end of backward, or finish -----+
       +------ zero_grad, zero_grad_buffer ------+

A backward after the final phase adds to reduced gradients: [Note: Reducing again] in
``gradient_scale.py``. The next backward detects a call of ``zero_grad``.

Where the diagram has two alternatives, ``Timing`` selects one. In an engine of ``shard``, the last
backward issues reductions and ends in the final phase. Under ``DistributedDataParallel``, the last
backward issues reductions (``overlap_grad_reduce``) or only accumulates, and ``finish_grad_sync``
does the rest. Along axes over which gradients are sharded, every backward reduces, independently of
the timing.

[Note: Reductions left in flight]
After a backward that is not the step's last, gradients are not complete. So where lanes run without
the host (``Lane.runs_ahead``), such a backward ends without waiting for its reductions. The next
backward waits for them before it stages gradients. Reading, setting or clearing ``.grad`` of a
sharded parameter, clipping, scaling, zeroing buffers and optimizer steps also wait for them
(``GradientAccess`` in ``flat_dtensor/parameter_access.py``).

In three cases each backward waits for its reductions at its end. First, a user who has read
``.grad`` may hold the tensor, which the next reduction writes; this case lasts until gradients are
cleared. Second, on CPU the host drives the reductions, and a rank that has read ``.grad`` would
drive them in another order than other ranks. Third, gradients in host memory are only known to be
written when the host has waited for the device.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.lanes import GradientStream, Lanes
from fsdp_engine.comm.pending_steps import finish_pending_steps
from fsdp_engine.options import StagingBudget, Timing
from fsdp_engine.runtime.gradient_observer import GradientObserver
from fsdp_engine.runtime.pending_reductions import PendingReductions
from fsdp_engine.runtime.schedule import Place, Schedule
from fsdp_engine.runtime.step_message import StepMessage
from fsdp_engine.runtime.unit import Unit


class GradientArrival(enum.Enum):
    """The gradients of one unit that have arrived in a backward."""

    NOTHING = "nothing"
    SOME = "some"
    REDUCED = "all, and their reduction is submitted"


class ReductionQueue:
    """The reductions of one backward, in the reverse of the canonical order.

    Args:
        units: The trainable units, in the order of their reductions.
        is_last: Whether this is the last backward of the step.
        inputs_only: Whether the backward computes no gradients of parameters.
        partial: Numbers of units whose gradients the backward only accumulates, even if it is the
            last backward for other units.

    Attributes:
        is_last, inputs_only, partial: See the arguments.
        autograd_is_done: Whether autograd has finished. Weight gradients that modules compute after
            backward may still be missing.
        num_submitted: Number of units whose reduction was submitted or is not needed.
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

    @property
    def place(self) -> Place:
        """The place in the step at which a rank waits for other ranks during this backward."""
        return Place.LAST_BACKWARD if self.is_last else Place.BACKWARD

    def arrival(self, unit: Unit) -> GradientArrival:
        """Returns which gradients of ``unit`` have arrived."""
        return self._arrivals.get(unit.index, GradientArrival.NOTHING)

    def set_arrival(self, unit: Unit, arrival: GradientArrival) -> None:
        """Record which gradients of ``unit`` have arrived."""
        self._arrivals[unit.index] = arrival

    def set_ready(self, unit: Unit) -> None:
        """Mark ``unit`` as ready: its gradients of this backward have arrived or are postponed."""
        self._ready.add(unit.index)

    def next(self) -> Unit | None:
        """Remove the next unit from the queue and return it; None: that unit is not ready, or the
        queue is empty."""
        if self.num_submitted == len(self._units):
            return None
        unit = self._units[self.num_submitted]
        if unit.num_late or not (self.autograd_is_done or unit.index in self._ready):
            return None
        self.num_submitted += 1
        return unit

    @property
    def waiting(self) -> Sequence[Unit]:
        """The units that are still in the queue."""
        return self._units[self.num_submitted :]

    @property
    def reduced(self) -> Collection[int]:
        """Numbers of the units for which all reductions of this backward are submitted."""
        return {index for index, each in self._arrivals.items() if each is GradientArrival.REDUCED}


_MOST_NAMED = 8


class Phase(enum.Enum):
    """The phase of a step's gradients: see [Note: A step's gradients]."""

    CLEARED = "cleared"
    ACCUMULATING = "accumulating"
    ISSUED = "issued"
    FINAL = "final"


# The legal transitions, except clearing, which is legal in each phase.
TRANSITIONS = {
    (Phase.CLEARED, Phase.ACCUMULATING),
    (Phase.CLEARED, Phase.ISSUED),  # this rank had no microbatch in the step
    (Phase.ACCUMULATING, Phase.ACCUMULATING),
    (Phase.ACCUMULATING, Phase.ISSUED),
    (Phase.ISSUED, Phase.FINAL),
    (Phase.FINAL, Phase.ACCUMULATING),
}


@dataclass
class StepReductions:
    """The reductions of one step, from its first backward until gradients are cleared.

    Attributes:
        phase: The phase of the gradients, which is not CLEARED.
        partial: Numbers of units whose gradients the last backward has accumulated, not reduced.
        reduced_units: Numbers of units whose accumulation buffers were written since gradients were
            last published.
        hooks_are_due: Whether users' hooks must still run on the final gradients.
    """

    phase: Phase
    partial: frozenset[int] = frozenset()
    reduced_units: set[int] = field(default_factory=set)
    hooks_are_due: bool = False


class Reductions:
    """Issues reductions in the reverse of the canonical order, within a memory budget.

    Args:
        units: All units of the model, in module order.
        lanes: The lanes of the engine.
        ranks: All ranks of the model.
        budget: The limit on staging buffers in flight.
        timing: Whether backward issues and finishes reductions.

    Attributes:
        ranks: See the argument.
        observers: Objects that are called with the gradients of each step, in this order.
        stream: The stream on which gradients are written and which waits for reductions.
        sync: Whether a backward can be the last one of its step. False within ``no_sync``.
        canonical_order: Numbers of all units, in an order that is equal on all ranks: the module
            order, later that of a forward. Reductions follow the reverse order.
        order: The trainable units in the order of their reductions.
        schedule: The schedule of gathers, which the scheduler sets.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        lanes: Lanes,
        ranks: Ranks,
        budget: StagingBudget,
        timing: Timing,
    ) -> None:
        self._units = tuple(units)
        self._timing = timing
        self.ranks = ranks
        self.observers: list[GradientObserver] = []
        self.schedule: Schedule
        self.sync = True
        self._seen_order: Sequence[int] = [unit.index for unit in units]
        self.canonical_order: Sequence[int] = self._seen_order
        self._buffers = [buffer for unit in units for buffer in unit.trainable]
        self._numbers = {id(buffer): number for number, buffer in enumerate(self._buffers)}
        self._message = StepMessage(self._buffers, ranks.message_group, ranks.device)
        self.order = self._make_order()
        self.stream = GradientStream(ranks.device)
        self._on_stream = self.stream.entered if self.stream.exists else nullcontext
        self._pending = PendingReductions(lanes, budget, [unit.num_staged for unit in units])
        self._runs_ahead = lanes.compute.runs_ahead
        # If the host drives reductions and a buffer has two axes of several ranks, submitting a
        # reduction waits for the first axis of the previous one: see HostLane.submit.
        self.submitting_waits = not self._runs_ahead and any(
            min(buffer.mesh.inner.size, buffer.mesh.outer.size) > 1 for buffer in self._buffers
        )
        self._wait_later = weakref.WeakMethod(self.wait) if self._runs_ahead else None
        # State of the running backward and of the running step; None between two of them.
        self._queue: ReductionQueue | None = None
        self._step: StepReductions | None = None

    @property
    def phase(self) -> Phase:
        """The phase of the step's gradients."""
        return Phase.CLEARED if self._step is None else self._step.phase

    @property
    def are_final(self) -> bool:
        """Whether the step's gradients are reduced and published."""
        return self.phase is Phase.FINAL

    @property
    def num_steps(self) -> int:
        """Number of steps whose last reductions were issued."""
        return self._message.num_started

    def are_reduced(self, unit: Unit) -> bool | None:
        """Returns whether the unit's gradients are reduced and published. False: it has none, or
        they were cleared. None: some are accumulated and not reduced."""
        is_final = self._is_final(unit)
        if is_final or all(buffer.published.are_cleared for buffer in unit.trainable):
            return is_final
        return False if self._step is None else None

    def check_reduced(self, params: Iterable[torch.Tensor], what: str) -> None:
        """Check that the gradients of ``params`` are reduced, before ``what`` uses them.

        Raises:
            RuntimeError: A ``.grad`` is accumulated and not reduced. The message names the
                parameter.
        """
        if self._step is None or (self.are_final and not self._step.partial):
            return
        stepped = {id(param) for param in params}
        for unit in self._units:
            if not unit.trainable or self.are_reduced(unit) is not None:
                continue
            for buffer in unit.trainable:
                name = buffer.name_of_unreduced(stepped)
                if name is not None:
                    raise RuntimeError(
                        f"{what}: expected a reduced gradient of {name}; found one that is "
                        "accumulated on this rank, under no_sync() or before finish_grad_sync(). "
                        "First run the backward of the last microbatch outside no_sync(), or call "
                        "finish_grad_sync()"
                    )

    def wait_for_each_backward(self) -> None:
        """Make each later backward wait for its reductions at its end. Where the host drives
        reductions, also make it wait for each reduction before it submits the next one. Extensions
        call this method if their operations use the results of reductions."""
        self.submitting_waits = not self._runs_ahead
        self._wait_later = None

    def order_seen(self, order: list[int]) -> None:
        """Record the order of all units in the last forward."""
        self._seen_order = order

    def begin_backward(self, *, inputs_only: bool = False) -> None:
        """Begin a backward.

        Args:
            inputs_only: The backward computes no gradients of parameters on any rank.

        Raises:
            RuntimeError: Reductions are issued and not finished, postponed weight gradients of the
                last backward are missing, or a gradient was edited between microbatches.
            Exception: An observer raised an error.
        """
        self.stream.begin()
        finish_pending_steps()
        self._message.finish()
        if self._queue is not None and self._queue.autograd_is_done:
            raise RuntimeError(
                f"backward: expected the weight gradients of {self._missing()}, which the last "
                "backward postponed, to be computed first; found them missing. Call backward_dw()"
            )
        if self.phase is Phase.ISSUED:
            raise RuntimeError(
                "backward: expected finish_grad_sync() after the last microbatch's backward; found "
                "another backward. Run all microbatches but the last under no_sync()"
            )
        if not inputs_only:
            for each in self.observers:
                each.begin_backward()
        if self._timing.finishes_backward or self.phase is not Phase.ACCUMULATING:
            for unit in self.order:
                reduced = self._is_final(unit)
                for buffer in unit.trainable:
                    buffer.begin_backward(reduced=reduced)
        self._move_to(Phase.ACCUMULATING)
        # This is decided now, because gradients may arrive after the end of a no_sync() context.
        partial = frozenset(unit.index for unit in self.order if not unit.options.syncs)
        is_last = not inputs_only and self._is_last(partial)
        if is_last:
            self._check_last(partial)
        self._queue = ReductionQueue(
            self.order, is_last=is_last, inputs_only=inputs_only, partial=partial
        )

    def _is_last(self, partial: Collection[int]) -> bool:
        """Returns whether the backward that begins is the step's last one. ``partial``: the units
        whose gradients it only accumulates."""
        is_last = self.sync and self._timing.reduces_in_backward
        return is_last and len(partial) < max(len(self.order), 1)

    def _check_last(self, partial: frozenset[int]) -> None:
        for each in self.observers:
            each.check_last([self._units[index] for index in sorted(partial)])

    def open_unit(self, unit: Unit) -> None:
        """Allocate buffers for the gradients of ``unit`` in this backward, before the first one is
        written."""
        queue = self._queue
        assert queue is not None
        arrival = queue.arrival(unit)
        if arrival is GradientArrival.SOME:
            return  # a postponed gradient has already opened the unit
        if arrival is GradientArrival.REDUCED:
            queue = self._reduce_again(queue, unit)
        if not self._pending.have_room(unit):
            self.schedule.await_reductions(queue.place)
        self._pending.make_room(unit)
        queue.set_arrival(unit, GradientArrival.SOME)
        for buffer in unit.trainable:
            assert buffer.grads is not None
            buffer.grads.begin()

    def _reduce_again(self, queue: ReductionQueue, unit: Unit) -> ReductionQueue:
        """Handle a gradient of ``unit`` that arrives after the unit's reduction was submitted. A
        subclass can begin a second queue for this backward, and return it.

        Raises:
            RuntimeError: The gradients of a unit are reduced only once in a backward.
        """
        raise RuntimeError(
            f"backward of unit {unit.label}: expected one gradient per parameter and backward; "
            "found a second one, after the reduction of the first had started (is a parameter used "
            "in several re-entrant checkpoints?). Put the modules that share it into one unit, or "
            "use checkpoint(..., use_reentrant=False)"
        )

    def unit_is_ready(self, unit: Unit) -> None:
        """Record that the gradients of ``unit`` in this backward have arrived or are postponed. The
        unit is reduced after the units that precede it in the queue."""
        if unit.trainable:
            assert self._queue is not None
            self._queue.set_ready(unit)
            with self._on_stream():
                self._advance(self._queue)

    def finish_first(self, num: int) -> None:
        """Wait for the reductions of the first ``num`` units of this backward."""
        self._pending.finish_first(self.order[:num])

    def on_late_gradient(self, unit: Unit) -> None:
        """Called when the last postponed weight gradient of ``unit`` has arrived."""
        queue = self._queue
        assert queue is not None
        with self._on_stream():
            self._advance(queue)
            if queue.autograd_is_done and not queue.waiting:
                self._close(queue)

    def end_backward(self) -> None:
        """End a backward: reduce the remaining units. Depending on the timing of the engine, also
        wait for pending reductions and publish the gradients."""
        queue = self._queue
        assert queue is not None
        queue.autograd_is_done = True
        with self._on_stream():
            self._advance(queue)
            if not queue.waiting:
                self._close(queue)

    def start(self, *, wait: bool = False) -> None:
        """Issue the last reductions of the step, unless they are issued already.

        Args:
            wait: Wait for the reductions before returning.
        """
        if self._queue is not None or self.phase in (Phase.ISSUED, Phase.FINAL):
            return  # backward issues them, or has issued them
        self.wait()
        for buffer in self._buffers if self._step is None else ():
            buffer.begin_backward(reduced=False)  # this rank had no microbatch, and sends zeros
        self._start_last()
        self._issued()
        if wait:
            self.wait()

    def _start_last(self, partial: Collection[int] = ()) -> None:
        """Submit the reductions of the last microbatch, except those of units ``partial``."""
        for unit in self.order:
            if unit.index in partial:
                continue
            submitted = []
            for buffer in unit.trainable:
                grads = buffer.grads
                assert grads is not None
                grads.zero_missing()
                if not grads.writes_to_staging:
                    for each in self.observers:
                        each.before_sending(buffer)
                reduction = grads.reduce(last=True)
                if reduction is not None:
                    submitted.append(reduction)
            self._pending.add(unit, submitted, staged=False)

    def wait(self) -> None:
        """Make compute wait for all reductions that were issued."""
        if self._pending:
            with self._on_stream():
                self._pending.finish()
            for each in self.observers:
                each.waited()
        for buffer in self._buffers:
            buffer.reads.gradients.in_flight = None

    def finish(self) -> None:
        """Finish the reductions of the step and publish its gradients.

        Raises:
            RuntimeError: A backward has not ended, or postponed weight gradients are missing. The
                message names the parameters.
            Exception: An observer raised an error.
        """
        if self._queue is not None:
            raise RuntimeError(
                "finish_grad_sync: expected the gradients of all parameters; found none yet of "
                f"{self._missing()}. Finish the backward and call postponed backward_dw(), or, "
                "after an exception, engine.reset()"
            )
        if self.phase is Phase.FINAL:
            return
        self.start()
        self.wait()
        assert self._step is not None
        if self._publish(self._step):
            self._move_to(Phase.FINAL)

    def run_hooks(self) -> None:
        """Run users' hooks on final gradients. See :meth:`.ParamAndGradBuffer.run_hooks`. No
        forward or backward may be running."""
        step = self._step
        if step is not None and step.hooks_are_due:
            step.hooks_are_due = False
            for unit in self.order:
                if unit.index not in step.partial:
                    for buffer in unit.trainable:
                        buffer.run_hooks()

    def clear(self, *, zero: bool) -> None:
        """Drop all accumulated gradients and begin a new step.

        Args:
            zero: Write zeros into the buffers. False: the next gradients overwrite them.

        Raises:
            RuntimeError: A backward has not ended.
        """
        if self._queue is not None:
            raise RuntimeError(
                "zero_grad_buffer: expected no backward in progress; found one that still misses "
                f"gradients of {self._missing()} (after an exception, call engine.reset())"
            )
        self.wait()
        self._message.finish()
        self._discard()
        self._step = None
        for buffer in self._buffers:
            buffer.discard_gradients(zero=zero)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by ``factor``, whether they are reduced or accumulated."""
        self.wait()
        for unit in self._units:
            for buffer in unit.trainable:
                assert buffer.grads is not None
                buffer.grads.scale(factor, self._is_final(unit))
                buffer.published.scale_kept(factor)

    def reset(self) -> None:
        """Drop the running backward and the step with all accumulated gradients."""
        self._pending.discard()
        self._queue = self._step = None
        self._message.forget()
        self._discard()
        for buffer in self._buffers:
            buffer.discard_gradients()

    def _discard(self) -> None:
        for each in self.observers:
            each.discard()

    def _is_final(self, unit: Unit) -> bool:
        """Returns whether the step's gradients are final, including those of ``unit``."""
        step = self._step
        return step is not None and step.phase is Phase.FINAL and unit.index not in step.partial

    def _make_order(self) -> list[Unit]:
        """Returns the trainable units in the order of their reductions."""
        order = [self._units[index] for index in reversed(self.canonical_order)]
        return [unit for unit in order if unit.trainable]

    def _advance(self, queue: ReductionQueue) -> None:
        """Reduce the units that are ready, in the order of the queue."""
        while (unit := queue.next()) is not None:
            ranks_differ = self.schedule.ranks_differ
            if ranks_differ:
                self.schedule.before_reduction(queue.num_submitted, queue.place)
            self._reduce(queue, unit)
            if ranks_differ:
                self.schedule.after_reduction(queue.num_submitted)

    def _reduce(self, queue: ReductionQueue, unit: Unit) -> None:
        """Submit the reductions of ``unit`` that this backward needs."""
        last = queue.is_last and unit.index not in queue.partial
        if queue.arrival(unit) is not GradientArrival.SOME:
            if not last and (queue.inputs_only or not unit.num_staged):
                return  # no reduction is needed, and the accumulation buffer does not change
            self.open_unit(unit)
        submitted = []
        for buffer in unit.trainable:
            grads = buffer.grads
            assert grads is not None
            grads.end_writing()
            if last or grads.writes_to_staging:
                for each in self.observers:
                    each.before_sending(buffer)
            reduction = grads.reduce(last=last)
            if reduction is not None:
                submitted.append(reduction)
        queue.set_arrival(unit, GradientArrival.REDUCED)
        self._pending.add(unit, submitted, staged=True)

    def _close(self, queue: ReductionQueue) -> None:
        """End the backward of ``queue``: all of its gradients have arrived, and their reductions
        are submitted."""
        self.schedule.await_ranks(queue.place)
        step, self._queue = self._step, None
        assert step is not None
        step.partial = queue.partial
        step.reduced_units.update(queue.reduced)
        for buffer in self._buffers:
            buffer.published.end_backward()
        if queue.is_last:
            self._issued()
            if self._timing.finishes_backward:
                self.finish()
            return
        if self._timing.finishes_backward:
            for unit in self.order:
                self._publish_partial(unit, step)
            step.reduced_units.clear()
        self._leave_pending()

    def _leave_pending(self) -> None:
        """Leave reductions in flight, or wait for them: see [Note: Reductions left in flight]."""
        reads = [buffer.reads.gradients for buffer in self._buffers]
        if self._wait_later is None or any(each.were_accessed for each in reads):
            self.wait()
        elif self._pending:
            self._pending.end_backward()
            for each in reads:
                each.in_flight = self._wait_later

    def _issued(self) -> None:
        for each in self.observers:
            each.issued()
        self._move_to(Phase.ISSUED)
        self._message.start(self._seen_order)

    @staticmethod
    def _publish_partial(unit: Unit, step: StepReductions) -> None:
        """Publish accumulated gradients of ``unit`` between microbatches, so that the next backward
        can detect that the user has cleared them."""
        for buffer in unit.trainable:
            if unit.index in step.reduced_units:
                buffer.publish_gradients([True] * len(buffer.records), reduced=False)
            else:
                buffer.published.put_back()

    def _publish(self, step: StepReductions) -> bool:
        """Publish the gradients of ``step``. Returns False if an observer has dropped them."""
        order = self._message.order
        new_order = order != self.canonical_order
        verdict = self._message.read(new_order)
        if new_order and verdict.same_order:
            self.canonical_order = order
            self.order = self._make_order()
        used: Sequence[Sequence[Any]] = verdict.used
        is_dropped = False
        for each in self.observers:
            by_any = each.reduced(used)
            is_dropped |= by_any is None
            used = used if by_any is None else by_any
        if is_dropped:
            self.clear(zero=False)
            return False
        step.hooks_are_due = True
        for unit in self.order:
            if unit.index in step.partial:
                self._publish_partial(unit, step)
                continue
            for buffer in unit.trainable:
                buffer.publish_gradients(used[self._numbers[id(buffer)]], reduced=True)
        step.reduced_units.clear()
        return True

    def _move_to(self, phase: Phase) -> None:
        assert (self.phase, phase) in TRANSITIONS, (
            f"gradients: {self.phase.value} -> {phase.value} is not a legal transition"
        )
        if self._step is None:
            self._step = StepReductions(phase)
        self._step.phase = phase

    def _missing(self) -> str:
        """Returns the names of parameters whose gradients are missing in this backward."""
        queue = self._queue
        assert queue is not None
        names: list[str] = []
        for unit in queue.waiting:
            if queue.arrival(unit) is GradientArrival.REDUCED:
                continue
            for buffer in unit.trainable:
                assert buffer.grads is not None
                writer = buffer.grads.writer
                arrived = bytes(len(buffer.records)) if writer is None else writer.arrived
                names += [
                    record.name
                    for record, flag in zip(buffer.records, arrived, strict=True)
                    if not flag
                ]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more
