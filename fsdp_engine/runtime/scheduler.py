"""When: what is gathered ahead of use, and what is released.

Every event of forward and backward is a place in the record of the microbatch (``record.py``), from
which everything follows: what to gather ahead, whether a unit that is left stays full, which bytes
a use reads. Where execution leaves the record, units gathered in vain are dropped, the unit is
gathered on demand, and what happens is recorded anew. Reductions are the business of
``reductions.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

import torch

from fsdp_engine.codecs.phase import BACKWARD, BOTH, FORWARD
from fsdp_engine.config import Timing
from fsdp_engine.devices.memory import Memory
from fsdp_engine.planning.assignment import Expected
from fsdp_engine.runtime.backward import Backward, check_is_whole
from fsdp_engine.runtime.call_context import call_context
from fsdp_engine.runtime.record import Record, Use, first_use_order
from fsdp_engine.runtime.reductions import Reductions
from fsdp_engine.runtime.refreshes import Refreshes
from fsdp_engine.runtime.unit import Call, Residence, Unit


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Scheduler:
    """Moves units through their lives as forward and backward come along.

    Args:
        units: all of them, in module order, the root first.
        memory: of the engine.
        budget: elements gathered ahead.
        reductions: told when a unit's gradients are complete.
        timing: when changed weights are gathered.
        expected: the order in which units are expected to be used.

    Attributes:
        microbatch: to which forwards and backwards belong: see ``microbatches.py``.
        inputs_only: backwards bring no gradients of parameters.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        memory: Memory,
        budget: int,
        reductions: Reductions,
        timing: Timing,
        expected: Expected,
    ) -> None:
        self.units = tuple(units)
        self.reductions = reductions
        self.microbatch: Hashable | None = None
        self.inputs_only = False
        self._memory = memory
        self._record = Record(
            [index for index in expected.forward if units[index].buffers],
            [index for index in expected.backward if units[index].buffers],
            [unit.num_elements if unit.reshards else 0 for unit in units],
            budget,
        )
        self._containing = expected.containing
        # Forwards under way, outermost first, without those aside; a unit may stand here twice.
        self._open: list[int] = []
        # Full, or on their way, for a use that is to come: of these, those that wait for backward.
        self._ahead: set[int] = set()
        self._kept: set[int] = set()
        self._backward = Backward()
        self._looks_ahead = budget > 0
        self._refreshes = Refreshes(self.units, ahead=timing.gathers_ahead and self._looks_ahead)
        self._gathered_before = False

    # Forward.

    def enter_forward(self, unit: Unit, *, aside: bool = False) -> None:
        """A module of the unit is called.

        Args:
            unit: which.
            aside: this use may not come again: it is not recorded.
        """
        if not self._open:
            self._begin_forward()
        if not torch.is_grad_enabled():
            self.note_uncounted(unit)
        if aside:
            self._fill(unit, FORWARD)
            self._show(unit)
        else:
            self._open.append(unit.index)
            self._use(unit, FORWARD)
        unit.enter()

    def note_uncounted(self, unit: Unit) -> None:
        """A module of the unit runs, and whether its backward is to come is not known."""
        if len(unit.built.modules) > 1:
            self._backward.uncounted[unit.index] += 1

    def note_run_again(self, unit: Unit) -> None:
        """A module of the unit is called within backward, and autograd follows."""
        self._backward.num_run_again[unit.index] += 1

    def leave_forward(self, unit: Unit, reads_again: bool, *, aside: bool = False) -> None:
        """A module of the unit has returned.

        Args:
            unit: which.
            reads_again: backward will come to it, and read its weights.
            aside: as it was entered.
        """
        if not aside:
            self._open.remove(unit.index)
            if unit.buffers and reads_again:
                self._record.leave(unit.index)
        unit.leave()
        if unit.uses == 0:
            phase = self._record.next_phase(unit.index, self._open, reads_again)
            if phase >= BACKWARD:
                self._kept.add(unit.index)
            elif phase:
                self._ahead.add(unit.index)
            if phase or unit.stays or unit.wishes.stays_after_forward:
                unit.uninstall()
                unit.turn_to(phase or BACKWARD)
                if unit.wishes.stays_after_forward:
                    self._backward.touched[unit.index] = unit  # released as backward ends
            else:
                unit.release()
        if not self._open:
            self._end_forward(unit)

    def _begin_forward(self) -> None:
        if self._backward.is_open:
            raise RuntimeError(
                "the last backward did not finish, perhaps because of an exception: "
                "call engine.reset() before the next forward"
            )
        if self.reductions.stream.is_new():
            # Autograd accumulates on the stream that was current as its node was made.
            self.reductions.stream.begin()
            for unit in self.units:
                for buffer in unit.trainable:
                    buffer.renew_accumulators()
        context = call_context()
        self._backward.is_told = self.microbatch is not None or not context.stage
        for unit in self.units:
            if context.functional_call:
                unit.check_not_swapped()
            unit.follow_requires_grad()
        self._record.begin_forward()
        self._refreshes.begin()
        if self._gathered_before:
            self._gathered_before = False
            for unit in self.units:
                if unit.residence is Residence.GATHERING and not unit.is_current:
                    unit.wait()  # changed since: to be gathered again
        if self._refreshes.ahead:
            # Into memory that is held anyway: the sooner the better.
            self._refreshes.issue_through(None, self.reductions.canonical_order)

    def _end_forward(self, outermost: Unit) -> None:
        self._drop_ahead()
        if self._refreshes.are_needed:
            self._refreshes.issue_through(None, self.reductions.canonical_order)
            for unit in self.units:
                # What this rank did not enter must not read main weights into the next step.
                unit.wait()
        if outermost is self.units[0]:
            self._record.end_forward()
            order = self._record.units_in_forward
            self.reductions.order_seen(first_use_order(order, len(self.units)))

    def gather_before_forward(self, *, wait: bool, cut: bool = True) -> None:
        """Issue what the next forward would begin with: what changed and is never cut, and
        (``cut``) what forward gathers first."""
        if not self.is_at_rest:
            return  # under way already
        for index in self.reductions.canonical_order:
            unit = self.units[index]
            if not unit.reshards and unit.needs_gather(FORWARD):
                unit.gather(FORWARD)
        for use in self._record.first if cut else ():
            unit = self.units[use.unit]
            if unit.reshards and unit.needs_gather(FORWARD):
                unit.gather(FORWARD)
                self._ahead.add(unit.index)
        self._gathered_before = True
        if wait:
            for unit in self.units:
                unit.wait()

    def wait_for_gathers(self) -> None:
        """Wait for the gathers in flight, and free parameters gathered ahead of use."""
        for unit in self.units:
            unit.wait()
        self._drop_ahead()

    # Backward.

    def recompute(self, unit: Unit) -> None:
        """A module of the unit is called within backward: activation checkpointing.

        Nothing is released before the unit's own backward is over.
        """
        self.begin_backward()
        self._backward.touched[unit.index] = unit
        if unit.uses:
            self._record.recomputes(unit.index)
            self._fill(unit, BOTH)
            self._show(unit)
        else:
            # Where the same bytes serve both, its backward gathers no more.
            self._use(unit, FORWARD if unit.built.split_weights else BOTH)

    def enter_backward(self, call: Call) -> None:
        """The gradient of a call's output has come: its backward begins."""
        if call.opened:
            return
        self.begin_backward()
        if self._backward.weights_only:
            if call.reads_weights:
                self.use_for_weights(call.unit)
            return
        self._backward.enters(call)
        if call.reads_weights:
            if call.aside:
                self._fill(call.unit, BACKWARD)
                self._show(call.unit)
            else:
                self._use(call.unit, BACKWARD)
            call.unit.enter()

    def leave_backward(self, call: Call) -> None:
        """The gradients of a call's inputs have come: its backward is over."""
        if call.closed or not call.opened:
            return
        unit = call.unit
        self._backward.leaves(call)
        if unit.uses == 0:
            if self._record.next_phase(unit.index, self._backward.open_units, False):
                self._ahead.add(unit.index)
                unit.uninstall()
            else:
                self._end_use(unit)
        self._check_ready(unit)

    def gradient_came(self, unit: Unit) -> None:
        """The last gradient of a buffer of ``unit`` came."""
        if unit.num_missing_grads or unit.index in self._containing:
            return  # what lies before the units inside may still read its weights
        calls = [call for call in unit.open_calls if not call.aside]
        if any(call.has_boundary for call in calls):
            return  # the end of that call's backward will be seen
        for call in calls:
            self.leave_backward(call)
        self._check_ready(unit)

    def _check_ready(self, unit: Unit) -> None:
        """All of the unit's gradients may have come."""
        is_counted = unit.index not in self._backward.uncounted or not unit.num_missing_grads
        runs_again = unit.index in self._backward.run_again
        if is_counted and not runs_again and not unit.awaits_backward(self.microbatch):
            self.reductions.unit_is_ready(unit)

    def begin_gradient(self, unit: Unit) -> None:
        """A buffer of ``unit`` is about to get its first gradient of this backward."""
        if self.reductions.has_open_gradients(unit):
            return
        self.begin_backward()
        self._backward.creates_graph = torch.is_grad_enabled()
        self.reductions.open_unit(unit)

    def late_gradient_came(self, unit: Unit) -> None:
        """The last weight gradient that the unit's modules had put off has come."""
        if unit.uses == 0:
            unit.uninstall()
        self.reductions.late_gradient_came(unit)
        if not self._backward.is_open:
            self.reductions.run_hooks()

    def begin_backward(self, *, weights_only: bool = False) -> None:
        """Some event of a backward, whichever is seen first.

        Args:
            weights_only: it is that of weights alone, in several runs of autograd: who begins it
                ends it.
        """
        if self._backward.is_open:
            return
        if not self._backward.is_told:
            check_is_whole(self.units)
        self.reductions.begin_backward(inputs_only=self.inputs_only)
        for unit in self.units:
            # Parameters may have been frozen and thawed since forward, as adapters are around the
            # forward of a reference model.
            unit.follow_requires_grad_in_backward()
        self._backward.is_open = True
        self._backward.weights_only = weights_only
        if not weights_only:
            self._record.begin_backward()
            # Closes what autograd leaves open: parameters without a gradient, inputs without one.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def use_for_weights(self, unit: Unit, following: Unit | None = None) -> None:
        """In a backward of weights alone, ``unit`` is read from here on, and then ``following``."""
        if unit in self._backward.for_weights or not unit.buffers:
            return
        self._backward.for_weights.append(unit)
        self._backward.touched[unit.index] = unit
        self._fill(unit, BACKWARD)
        self._ahead.discard(unit.index)
        if following is not None and following.needs_gather(BACKWARD) and self._looks_ahead:
            following.gather(BACKWARD)
            self._ahead.add(following.index)
        self._show(unit)
        unit.enter()

    def weights_came(self, unit: Unit) -> None:
        """All that a backward of weights alone brings of ``unit`` is there."""
        if unit in self._backward.for_weights:
            self._backward.for_weights.remove(unit)
            unit.leave()
            if unit.uses == 0 and unit.index not in self._kept:
                unit.release()
        self.reductions.unit_is_ready(unit)

    def end_backward(self) -> None:
        """Autograd is done, and so is this backward."""
        self.reductions.end_backward()
        if not self._backward.weights_only:
            self._record.end_backward()
        self._drop_ahead()
        for unit in self._backward.end(self.units):
            if unit.uses == 0:
                unit.end_uses()
                self._end_use(unit)
        self._memory.end_backward(step_is_over=self.reductions.are_final)
        self.reductions.run_hooks()

    @staticmethod
    def _end_use(unit: Unit) -> None:
        """A backward is done with the unit."""
        if unit.wishes.stays_after_backward:
            unit.uninstall()
        else:
            unit.release()

    # Both.

    def _use(self, unit: Unit, phase: int) -> None:
        """A use of ``unit`` begins: it is full, and what comes next is on its way."""
        if not unit.buffers:
            return
        step = self._record.use(unit.index, phase)
        expected, window = step.expected, step.window
        if (asked := unit.wishes.ahead(phase)) is not None:
            each_phase = BACKWARD if phase & BACKWARD else FORWARD
            window = tuple(Use(each.index, each_phase) for each in asked if each.reshards)
        if self._kept:
            # Kept for the start of backward; or else something comes first.
            self._ahead |= self._kept
            self._kept.clear()
            expected = expected and self._backward.is_open
        if not expected:
            self._drop_ahead(keep={unit.index, *(use.unit for use in window)})
        self._fill(unit, step.phase)
        self._ahead.discard(unit.index)
        for use in window:
            ahead = self.units[use.unit]
            if ahead.needs_gather(use.phase) and not ahead.uses:
                ahead.gather(use.phase)
                self._ahead.add(use.unit)
        self._show(unit)

    @staticmethod
    def _show(unit: Unit) -> None:
        """The model reads full parameters from here on."""
        unit.wait()
        unit.note_access()
        # In backward, too: checkpoints within the unit run parts of its forward again.
        unit.install()

    def _fill(self, unit: Unit, phase: int) -> None:
        if not unit.needs_gather(phase):
            return
        if unit.reshards or not self._refreshes.awaits(unit):
            unit.gather(phase)
        else:
            self._refreshes.issue_through(unit, self.reductions.canonical_order)

    def _drop_ahead(self, keep: Collection[int] = ()) -> None:
        """Let go of units that were gathered ahead in vain."""
        for index in sorted(self._ahead.difference(keep)):
            self._ahead.discard(index)
            unit = self.units[index]
            if unit.uses == 0 and unit.reshards:
                unit.release()

    @property
    def is_at_rest(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not self._open and not self._backward.is_open

    @property
    def phase(self) -> str:
        """What the program does, for people: "forward", "backward", else "step"."""
        if self._backward.is_open:
            return "backward"
        return "forward" if self._open else "step"

    def reset(self) -> None:
        """Forget what was under way; communication must be over."""
        self._open.clear()
        self._ahead.clear()
        self._kept.clear()
        self._backward = Backward()
        self.reductions.reset()
        for unit in self.units:
            unit.reset()
        self._memory.release_idle()
