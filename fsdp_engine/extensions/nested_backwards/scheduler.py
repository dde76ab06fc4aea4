"""A scheduler for forwards and backwards within a backward.

[Note: Nested backwards]
A backward can run forwards that have backwards of their own. An example is a hook on a loss of
cached embeddings that embeds each mini-batch again (GradCache). Such a *nested* forward is not a
recomputation, since no call of its units is pending or running. Its units are gathered, freed and
prefetched as in any forward, and its backward is a separate :class:`.Backward`, on top of the
running one. Gradients of nested backwards are accumulated like those of microbatches, and axes that
are reduced on the last microbatch are reduced when the outermost backward ends ([Note: Passes] in
``reductions.py``).

If the backward of a ``torch.autograd.Function`` runs a forward of a single unit, this is treated as
a recomputation (a re-entrant checkpoint). A forward of the model is treated as nested.

Other functions run autograd once for each slice of their input (a tiled MLP). All gradients of a
unit can then be computed several times. So a unit whose gradients a nested run of autograd has
computed is reduced only when another run reaches another unit, or the backward ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fsdp_engine.extensions.nested_backwards.reductions import NestedReductions
from fsdp_engine.runtime.passes import (
    NO_RUN,
    Backward,
    Forward,
    current_run,
    in_backward,
    when_autograd_ends,
)
from fsdp_engine.runtime.schedule import Record
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class Outer(NamedTuple):
    """A backward within which others run.

    Attributes:
        backward: The backward that waits.
        record: The recorded order of its uses.
    """

    backward: Backward
    record: Record


class NestedForward(Forward):
    """A forward within a backward in which the engine has had uses.

    Args:
        outer: The backward within which the forward runs.
    """

    def __init__(self, outer: Outer) -> None:
        super().__init__()
        self.outer = outer


class NestedBackward(Backward):
    """The backward of a nested forward.

    Args:
        outer: The backward within which it runs.
    """

    def __init__(self, outer: Outer) -> None:
        super().__init__()
        self.outer = outer


class Slices:
    """Units all of whose gradients were computed in nested runs of autograd within one backward,
    possibly for a slice of their input only.

    Attributes:
        units: The units by index.
        last_run: The last run that computed such gradients.
    """

    def __init__(self) -> None:
        self.units: dict[int, Unit] = {}
        self.last_run = NO_RUN


class NestedScheduler(Scheduler):
    """Scheduler with nested forwards and backwards. See the module docstring."""

    reductions: NestedReductions

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._outermost_is_over = False
        self._nested_record = self.make_record()
        self._outermost_record: Record | None = None
        self._in_slices: dict[Backward, Slices] = {}

    def _make_forward(self) -> Forward:
        self.outer_run = None
        if not in_backward():
            return super()._make_forward()
        if not self._has_nested and torch.is_grad_enabled():
            self._has_nested = True
            self.reductions.begin_nested()
            when_autograd_ends(self._end_outermost)
        if self._backward is None:
            return Forward()  # The engine has had no uses in that backward.
        outer = self._let_wait(self._backward)
        self._backward = None
        self.outer_run = outer.backward.run
        return NestedForward(outer)

    def _begin_nested(self, outer: Backward) -> Backward:
        return self.run_backward(NestedBackward(self._let_wait(outer)))

    def _let_wait(self, backward: Backward) -> Outer:
        """Suspend ``backward``. Further uses are recorded separately."""
        record = self.schedule.record
        if record is not self._nested_record:
            self._outermost_record = record
        self.schedule.record = self._nested_record
        return Outer(backward, record)

    def _resume(self, ended: Forward | Backward) -> None:
        if isinstance(ended, Backward):
            self._in_slices.pop(ended, None)
        if isinstance(ended, NestedForward | NestedBackward):
            self._backward, self.schedule.record = ended.outer
            if self.schedule.record is self._outermost_record:
                self._outermost_record = None

    def _end_outermost(self) -> None:
        """End the outermost backward, within which nested ones ran."""
        # The callback of the outermost backward is called later, and ends both.
        if self._backward is not None:
            self._outermost_is_over = True
            return
        self._has_nested = self._outermost_is_over = False
        self.reductions.end_nested()
        self._finish_backward()

    def end_backward(self) -> None:
        """See the base class."""
        super().end_backward()
        if self._outermost_is_over and self._backward is None:
            self._end_outermost()

    def _note_slice(self, backward: Backward, unit: Unit) -> None:
        slices = self._in_slices.setdefault(backward, Slices())
        slices.units[unit.index] = unit
        slices.last_run = current_run()

    def _complete_slices(self, backward: Backward, following: Unit | None) -> None:
        slices = self._in_slices.get(backward)
        if slices is None:
            return
        if following is not None and (
            following.index in slices.units or current_run() == slices.last_run
        ):
            return
        units, slices.units = slices.units, {}
        for unit in units.values():
            if unit.misses_gradients or unit.index in self._containing:
                self._check_ready(unit)
            else:
                self._leave_calls(backward, unit)

    def reset(self) -> None:
        """See the base class."""
        if self._outermost_record is not None:
            self.schedule.record, self._outermost_record = self._outermost_record, None
        self._has_nested = self._outermost_is_over = False
        self._in_slices.clear()
        super().reset()
