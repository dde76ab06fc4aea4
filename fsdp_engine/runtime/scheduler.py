"""When units are gathered and freed.

Every event of forward and backward is a place in the recorded order of uses (``record.py``). The
place determines which units to prefetch, whether a unit that is left is kept unsharded, and which
bytes a use reads. Where execution leaves the recorded order, prefetched units are freed, the unit
is gathered on demand, and a new order is recorded. Reductions are in ``reductions.py``.

[Note: One order on all ranks]
Collectives of one group must be issued in one order on all ranks. Sharded units are gathered when
they are entered: all ranks must enter the same units, unless another ``gather_order.py`` is in
place. Units that are never sharded are only *refreshed* after their weights changed, and ranks may
enter different ones. So refreshes are issued in the canonical order of units, up to the unit that
is entered; the rest is issued when forward ends.

[Note: Nested backwards]
A backward can run forwards that have backwards of their own: the hook of a loss that has cached
embeddings embeds each mini-batch again (GradCache). Such a *nested* forward is no recomputation,
since no call of its units is pending or runs. It is gathered, freed and prefetched as any forward,
and its backward is a :class:`Backward` of its own, on top of the one that runs. Gradients of nested
backwards are accumulated like those of microbatches, and axes that are left to the last microbatch
are reduced when the outermost backward ends ([Note: Passes] in ``reductions.py``).

A forward of a single unit within a ``torch.autograd.Function`` is a recomputation (a re-entrant
checkpoint), and one of the model is nested.

Other functions run autograd once for each slice of their input (a tiled MLP). All gradients of a
unit can then come several times. So a unit whose gradients a nested run of autograd has brought is
reduced when another run reaches another unit, or the backward ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any

import torch

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.options import Timing
from fsdp_engine.runtime.call_context import call_context, in_function_of_autograd
from fsdp_engine.runtime.gather_order import GatherOrder, Place
from fsdp_engine.runtime.parameter_watch import ModelWatch
from fsdp_engine.runtime.record import BACKWARD, BOTH, FORWARD, Record, Use, first_use_order
from fsdp_engine.runtime.reductions import Reductions
from fsdp_engine.runtime.unit import Call, Kept, Unit
from fsdp_engine.units.assignment import Expected

# Whether the running backward reaches a node.
_will_run: Any = torch._C._will_engine_execute_node

# Of a call whose input was changed in place: its end is not observed.
_UNKNOWN = -1


class Backward:
    """The calls that a backward has entered and left, and the units that it may leave unsharded.

    Attributes:
        is_recorded: it is one run of autograd, whose end ends it, and part of the recorded order.
            False, in a subclass: the code that begins it ends it.
        creates_graph: it runs its functions with gradients enabled (``create_graph``).
        touched: units that may be unsharded when it ends, by number.
        open_units: numbers of units that it computes with, passed over in the recorded order.
        run_again: numbers of units of several calls whose graph was retained and runs once more:
            the number of calls that will come again is not known.
        num_run_again: calls of modules that ran again within this backward, by unit.
        outer: the backward within which it runs, and the recorded order of that; None: it is not
            nested, or the engine has no use in the outer one.
        run: number of the run of autograd that it is.
        in_slices: units of which a nested run of autograd has brought all gradients, perhaps of a
            slice of their input, by number.
        last_nested_run: the last run that has brought such gradients.
    """

    is_recorded = True

    def __init__(self, outer: tuple[Backward, Record] | None = None) -> None:
        self.outer = outer
        self.run = current_run()
        self.in_slices: dict[int, Unit] = {}
        self.last_nested_run = -1
        self.creates_graph = False
        self.touched: dict[int, Unit] = {}
        self.open_units: set[int] = set()
        self.run_again: set[int] = set()
        self.num_run_again: Counter[int] = Counter()
        # Gradients of inputs that have not come yet, by open call; and the run of autograd in
        # which a call was left.
        self._awaited: dict[Call, int] = {}
        self._left: dict[Call, int] = {}

    def observes(self, call: Call) -> bool:
        """Whether the backward of ``call``, which begins, is one that its hooks observe. False, in
        a subclass: it has done what the call needs."""
        return True

    def has_entered(self, call: Call) -> bool:
        """Whether the backward of ``call`` has begun. In another run of autograd, as a hook starts
        it with ``retain_graph``, a call that was left begins again."""
        if call in self._awaited:
            return True
        return call in self._left and self._left[call] == current_run()

    def computes_with(self, units: Collection[Unit], containing: Collection[int]) -> bool:
        """Whether the backward of a call of ``units``, or of a unit that contains others (whose
        numbers are ``containing``), has begun and is not over."""
        return any(call.unit in units or call.unit.index in containing for call in self._awaited)

    def note_slice(self, unit: Unit) -> None:
        """A nested run of autograd has brought the gradients of ``unit``, which are complete later:
        see [Note: Nested backwards]."""
        self.in_slices[unit.index] = unit
        self.last_nested_run = current_run()

    def open_calls(self, unit: Unit) -> list[Call]:
        """Calls of ``unit`` whose backward has begun and is not over."""
        return [call for call in self._awaited if call.unit is unit]

    def enter(self, call: Call, inputs: Sequence[Any]) -> None:
        """The backward of ``call`` begins.

        Args:
            call: which.
            inputs: autograd's nodes of the call's inputs, where it has several.

        Raises:
            RuntimeError: see :meth:`Unit.keep_recorded`.
        """
        unit = call.unit
        self.creates_graph = torch.is_grad_enabled()
        if self.creates_graph:
            # Functions that are recorded now read the weights once more.
            unit.keep_recorded()
        if call.follows_another and not call.is_pending:
            self.run_again.add(unit.index)
        num_inputs = sum(map(_will_run, inputs)) if inputs else 1
        self._awaited[call] = _UNKNOWN if call.input_changed else num_inputs
        self.touched[unit.index] = unit
        if call.reads_weights:
            self.open_units.add(unit.index)

    def input_came(self, call: Call) -> bool:
        """The gradient of an input of ``call`` has come; returns whether it was the last one."""
        awaited = self._awaited.get(call, 0)
        if awaited > 0:
            self._awaited[call] = awaited - 1
        return awaited == 1

    def leave(self, call: Call) -> bool:
        """The backward of ``call`` is over; returns False if it was not open."""
        if self._awaited.pop(call, None) is None:
            return False
        self._left[call] = current_run()
        call.finish()
        if call.reads_weights:
            call.unit.leave()
            if not call.unit.uses:
                self.open_units.discard(call.unit.index)
        return True

    def end(self) -> None:
        """It is over, also for calls whose end was not observed."""
        for call in list(self._awaited):
            self.leave(call)


def check_is_whole(units: Sequence[Unit]) -> None:
    """Check a backward that a stage of torch's own runs.

    Raises:
        RuntimeError: it is the backward of inputs alone. The gradients that the backward of weights
            computes would not be observed.
    """
    params = [
        param
        for unit in units
        for buffer in unit.trainable
        for param in buffer.full_params
        if param.requires_grad
    ]
    if params and not any(_will_run(accumulator_of(param)) for param in params):
        raise RuntimeError(
            "backward of a pipeline's stage: expected gradients of inputs and weights at once, "
            "since torch's own PipelineStage does not tell the engine of parts; found those of "
            "inputs alone (a zero-bubble schedule). Use fsdp_engine.pipelining.PipelineStage"
        )


current_run: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the run of autograd on this thread, the innermost one; -1: none runs."""


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return current_run() != -1


def _when_autograd_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the innermost run of autograd."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class Forward:
    """One forward: made when the first unit is entered, dropped when the last one is left.

    Attributes:
        open: numbers of the units that are entered, outermost first, without one-off uses. A unit
            of several modules can be in it more than once.
        num_refreshed: places of the canonical order up to which units are refreshed.
        refreshed: numbers of these units.
        outer: the backward within which it runs, and its recorded order; None: none of the engine.
    """

    def __init__(self, outer: tuple[Backward, Record] | None = None) -> None:
        self.outer = outer
        self.open: list[int] = []
        self.num_refreshed = 0
        self.refreshed: set[int] = set()


class Scheduler:
    """Gathers and frees units as forward and backward use them.

    Args:
        units: all of them, in module order, the root first.
        memory: of the engine.
        budget: elements to prefetch.
        reductions: called when the gradients of a unit are complete.
        timing: when changed weights are gathered.
        expected: the order in which units are expected to be used first.
        watch: sees forwards and backwards.

    Attributes:
        before_changes: called when users may change main weights next: after a forward without
            autograd, and before a step of an optimizer.
        gather_order: who decides which unit is gathered next.
        microbatch: to which forwards and backwards belong: of a pipeline, say.
        inputs_only: backwards compute no gradients of parameters.
    """

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
        self._record = self.make_record()
        sends_passes = any(unit.num_staged for unit in units)
        self._agreed_order = GatherOrder(reductions.ranks, self._record, sends_passes=sends_passes)
        self.gather_order = reductions.gather_order = self._agreed_order
        self._containing = expected.containing
        self.prefetches = budget > 0
        self._has_refreshes = any(unit.needs_refresh and not unit.reshards for unit in units)
        # All of them are issued when forward begins.
        self._refreshes_ahead = timing.gathers_ahead and self.prefetches and self._has_refreshes
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # [Note: Nested backwards]. The run of autograd within which the present forward runs, if
        # the engine had uses in it before.
        self.outer_run: int | None = None
        self._has_nested = False
        self._outermost_is_over = False
        self._nested_record: Record | None = None
        # Units that are unsharded, or in flight, for a use that is expected, with its phase.
        self._reserved: dict[int, int] = {}
        # Of units of several modules, calls that ran without autograd (re-entrant checkpoints may
        # run them again) or whose outputs are not observed. While any of such a unit's gradients
        # is missing it may be yet to come.
        self._uncounted: Counter[int] = Counter()
        # The last forward ran within a pipeline stage of torch's own.
        self._in_stage_of_torch = False

    # Forward.

    def enter_forward(self, unit: Unit, *, is_recorded: bool = True) -> None:
        """A module of the unit is called.

        Args:
            unit: which.
            is_recorded: the use is part of the recorded order. False: a one-off use.
        """
        forward = self._forward
        if forward is None:
            forward = self._begin_forward()
        if not torch.is_grad_enabled():
            self.note_uncounted(unit)
        if is_recorded:
            forward.open.append(unit.index)
            self._use(unit, FORWARD)
        else:
            self._use_once(unit, FORWARD)
        unit.enter()

    def note_uncounted(self, unit: Unit) -> None:
        """A module of the unit runs, and whether its backward will come is not known."""
        if len(unit.modules) > 1:
            self._uncounted[unit.index] += 1

    def note_run_again(self, unit: Unit) -> None:
        """A module of the unit is called within backward, with gradients enabled."""
        assert self._backward is not None
        self._backward.num_run_again[unit.index] += 1

    def leave_forward(self, unit: Unit, reads_again: bool, *, is_recorded: bool = True) -> None:
        """A module of the unit has returned.

        Args:
            unit: which.
            reads_again: a backward will come to it, and read its weights.
            is_recorded: as it was entered.
        """
        forward = self._forward
        assert forward is not None
        if is_recorded:
            forward.open.remove(unit.index)
            if unit.buffers and reads_again:
                self._record.leave(unit.index)
        unit.leave()
        if unit.uses == 0:
            phase = self._record.next_phase(unit.index, forward.open, reads_again)
            if phase:
                self._reserved[unit.index] = phase
            if phase or unit.kept or unit.options.keeps_after_forward:
                unit.uninstall()
                unit.keep_for(phase or BACKWARD)
            else:
                unit.release()
        if not forward.open:
            self._end_forward(forward, unit)

    def is_nested_forward(self, units: Collection[Unit], *, is_model: bool) -> bool:
        """Whether a call of a module within a backward has a backward of its own, or is within such
        a call. False: it repeats a call whose backward is to come, or runs.

        Args:
            units: of the module.
            is_model: it is the model itself.
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

    def _begin_nested(self) -> tuple[Backward, Record] | None:
        """A forward begins within a backward. Returns that backward, which has to wait, and its
        recorded order; None: the engine has had no use in it."""
        if not self._has_nested and torch.is_grad_enabled():
            self._has_nested = True
            self.reductions.begin_nested()
            _when_autograd_ends(self._end_outermost)
        outer = self._backward
        if outer is None:
            return None
        found = outer, self._record
        self._backward = None
        self._record = self._nested_record = self._nested_record or self.make_record()
        return found

    def _end_outermost(self) -> None:
        """The backward that nested ones ran in is over."""
        if self._backward is not None:  # its own callback follows
            self._outermost_is_over = True
            return
        self._has_nested = self._outermost_is_over = False
        self.reductions.end_nested()
        self._finish_backward()

    def _begin_forward(self) -> Forward:
        outer: tuple[Backward, Record] | None = None
        if in_backward():
            outer = self._begin_nested()
        elif self._backward is not None or self._has_nested:
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
        self._in_stage_of_torch = self.microbatch is None and context.stage
        for unit in self.units:
            if context.functional_call:
                unit.check_not_swapped()
            unit.follow_requires_grad()
            if unit.is_gathering and not unit.is_current:
                unit.wait()  # gathered before the forward, and changed since: to be gathered again
        self._record.begin_forward()
        self._watch.begin_forward()
        self.gather_order.begin_forward()
        self.outer_run = None if outer is None else outer[0].run
        forward = self._forward = Forward(outer)
        if self._refreshes_ahead or self.ranks_differ:
            self._refresh_through(None, forward)  # into memory that is held anyway
        return forward

    def _end_forward(self, forward: Forward, outermost: Unit) -> None:
        self._forward = None
        self._free_reserved(phase=FORWARD)
        self.gather_order.end_forward()
        if self._has_refreshes:
            self._refresh_through(None, forward)
            for unit in self.units:
                # Units that this rank did not enter must not read main weights that the next
                # optimizer step writes.
                unit.wait()
        if not torch.is_grad_enabled():
            for each in self.before_changes:
                each()
        if outermost is self.units[0]:
            self._record.end_forward()
            if not self.ranks_differ:
                order = self._record.units_in_forward
                self.reductions.order_seen(first_use_order(order, len(self.units)))
        self._watch.end_forward()
        if forward.outer is not None:
            self._backward, self._record = forward.outer
        if not self._has_nested:
            self._watch.check(ranks_differ=self.ranks_differ)

    def gather_before_forward(self, *, wait: bool, sharded: bool = True) -> None:
        """Issue the gathers that the next forward would begin with: those of units that are never
        sharded and changed, and (``sharded``) the first ones of the recorded order."""
        if self._forward is not None or self._backward is not None:
            return  # that forward runs already
        self._refresh_through(None, Forward())
        for use in self._record.first if sharded else ():
            unit = self.units[use.unit]
            if unit.reshards and unit.needs_gather(FORWARD):
                self.prefetch(unit, FORWARD)
        if wait:
            for unit in self.units:
                unit.wait()

    def gather_ahead(self, unit: Unit) -> None:
        """Issue the gather of a unit that the user asks for."""
        if self.ranks_differ and not unit.reshards:
            self.gather_before_forward(wait=False, sharded=False)  # as the others' next forward
        else:
            self.provide(unit, FORWARD)

    @property
    def ranks_differ(self) -> bool:
        """Whether ranks may use different units."""
        return self.gather_order.ranks_differ

    def use_gather_order(self, order: GatherOrder | None) -> None:
        """Gather in another order from now on; no forward or backward is running.

        Args:
            order: None: all ranks use the same units, in the recorded order.
        """
        self.gather_order = self.reductions.gather_order = order or self._agreed_order
        self._record = self.gather_order.record
        self.free_all()

    def await_ranks(self, place: Place = Place.CALL) -> None:
        """See :meth:`.GatherOrder.await_ranks`."""
        self.gather_order.await_ranks(place)

    def free_all(self) -> None:
        """Free what ranks may hold differently, so that all hold the same again."""
        self._reserved.clear()
        for unit in self.units:
            if unit.reshards and not unit.uses:
                unit.release()

    def wait_for_gathers(self) -> None:
        """Wait for the gathers in flight, and free prefetched units."""
        for unit in self.units:
            unit.wait()
        self._free_reserved(phase=FORWARD)

    # Backward.

    def recompute(self, unit: Unit) -> None:
        """A module of the unit is called within backward: activation checkpointing.

        Nothing is freed before the unit's own backward is over.
        """
        backward = self.begin_backward()
        if backward.in_slices:
            self._complete_slices(backward, unit)
        backward.touched[unit.index] = unit
        if unit.uses:
            self._record.recomputes(unit.index)
            self._use_once(unit, BOTH)
        else:
            # Where the same bytes serve both phases, its backward gathers no more.
            self._use(unit, unit.recomputed_phase)

    def enter_backward(self, call: Call, inputs: Sequence[Any] = ()) -> None:
        """The gradient of an output of ``call`` has come: its backward begins.

        Args:
            call: which.
            inputs: autograd's nodes of the call's inputs, where it has several.

        Raises:
            Exception: see :meth:`.GatherOrder.check_backward`.
        """
        backward = self._backward
        if backward is not None and backward.has_entered(call):
            return
        if call.gather_order is not self.gather_order:
            call.gather_order.check_backward(call, self.gather_order)
        if backward is None:
            backward = self.begin_backward()
        elif backward.run == call.outer_run:
            backward = self.run_backward(Backward((backward, self._record)))
        if not backward.observes(call):
            return
        if backward.in_slices:
            self._complete_slices(backward, call.unit)
        backward.enter(call, inputs)
        if call.reads_weights:
            if call.is_recorded:
                self._use(call.unit, BACKWARD)
            else:
                self._use_once(call.unit, BACKWARD)
            call.unit.enter()

    def input_came(self, call: Call) -> None:
        """The gradient of an input of ``call`` has come."""
        backward = self._backward
        if backward is not None and backward.input_came(call):
            self._leave_backward(backward, call)
            if current_run() == backward.run:
                self._check_ready(call.unit)
            else:
                backward.note_slice(call.unit)

    def _leave_backward(self, backward: Backward, call: Call) -> None:
        """The backward of ``call`` is over."""
        if not backward.leave(call):
            return
        unit = call.unit
        if unit.uses == 0:
            phase = self._record.next_phase(unit.index, backward.open_units, False)
            if phase:
                self._reserved[unit.index] = phase
                unit.uninstall()
            else:
                self._end_use(unit)

    def gradient_came(self, unit: Unit) -> None:
        """The last gradient of a buffer of ``unit`` came."""
        backward = self._backward
        assert backward is not None
        if unit.num_missing_grads or unit.index in self._containing:
            return  # functions before the units inside may still read its weights
        if current_run() == backward.run:
            self._leave_calls(backward, unit)
        else:
            backward.note_slice(unit)

    def _complete_slices(self, backward: Backward, following: Unit | None) -> None:
        """This run of autograd reaches ``following``, or (None) the backward ends."""
        if following is not None and (
            following.index in backward.in_slices or current_run() == backward.last_nested_run
        ):
            return
        units = list(backward.in_slices.values())
        backward.in_slices.clear()
        for unit in units:
            self._complete(backward, unit)

    def _complete(self, backward: Backward, unit: Unit) -> None:
        """The gradients of ``unit`` have come in this backward, unless calls are to bring more."""
        if unit.num_missing_grads or unit.index in self._containing:
            self._check_ready(unit)
        else:
            self._leave_calls(backward, unit)

    def _leave_calls(self, backward: Backward, unit: Unit) -> None:
        """All gradients of ``unit`` have come: leave its calls whose end is not observed."""
        calls = [call for call in backward.open_calls(unit) if call.is_recorded]
        if any(call.has_boundary for call in calls):
            return  # the end of that call's backward is observed
        for call in calls:
            self._leave_backward(backward, call)
        self._check_ready(unit)

    def _check_ready(self, unit: Unit) -> None:
        """Report the unit to the reductions if all of its gradients have come."""
        assert self._backward is not None
        is_counted = unit.index not in self._uncounted or not unit.num_missing_grads
        runs_again = unit.index in self._backward.run_again
        if is_counted and not runs_again and not unit.awaits_backward(self.microbatch):
            self.reductions.unit_is_ready(unit)

    def begin_gradient(self, unit: Unit) -> None:
        """``unit`` is about to get its first gradient of this backward, or will get it later."""
        backward = self.begin_backward()
        backward.creates_graph = torch.is_grad_enabled()
        if backward.in_slices:
            self._complete_slices(backward, unit)
        self.reductions.open_unit(unit)

    def late_gradient_came(self, unit: Unit) -> None:
        """The last weight gradient that the unit's modules postponed has come."""
        if unit.uses == 0:
            unit.uninstall()
        self.reductions.late_gradient_came(unit)
        if self._backward is None:
            self.reductions.run_hooks()

    def begin_backward(self) -> Backward:
        """Returns the running backward; the first event of a backward makes it."""
        return self._backward or self.run_backward(Backward())

    def run_backward(self, backward: Backward) -> Backward:
        """``backward`` begins; returns it."""
        if self._in_stage_of_torch:
            check_is_whole(self.units)
        self.reductions.begin_backward(inputs_only=self.inputs_only)
        for unit in self.units:
            # Parameters may have been frozen and thawed since forward, as adapters are around the
            # forward of a reference model.
            unit.follow_requires_grad_in_backward()
        if backward.outer is not None:
            assert self._nested_record is not None
            self._record = self._nested_record
        self._backward = backward
        self.gather_order.begin_backward()
        if backward.is_recorded:
            self._record.begin_backward()
            # Ends calls that autograd leaves open: parameters or inputs without a gradient.
            _when_autograd_ends(self.end_backward)
        return backward

    def end_backward(self) -> None:
        """Autograd has finished this backward."""
        backward = self._backward
        assert backward is not None
        self._complete_slices(backward, None)
        self.reductions.end_backward()
        if backward.is_recorded:
            self._record.end_backward()
        self._free_reserved()
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
                self._end_use(unit)
        self._backward = None
        if backward.outer is not None:
            self._backward, self._record = backward.outer
        self.gather_order.end_backward()
        if self._outermost_is_over and self._backward is None:
            self._end_outermost()
        elif not self._has_nested:
            self._finish_backward()

    def _finish_backward(self) -> None:
        """No backward runs any more, and its reductions are submitted."""
        self._memory.end_backward(step_is_over=self.reductions.are_final)
        self._watch.check(ranks_differ=self.ranks_differ)
        self.reductions.run_hooks()

    def _forget_uncounted(self, backward: Backward) -> None:
        """Subtract the calls that ran again. If some did, the others are of a pipeline whose next
        forward precedes this backward; if none did, they were of an evaluation."""
        for index in list(self._uncounted):
            num_run_again = backward.num_run_again[index]
            self._uncounted[index] -= num_run_again
            if not num_run_again or self._uncounted[index] <= 0:
                del self._uncounted[index]

    @staticmethod
    def _end_use(unit: Unit) -> None:
        """A backward has no more use for the unit."""
        if unit.options.keeps_after_backward:
            unit.uninstall()
        else:
            unit.release()

    # Both.

    def _use(self, unit: Unit, phase: int) -> None:
        """A use of ``unit`` begins: provide its full parameters, and prefetch the next units."""
        if not unit.buffers:
            return
        step = self._record.use(unit.index, phase)
        window = step.window
        if (asked := unit.options.prefetch(phase)) is not None:
            each_phase = BACKWARD if phase & BACKWARD else FORWARD
            window = tuple(Use(each.index, each_phase) for each in asked if each.reshards)
        if self._reserved and (not step.expected or self._backward is None):
            self._free_reserved(
                keep={unit.index, *(use.unit for use in window)},
                phase=BACKWARD if step.expected else BOTH,
            )
        compute_now: Ticket | None = None  # the model runs nothing between these gathers
        if window and unit.reshards and unit.needs_refresh and not unit.is_current:
            compute_now = unit.record_compute()
        self.provide(unit, step.phase, compute_now)
        self._reserved.pop(unit.index, None)
        for use in self.gather_order.window(window):
            ahead = self.units[use.unit]
            if ahead.needs_gather(use.phase) and not ahead.uses:
                self.prefetch(ahead, use.phase, compute_now)
        self.install(unit)

    def _use_once(self, unit: Unit, phase: int) -> None:
        """A use of ``unit`` begins that is not part of the recorded order."""
        self.provide(unit, phase)
        self.install(unit)

    @staticmethod
    def install(unit: Unit) -> None:
        """The model reads full parameters from here on."""
        unit.wait()
        unit.note_access()
        # In backward, too: checkpoints within the unit run parts of its forward again.
        unit.install()

    def provide(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather of ``unit``, unless it is unsharded and current. ``compute_now``: see
        :meth:`Unit.gather`."""
        forward = self._forward
        if unit.reshards or forward is None or unit.index in forward.refreshed:
            self.gather_order.gather(unit, phase, compute_now)
        elif unit.needs_gather(phase):
            self._refresh_through(unit, forward)

    def _refresh_through(self, last: Unit | None, forward: Forward) -> None:
        """Refresh units that changed, in canonical order, up to ``last`` (None: all)."""
        order = self.reductions.canonical_order
        compute_now: Ticket | None = None  # the model runs nothing in between
        while forward.num_refreshed < len(order):
            unit = self.units[order[forward.num_refreshed]]
            forward.num_refreshed += 1
            forward.refreshed.add(unit.index)
            if not unit.reshards and unit.needs_gather(FORWARD):
                compute_now = compute_now or unit.record_compute()
                unit.gather(FORWARD, compute_now)
            if unit is last:
                return

    def prefetch(self, unit: Unit, phase: int, compute_now: Ticket | None = None) -> None:
        """Issue the gather of ``unit`` for an expected use of ``phase``. ``compute_now``: see
        :meth:`.Unit.gather`."""
        unit.gather(phase, compute_now)
        self._reserved[unit.index] = phase

    def is_reserved(self, unit: Unit) -> bool:
        """Whether ``unit`` is unsharded for a use that is expected."""
        return unit.index in self._reserved

    def use_reserved(self, unit: Unit) -> None:
        """The use of ``unit`` that was expected, if any was, is the one that begins."""
        self._reserved.pop(unit.index, None)

    def _free_reserved(self, keep: Collection[int] = (), phase: int = BOTH) -> None:
        """Free units that are unsharded for a use of ``phase`` that is no longer expected.

        A use of both phases counts as one of backward.
        """
        for index, reserved_for in sorted(self._reserved.items()):
            counts_as = BACKWARD if reserved_for & BACKWARD else FORWARD
            if index in keep or not counts_as & phase:
                continue
            del self._reserved[index]
            unit = self.units[index]
            if unit.uses == 0 and unit.reshards:
                unit.release()

    @property
    def is_at_rest(self) -> bool:
        """Whether neither a forward nor a backward is running."""
        return self._forward is None and self._backward is None and not self._has_nested

    @property
    def phase(self) -> str:
        """What the program does, in messages: "forward", "backward", else "step"."""
        if self._backward is not None:
            return "backward"
        return "forward" if self._forward is not None else "step"

    def reset(self) -> None:
        """Drop the running forward and backward; communication must be over."""
        running: Backward | Forward | None
        for running in (self._backward, self._forward):
            while running is not None and running.outer is not None:
                running, self._record = running.outer
        self._forward = self._backward = None
        self._has_nested = self._outermost_is_over = False
        self._reserved.clear()
        self._uncounted.clear()
        self.gather_order.reset()
        self._watch.reset()
        self.reductions.reset()
        for unit in self.units:
            unit.reset()
        self._memory.release_idle()
