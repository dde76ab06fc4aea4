"""When: what is gathered ahead of use, and what is released.

Forward records the order in which units are entered; the next forward and backward gather ahead
along it (``order.py``). Where execution leaves the recorded order, units gathered in vain are
dropped, the unit is gathered on demand, and the new order is recorded. Reductions are the
business of ``reductions.py``.

[Note: One order on all ranks]
Collectives of one group must be issued in one order on all ranks. Units whose parameters are cut
gather when they are entered: all ranks must enter the same units, as everywhere. Units that are
always full only *refresh* after the weights changed, and there ranks may differ in what they
enter: so refreshes are always issued in the canonical order of units, whoever asks first, and what
is left is refreshed when forward ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_engine.config import Timing
from fsdp_engine.devices.memory import Memory
from fsdp_engine.runtime.order import Walk, first_use_order, leave_order
from fsdp_engine.runtime.reductions import Reductions
from fsdp_engine.runtime.unit import Call, Unit, UnitState, in_functional_call


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


class Scheduler:
    """Moves units through their lives as forward and backward come along."""

    def __init__(
        self,
        units: Sequence[Unit],
        root: Unit,
        memory: Memory,
        budget: int,
        reductions: Reductions,
        timing: Timing,
    ) -> None:
        self.units = tuple(units)
        self._root = root
        self._memory = memory
        self._budget = budget
        self.reductions = reductions
        self._open: list[Unit] = []
        self._recording: list[int] = []
        self._left: list[int] = []
        self._ahead: set[int] = set()
        self._kept: Unit | None = None
        self._backward_is_open = False
        self._touched: dict[int, Unit] = {}
        self._opened_calls: list[Call] = []
        self._part_uses: list[tuple[int, int]] = []
        # Whether this backward has create_graph: it runs its functions with gradients enabled.
        self._creates_graph = False
        # Units that backwards with create_graph went through since the last one without.
        self._recorded: set[int] = set()
        self._gathered_before = False
        self._refreshes_ahead = timing.gathers_ahead and budget > 0
        self._any_refresh = any(u.needs_refresh and not u.reshards for u in units)
        # Units refreshed in this forward, in canonical order (the keys of a dictionary).
        self._refreshed: dict[int, None] = {}
        self._adopt_order(
            [unit.index for unit in units], leave_order([unit.name for unit in units])
        )

    # Forward.

    def enter_forward(self, unit: Unit) -> None:
        """The unit's module is called."""
        if not self._open:
            self._begin_forward()
        self._open.append(unit)
        self._recording.append(unit.index)
        self._make_full(unit, self._forward)

    def leave_forward(self, unit: Unit, has_backward: bool) -> None:
        """The unit's module has returned.

        Args:
            unit: which.
            has_backward: autograd will come back to it.
        """
        innermost = self._open.pop()
        assert innermost is unit, f"{unit.label} is left within {innermost.label}"
        self._left.append(unit.index)
        unit.leave()
        if unit.uses == 0:
            unit.uninstall()
            stays = has_backward and (unit is self._root or unit.index == self._last_left)
            if stays and unit is not self._root:
                self._kept = unit
            if stays or unit.hides_output:
                unit.turn_to_backward()
            else:
                unit.release()
        if not self._open:
            self._end_forward(unit)

    def _begin_forward(self) -> None:
        if self._backward_is_open:
            raise RuntimeError(
                "the last backward did not finish, perhaps because of an exception: "
                "call engine.reset() before the next forward"
            )
        is_functional = in_functional_call()
        for unit in self.units:
            if is_functional:
                unit.check_not_swapped()
            unit.follow_requires_grad()
        self._forward.restart()
        self._refreshed.clear()
        if self._gathered_before:
            self._gathered_before = False
            for unit in self.units:
                if unit.state is UnitState.GATHERING and not unit.is_current:
                    unit.settle()  # changed since: to be gathered again
        if self._any_refresh and self._refreshes_ahead:
            # Into memory that is held anyway: the sooner the better.
            self._refresh_through(None)
        self._recording = []
        self._left = []
        self._part_uses.clear()

    def _end_forward(self, outermost: Unit) -> None:
        self._drop_ahead()
        if self._any_refresh:
            self._refresh_through(None)
            for unit in self.units:
                # What this rank did not enter must not read main weights into the next step.
                unit.settle()
        if outermost is self._root:
            if self._recording != self._forward.order:
                self._adopt_order(self._recording, self._left)
            self.reductions.order_seen(first_use_order(self._uses(), len(self.units)))

    def use_part(self, part: Unit) -> None:
        """A module that holds weights of ``part`` is called, or all of them are to be there."""
        if not self._open:
            return  # in backward they are there; outside the root's forward nobody waits for them
        if not part.installed:
            self._part_uses.append((len(self._recording), part.index))
        self._gather(part)
        part.settle()
        part.touch()
        part.install()

    def gather_before_forward(self, *, wait: bool, cut: bool = True) -> None:
        """Issue what the next forward would begin with: what changed and is never cut, and
        (``cut``) what forward gathers first."""
        if not self.is_at_rest:
            return  # under way already
        for index in self.reductions.canonical_order:
            unit = self.units[index]
            if not unit.reshards and unit.needs_gather:
                unit.gather()
        if cut and any(unit.reshards for unit in self.units):
            self._forward.restart()
            window, _ = self._forward.advance(self._root.index)
            for index in (self._root.index, *window):
                unit = self.units[index]
                unit.for_backward = False
                if unit.reshards and unit.needs_gather:
                    unit.gather()
                    self._ahead.add(index)
        self._gathered_before = True
        if wait:
            for unit in self.units:
                unit.settle()

    def _uses(self) -> list[int]:
        """Units in the order in which forward used them, the root's parts at their first use."""
        uses = list(self._recording)
        for place, part in reversed(self._part_uses):
            uses.insert(place, part)
        return uses

    def _enter_parts(self, in_forward: bool) -> None:
        for part in self._root.parts:
            if not in_forward:
                part.settle()
                part.install()
            elif part.uncalled:
                # Some module reads its weight without being called, or nothing is known yet.
                self.use_part(part)

    # Backward.

    def recompute(self, unit: Unit) -> None:
        """The unit's module is called within backward: activation checkpointing.

        Nothing is gathered ahead, and nothing is released before the unit's own backward is over.
        """
        self.begin_backward()
        self._touched[unit.index] = unit
        if unit.has_planes and unit.uses:
            unit.is_recomputed = True
        # It computes as in forward; but where one plane serves both, its backward gathers no more.
        unit.for_backward = not unit.has_planes
        if unit.needs_gather:
            unit.gather()
        self._ahead.discard(unit.index)
        unit.settle()
        if unit.has_planes:
            unit.resume()
        unit.touch()
        unit.install()
        if unit.parts:
            self._enter_parts(in_forward=False)

    def enter_backward(self, call: Call) -> None:
        """The gradient of a call's output has come: its backward begins."""
        if call.opened:
            return
        self.begin_backward()
        self._creates_graph = torch.is_grad_enabled()
        if self._creates_graph:
            # What is recorded now will read the weights once more.
            self._recorded.add(call.unit.index)
            call.unit.is_recorded = True
            call.unit.keep_full()
        call.opened = True
        self._opened_calls.append(call)
        call.unit.open_calls.append(call)
        self._touched[call.unit.index] = call.unit
        self._make_full(call.unit, self._backward)

    def leave_backward(self, call: Call) -> None:
        """The gradients of a call's inputs have come: its backward is over."""
        if call.closed or not call.opened:
            return
        call.closed = True
        unit = call.unit
        unit.open_calls.remove(call)
        call.uncount()
        unit.leave()
        if unit.uses == 0:
            unit.release()
        if not unit.awaits_backward:
            self.reductions.unit_is_ready(unit)

    def gradient_came(self, unit: Unit) -> None:
        """A parameter of ``unit`` got its gradient."""
        if unit.num_missing_grads or unit is self._root:
            return
        if any(call.has_boundary for call in unit.open_calls):
            return  # the end of that call's backward will be seen
        for call in tuple(unit.open_calls):
            self.leave_backward(call)
        if not unit.awaits_backward:
            self.reductions.unit_is_ready(unit)

    def begin_gradient(self, unit: Unit) -> None:
        """A parameter of ``unit`` is about to get the first gradient of this backward."""
        self.begin_backward()
        self._creates_graph = torch.is_grad_enabled()
        self.reductions.open_unit(unit)

    def late_gradient_came(self, unit: Unit) -> None:
        """The last weight gradient that the unit's modules had put off has come."""
        if unit.uses == 0:
            unit.uninstall()
        self.reductions.late_gradient_came(unit)
        if not self._backward_is_open:
            self.reductions.run_hooks()

    def begin_backward(self) -> None:
        """Some event of a backward, whichever is seen first."""
        if self._backward_is_open:
            return
        self.reductions.begin_backward()
        self._backward_is_open = True
        self._backward.restart()
        # Closes whatever autograd leaves open: parameters without a gradient, inputs without one.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self.reductions.end_backward()
        for call in self._opened_calls:
            # The graph may be kept and run once more.
            if not call.closed:
                call.unit.uses -= 1
                call.unit.open_calls.remove(call)
                call.uncount()
            call.opened = call.closed = False
        self._opened_calls.clear()
        self._drop_ahead()
        if not self._creates_graph:
            for index in self._recorded:
                self.units[index].is_recorded = self.units[index].is_kept_full = False
                self._touched[index] = self.units[index]
            self._recorded.clear()
        for unit in self._touched.values():
            if unit.uses == 0:
                if unit.state is UnitState.IN_USE:
                    unit.rest()
                unit.release()
        self._touched.clear()
        self._backward_is_open = False
        self._memory.end_backward()
        self.reductions.run_hooks()

    # Both.

    def _make_full(self, unit: Unit, walk: Walk) -> None:
        window, expected = walk.advance(unit.index)
        kept = self._kept
        if kept is not None and kept is not unit and unit is not self._root:
            # Kept for the start of backward, but something else comes first.
            self._kept = None
            if kept.uses == 0:
                self._ahead.add(kept.index)
                expected = False
        if not expected:
            self._drop_ahead(keep=(unit.index, *window))
        for_backward = walk is self._backward
        unit.for_backward = for_backward
        self._gather(unit)
        self._ahead.discard(unit.index)
        for index in window:
            ahead = self.units[index]
            ahead.for_backward = for_backward
            if ahead.needs_gather:
                self._gather(ahead)
                self._ahead.add(index)
        unit.settle()
        unit.enter()
        unit.touch()
        # In backward, too: checkpoints within the unit run parts of its forward again.
        unit.install()
        if unit.parts:
            self._enter_parts(in_forward=walk is self._forward)

    def _gather(self, unit: Unit) -> None:
        if not unit.needs_gather:
            return
        if unit.reshards or unit.index in self._refreshed:
            unit.gather()
        else:
            self._refresh_through(unit)

    def _refresh_through(self, last: Unit | None) -> None:
        """Refresh what is stale, in canonical order, up to ``last`` (None: all)."""
        order = self.reductions.canonical_order
        while len(self._refreshed) < len(order):
            unit = self.units[order[len(self._refreshed)]]
            self._refreshed[unit.index] = None
            if not unit.reshards and unit.needs_gather:
                unit.gather()
            if unit is last:
                return

    def _drop_ahead(self, keep: Sequence[int] = ()) -> None:
        """Let go of units that were gathered ahead in vain."""
        for index in [i for i in self._ahead if i not in keep]:
            self._ahead.discard(index)
            unit = self.units[index]
            if unit.uses == 0 and unit.reshards:
                unit.release()

    def _adopt_order(self, entered: Sequence[int], left: Sequence[int]) -> None:
        sizes = [unit.num_elements if unit.reshards else 0 for unit in self.units]
        self._forward = Walk(entered, sizes, self._budget)
        self._backward = Walk(left[::-1], sizes, self._budget)
        # What forward leaves last, beside the root, is what backward needs first.
        others = [index for index in left if index != self._root.index]
        self._last_left = others[-1] if others else self._root.index

    @property
    def is_at_rest(self) -> bool:
        """Whether neither a forward nor a backward is under way."""
        return not self._open and not self._backward_is_open

    def reset(self) -> None:
        """Forget what was under way; communication must be over."""
        self._open.clear()
        self._ahead.clear()
        self._kept = None
        self._touched.clear()
        self._recorded.clear()
        self._opened_calls.clear()
        self._backward_is_open = False
        self.reductions.reset()
        for unit in self.units:
            unit.abandon()
        self._memory.release_idle()
