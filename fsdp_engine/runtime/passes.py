"""The forward and the backward that run: what each of them has entered and not yet left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fsdp_engine.extension_list import advice_for
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.unit import Call, Unit

# Whether the running backward reaches a node.
_will_run: Any = torch._C._will_engine_execute_node

# The number of gradients that are awaited of a call whose input was changed in place: its end is
# not observed.
_UNKNOWN = -1


class Forward:
    """One forward: made when the first unit is entered, dropped when the last one is left.

    Attributes:
        open: numbers of the units that are entered, outermost first, without one-off uses. A unit
            of several modules can be in it more than once.
    """

    def __init__(self) -> None:
        self.open: list[int] = []


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
        run: number of the run of autograd that it is.
    """

    is_recorded = True

    def __init__(self) -> None:
        self.run = current_run()
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

    def open_calls(self, unit: Unit) -> list[Call]:
        """Calls of ``unit`` whose backward has begun and is not over."""
        return [call for call in self._awaited if call.unit is unit]

    def enter(self, call: Call, inputs: Sequence[Any]) -> None:
        """The backward of ``call`` begins.

        Args:
            call: The call.
            inputs: Autograd's nodes of the call's inputs, where it has several.

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
            "backward of a stage of torch.distributed.pipelining: expected gradients of inputs "
            "and weights at once, since torch's own stage does not tell the engine of parts; found "
            f"those of inputs alone (a zero-bubble schedule). Use {advice_for('split backward')}"
        )


current_run: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the run of autograd on this thread, the innermost one, or ``NO_RUN``."""
NO_RUN = -1


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return current_run() != NO_RUN


def when_autograd_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the innermost run of autograd."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
