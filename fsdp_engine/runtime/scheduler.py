"""The scheduler, to which hooks report the events of forwards and backwards.

It reports to the schedule (``schedule.py``) which unit is used and which unit is left, and to the
reductions (``reductions.py``) which gradients have arrived.

A forward within a backward must repeat an earlier forward, as a checkpoint does. All gradients of a
unit must arrive in one run of autograd. A subclass supports other cases.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence, Sized
from functools import partial
from typing import Any

import torch

from fsdp_engine.callers import user_stacklevel
from fsdp_engine.comm.activity import monitor
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.options import Timing
from fsdp_engine.runtime.call_context import call_context, in_function_of_autograd
from fsdp_engine.runtime.parameter_watch import ModelWatch
from fsdp_engine.runtime.passes import (
    Backward,
    Forward,
    check_is_whole,
    current_run,
    in_backward,
    when_autograd_ends,
)
from fsdp_engine.runtime.reductions import Reductions
from fsdp_engine.runtime.schedule import Place, Record, Schedule, first_use_order
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD, Call, Kept, State, Unit
from fsdp_engine.units.assignment import Expected


class Scheduler:
    """Gathers and frees units as forward and backward use them.

    Args:
        units: All units, in module order, the root first.
        memory: The memory manager of the engine.
        budget: The prefetch window in elements.
        reductions: The reductions, to which units with complete gradients are reported.
        timing: When changed weights are gathered.
        expected: The order of uses that is expected before execution has shown the real one.
        watch: The object that is called at the start and end of forwards and backwards.

    Attributes:
        before_changes: Functions that are called before users may change main weights: after a
            forward without autograd, and before a step of an optimizer.
        schedule: The schedule, which gathers and frees units.
        microbatch: The microbatch to which forwards and backwards belong, if backwards of several
            microbatches are pending; else None.
        inputs_only: Whether backwards compute only gradients of inputs, none of parameters.
        outer_run: The run of autograd within which the present forward runs, if the engine has
            already used units in that run; else None.
    """

    outer_run: int | None = None
    # Whether other forwards and backwards run within a backward.
    _has_nested = False
    # The running backwards that have units whose gradients arrive in several runs of autograd.
    _in_slices: Sized = ()

    def __init__(
        self,
        units: Sequence[Unit],
        memory: Memory,
        budget: int,
        reductions: Reductions,
        timing: Timing,
        expected: Expected,
        watch: ModelWatch,
    ) -> None:
        self.units = tuple(units)
        self.before_changes: list[Callable[[], object]] = []
        self._watch = watch
        self.reductions = reductions
        self.microbatch: Hashable | None = None
        self.inputs_only = False
        self._memory = memory
        self.make_record = partial(
            Record,
            [index for index in expected.forward if units[index].buffers],
            [index for index in expected.backward if units[index].buffers],
            [unit.num_elements if unit.reshards else 0 for unit in units],
            budget,
        )
        self._own_schedule = Schedule(self.units, self.make_record())
        self.schedule = reductions.schedule = self._own_schedule
        self._containing = expected.containing
        self.prefetches = budget > 0
        self._has_refreshes = any(unit.needs_refresh and not unit.reshards for unit in units)
        # Whether all refreshes are issued when forward begins.
        self._refreshes_ahead = timing.gathers_ahead and self.prefetches and self._has_refreshes
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # For each unit of several modules, the number of calls that ran without autograd or whose
        # outputs are not observed. A backward may still follow such a call, because a re-entrant
        # checkpoint repeats it. So if gradients of the unit are missing, they may still arrive.
        self._uncounted: Counter[int] = Counter()
        # The ``id``s of parameters that have gradients and that the running optimizer step changes.
        self._stepped: set[int] = set()
        # Whether the last forward ran within a stage of torch.distributed.pipelining.
        self._in_stage_of_torch = False

    # Forward.

    def enter_forward(self, unit: Unit, *, is_recorded: bool = True) -> None:
        """Enter a unit, because one of its modules is called.

        Args:
            unit: The unit.
            is_recorded: The use is part of the recorded order. False: a one-off use.
        """
        forward = self._forward
        if forward is None:
            forward = self._begin_forward()
        if not torch.is_grad_enabled():
            self.note_uncounted(unit)
        if is_recorded:
            forward.open.append(unit.index)
            self.schedule.use(unit, FORWARD, in_forward=True)
        else:
            self.schedule.use_once(unit, FORWARD)
        unit.enter()

    def note_uncounted(self, unit: Unit) -> None:
        """Count a call of a module of the unit, for which it is not known whether a backward
        follows. Units of one module need no count."""
        if len(unit.modules) > 1:
            self._uncounted[unit.index] += 1

    def note_run_again(self, unit: Unit) -> None:
        """Count a call of a module of the unit within backward, with gradients enabled."""
        assert self._backward is not None
        self._backward.num_repeated[unit.index] += 1

    def leave_forward(self, unit: Unit, reads_again: bool, *, is_recorded: bool = True) -> None:
        """Leave a unit, because one of its modules has returned.

        Args:
            unit: The unit.
            reads_again: A backward will follow and read the weights of the unit.
            is_recorded: The value with which the unit was entered.
        """
        forward = self._forward
        assert forward is not None
        if is_recorded:
            forward.open.remove(unit.index)
            if unit.buffers and reads_again:
                self.schedule.record.leave(unit.index)
        if unit.leave():
            self.schedule.leave_forward(unit, forward.open, reads_again=reads_again)
        if not forward.open:
            self._end_forward(forward, unit)

    def is_nested_forward(self, units: Collection[Unit], *, is_model: bool) -> bool:
        """Returns whether a call of a module within a backward belongs to a new forward with a
        backward of its own. False: it repeats a call whose backward is pending or running.

        Args:
            units: The units of the module.
            is_model: The module is the root of the model.
        """
        backward = self._backward
        if self._forward is not None:
            return backward is None
        for unit in units:
            if unit.pending_calls or unit.num_unrecorded or Kept.RECORDED in unit.kept:
                return False
        if backward is not None and backward.computes_with(units, self._containing):
            return False
        return is_model or not in_function_of_autograd()

    def _make_forward(self) -> Forward:
        """Create the object of a forward that begins.

        Raises:
            NotImplementedError: The forward begins within a backward.
        """
        if in_backward():
            raise _unknown("a forward within a backward, which does not repeat an earlier forward")
        return Forward()

    def _begin_forward(self) -> Forward:
        if not in_backward() and not self.is_at_rest:
            raise RuntimeError(
                "the last backward did not finish, perhaps because of an exception: "
                "call engine.reset() before the next forward"
            )
        forward = self._make_forward()
        monitor().begin_forward()
        if self.reductions.stream.is_new():
            # Autograd accumulates a gradient on the stream that was current when its node was
            # created, so the nodes are created again.
            self.reductions.stream.begin()
            for unit in self.units:
                for buffer in unit.trainable:
                    if buffer.gradient_hooks is not None:
                        buffer.gradient_hooks.renew()
        if self.reductions.stream.has_graphs():
            for unit in self.units:
                unit.mark_stale()
        context = call_context()
        self._in_stage_of_torch = self.microbatch is None and context.stage
        for unit in self.units:
            if context.functional_call:
                unit.check_not_swapped()
            unit.follow_requires_grad()
            if unit.state is State.GATHERING and not unit.is_current:
                unit.wait()  # weights have changed since it was gathered: it is gathered again
        if self.reductions.stream.begins_capture():
            # Units that are full already are freed: the graph must not write memory that other
            # tensors can reuse.
            self.schedule.free_all()
        self._watch.begin_forward()
        self._forward = forward
        self.schedule.begin_forward(
            self.reductions.canonical_order,
            refreshes_now=self._refreshes_ahead or self.ranks_differ,
        )
        return forward

    def _end_forward(self, forward: Forward, outermost: Unit) -> None:
        self._forward = None
        self.schedule.end_forward(has_refreshes=self._has_refreshes)
        if not torch.is_grad_enabled():
            for each in self.before_changes:
                each()
        if outermost is self.units[0]:
            record = self.schedule.record
            record.end_forward()
            if not self.ranks_differ:
                order = record.units_in_forward
                self.reductions.order_seen(first_use_order(order, len(self.units)))
        self._watch.end_forward()
        self._resume(forward)
        if not self._has_nested:
            self._watch.check(ranks_differ=self.ranks_differ)

    def gather_before_forward(self, *, wait: bool, sharded: bool = True) -> None:
        """Issue the gathers with which the next forward would begin. See
        :meth:`.Schedule.gather_before_forward`."""
        if self._forward is not None or self._backward is not None:
            return  # the running forward or backward gathers the units that it uses
        order = self.reductions.canonical_order
        self.schedule.gather_before_forward(order, wait=wait, sharded=sharded)

    def note_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which parameters ``optimizer`` is about to step, since its own hooks may clear their
        gradients before :meth:`invalidate_graphs`."""
        is_needed = self._backward is None and any(unit.may_run_backward for unit in self.units)
        self._stepped = _with_gradients(optimizer) if is_needed else set()

    def invalidate_graphs(self, optimizer: torch.optim.Optimizer) -> None:
        """Invalidate the graphs of earlier forwards that read weights which ``optimizer`` has just
        changed; see :meth:`.Unit.invalidate_graphs`."""
        stepped, self._stepped = self._stepped, set()
        if self._backward is not None:
            return
        if units := [unit for unit in self.units if unit.may_run_backward]:
            # A closure computes gradients within the step, after note_gradients.
            stepped = stepped or _with_gradients(optimizer)
            for unit in units:
                unit.invalidate_graphs(stepped)

    def gather_ahead(self, unit: Unit) -> None:
        """Prefetch a unit at the user's request."""
        if self.ranks_differ and not unit.reshards:
            # All ranks must issue refreshes in one order. So this rank issues all of them, as other
            # ranks do in their next forward.
            self.gather_before_forward(wait=False, sharded=False)
        else:
            self.schedule.provide(unit, FORWARD)

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks may use different units."""
        return self.schedule.ranks_differ

    def use_schedule(self, schedule: Schedule | None) -> None:
        """Gather units by another schedule from now on. No forward or backward may be running.

        Args:
            schedule: The schedule. None: the engine's own, for ranks that use the same units.
        """
        self.schedule.free_all()
        self.schedule = self.reductions.schedule = schedule or self._own_schedule

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """See :meth:`.Schedule.await_ranks`."""
        self.schedule.await_ranks(place)

    def wait_for_gathers(self) -> None:
        """Wait for the gathers in flight, and free prefetched units."""
        self.schedule.wait()

    # Backward.

    def repeat(self, unit: Unit) -> None:
        """Provide the parameters of a unit, because one of its modules is called within backward to
        repeat its forward. The parameters are not freed before the unit's backward has ended.
        """
        backward = self.begin_backward()
        if self._in_slices:
            self._complete_slices(backward, unit)
        backward.touched[unit.index] = unit
        if unit.uses:
            self.schedule.record.repeats(unit.index)
            self.schedule.use_once(unit, BOTH)
        else:
            # If forward and backward read the same bytes, one gather is enough for both.
            self.schedule.use(unit, unit.repeated_phase)

    def enter_backward(self, call: Call, inputs: Sequence[Any] = ()) -> None:
        """Begin the backward of ``call``, unless it has begun. Called when a gradient of an output
        is computed.

        Args:
            call: The call.
            inputs: Autograd's nodes of the call's inputs, if there are several.

        Raises:
            Exception: See :meth:`.Schedule.check_backward`.
        """
        backward = self._backward
        if backward is not None and backward.has_entered(call):
            return
        if call.schedule is not self.schedule:
            call.schedule.check_backward(call, self.schedule)
        if backward is None:
            backward = self.begin_backward()
        elif backward.run == call.outer_run:
            backward = self._begin_nested(backward)
        if not backward.observes(call):
            return
        if self._in_slices:
            self._complete_slices(backward, call.unit)
        backward.enter(call, inputs)
        if call.reads_weights:
            if call.is_recorded:
                self.schedule.use(call.unit, BACKWARD)
            else:
                self.schedule.use_once(call.unit, BACKWARD)
            call.unit.enter()

    def on_input_gradient(self, call: Call) -> None:
        """Called when a gradient of an input of ``call`` is computed. The last one ends the
        backward of the call."""
        backward = self._backward
        if backward is not None and backward.count_input_gradient(call):
            self._leave_backward(backward, call)
            if current_run() == backward.run:
                self._check_ready(call.unit)
            else:
                self._note_slice(backward, call.unit)

    def _leave_backward(self, backward: Backward, call: Call) -> None:
        """End the backward of ``call``, and leave its unit."""
        if backward.leave(call) and not call.unit.uses:
            self.schedule.leave_backward(call.unit, backward.open_units)

    def on_last_gradient(self, unit: Unit) -> None:
        """Called when the last gradient of a buffer of ``unit`` was written."""
        backward = self._backward
        assert backward is not None
        if unit.misses_gradients or unit.index in self._containing:
            return  # the backward of a unit that contains others may still read its weights
        if current_run() == backward.run:
            self._leave_calls(backward, unit)
        else:
            self._note_slice(backward, unit)

    def _begin_nested(self, outer: Backward) -> Backward:
        """Begin the backward of a forward that ran within the backward ``outer``, and return it.

        Raises:
            NotImplementedError: Only a subclass supports this.
        """
        raise _unknown("a backward within a backward")

    def _note_slice(self, backward: Backward, unit: Unit) -> None:
        """Called when all gradients of ``unit`` have arrived in another run of autograd within
        ``backward``.

        Raises:
            NotImplementedError: Only a subclass supports this.
        """
        raise _unknown("several runs of autograd that compute gradients of one unit")

    def _complete_slices(self, backward: Backward, following: Unit | None) -> None:
        """Called when this run of autograd reaches ``following``. None: the backward ends."""

    def _resume(self, ended: Forward | Backward) -> None:
        """Resume the backward within which the forward or backward ``ended`` has run."""

    def _leave_calls(self, backward: Backward, unit: Unit) -> None:
        """Leave the calls of ``unit`` whose end is not observed, since all of its gradients have
        arrived."""
        calls = [call for call in backward.open_calls(unit) if call.is_recorded]
        if any(call.has_boundary for call in calls):
            return  # the gradient of an input will end the backward of that call
        for call in calls:
            self._leave_backward(backward, call)
        self._check_ready(unit)

    def _check_ready(self, unit: Unit) -> None:
        """Report the unit to the reductions if all of its gradients have arrived."""
        assert self._backward is not None
        is_counted = unit.index not in self._uncounted or not unit.misses_gradients
        may_repeat = unit.num_retained and self._backward.may_repeat(unit)
        if is_counted and not may_repeat and not unit.awaits_backward(self.microbatch):
            self.reductions.unit_is_ready(unit)

    def begin_gradient(self, unit: Unit) -> None:
        """Allocate buffers for the gradients of ``unit``, before its first gradient of this
        backward is written or postponed."""
        backward = self.begin_backward()
        backward.creates_graph = torch.is_grad_enabled()
        if self._in_slices:
            self._complete_slices(backward, unit)
        self.reductions.open_unit(unit)

    def on_late_gradient(self, unit: Unit) -> None:
        """Called when the last postponed weight gradient of the unit was written."""
        if unit.uses == 0:
            unit.uninstall()
        self.reductions.on_late_gradient(unit)
        if self._backward is None:
            self.reductions.run_hooks()

    def begin_backward(self) -> Backward:
        """Returns the running backward. The first event of a backward begins it."""
        return self._backward or self.run_backward(Backward())

    def run_backward(self, backward: Backward) -> Backward:
        """Begin ``backward``, and return it."""
        if self._in_stage_of_torch:
            check_is_whole(self.units)
        self.reductions.begin_backward(inputs_only=self.inputs_only)
        for unit in self.units:
            # The user may have frozen and thawed parameters since this forward, to run the forward
            # of a reference model.
            unit.follow_requires_grad_in_backward()
        self._backward = backward
        self.schedule.backward_begins()
        if backward.is_recorded:
            self.schedule.record.begin_backward()
            # This also ends calls whose parameters or inputs get no gradient.
            when_autograd_ends(self.end_backward)
        return backward

    def end_backward(self) -> None:
        """End the running backward, when autograd has finished it."""
        backward = self._backward
        assert backward is not None
        if self._in_slices:
            self._complete_slices(backward, None)
        self.reductions.end_backward()
        if backward.is_recorded:
            self.schedule.record.end_backward()
        self.schedule.free_reserved()
        backward.end()
        self._forget_uncounted(backward)
        touched = backward.touched
        for unit in self.units:
            if unit.kept and not backward.creates_graph and Kept.RECORDED in unit.kept:
                unit.free_recorded()
                touched[unit.index] = unit
            elif unit.options.keeps_after_forward:
                touched[unit.index] = unit
        for unit in touched.values():
            if unit.uses == 0:
                unit.end_backward()
        self._backward = None
        self._resume(backward)
        self.schedule.backward_ends()
        if not self._has_nested:
            self._finish_backward()

    def _finish_backward(self) -> None:
        """Run the checks and the users' hooks at the end of the outermost backward, whose
        reductions are submitted."""
        self._memory.end_backward(step_is_over=self.reductions.are_final)
        self._watch.check(ranks_differ=self.ranks_differ)
        self.reductions.run_hooks()

    def _forget_uncounted(self, backward: Backward) -> None:
        """Subtract the calls that were repeated in ``backward`` from the uncounted calls of each
        unit. If some were repeated, the others belong to another microbatch, whose forward preceded
        this backward. If none was, all belong to an evaluation, and are dropped."""
        for index in list(self._uncounted):
            num_repeated = backward.num_repeated[index]
            self._uncounted[index] -= num_repeated
            if not num_repeated or self._uncounted[index] <= 0:
                del self._uncounted[index]

    @property
    def is_at_rest(self) -> bool:
        """Whether neither a forward nor a backward is running."""
        return self._forward is None and self._backward is None and not self._has_nested

    def check_at_rest(self, what: str) -> None:
        """Check that neither a forward nor a backward is running.

        Args:
            what: Name of the operation in the message.

        Raises:
            RuntimeError: A forward or a backward is running.
        """
        if not self.is_at_rest:
            raise RuntimeError(
                f"{what}: expected no forward or backward in progress; found a {self.phase}"
            )

    def warn_if_computing(self, what: str) -> None:
        """Warn if a running forward computes with full weights that a change of the sharded ones
        does not reach.

        Args:
            what: Name of the operation in the message.
        """
        for unit in self.units if self._forward is not None else ():
            if unit.uses and unit.trainable and (unit.reshards or unit.needs_refresh):
                warnings.warn(
                    f"{what}: expected that no forward is running; found the forward of "
                    f"{unit.label}. What it computes after the change uses the old weights. Change "
                    "weights after the forward of the model, or give each module that runs after "
                    "the change a unit of its own (units=)",
                    stacklevel=user_stacklevel(),
                )
                return

    @property
    def phase(self) -> str:
        """The current activity, for messages: "forward", "backward", or otherwise "step"."""
        if self._backward is not None:
            return "backward"
        if self._forward is not None:
            return "forward"
        return "backward" if self._has_nested else "step"

    def reset(self) -> None:
        """Drop the running forward and backward. Communication must have ended."""
        self._forward = self._backward = None
        self._uncounted.clear()
        self.schedule.reset()
        self._watch.reset()
        self.reductions.reset()
        for unit in self.units:
            unit.reset()
        self._memory.release_idle()


def _unknown(found: str) -> NotImplementedError:
    return NotImplementedError(
        f"backward: expected one backward at a time, in one run of autograd; found {found}. The "
        "extension nested_backwards supports this, and is not part of this installation"
    )


def _with_gradients(optimizer: torch.optim.Optimizer) -> set[int]:
    """Returns the ``id``s of the optimizer's parameters that have gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {id(param) for param in params if param.grad is not None}
