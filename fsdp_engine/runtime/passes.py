"""The running forward and the running backward, with the units and calls that each has entered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fsdp_engine.extension_list import advice_for
from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.unit import Call, Unit, retains_graph

# Returns whether the running backward reaches a node.
_will_run: Any = torch._C._will_engine_execute_node

# The number of expected input gradients of a call whose input was changed in place. The end of the
# backward of such a call is not observed.
_UNKNOWN = -1


class Forward:
    """A running forward. It begins when the first unit is entered, and ends when the last is left.

    Attributes:
        open: Numbers of the units that are entered and not yet left, outermost first, without
            one-off uses. A unit of several modules can be in the list more than once.
    """

    def __init__(self) -> None:
        self.open: list[int] = []


class Backward:
    """A running backward, with the calls that it has entered and left.

    Attributes:
        is_recorded: Whether the backward is part of the recorded order. It then ends with its run
            of autograd. False, in a subclass: the code that begins the backward ends it.
        creates_graph: Whether autograd records the backward itself (``create_graph``).
        touched: Units that may be unsharded when the backward ends, by number.
        open_units: Numbers of the units that the backward computes with. They are skipped when the
            next use is looked up in the recorded order.
        num_retained: For each unit, the number of calls that this backward has entered and whose
            graph is retained, by this or an earlier backward.
        num_repeated: For each unit, the number of calls that this backward has repeated.
        run: The number of the backward's run of autograd.
    """

    is_recorded = True

    def __init__(self) -> None:
        self.run = current_run()
        self.creates_graph = False
        self.touched: dict[int, Unit] = {}
        self.open_units: set[int] = set()
        self.num_retained: Counter[int] = Counter()
        self.num_repeated: Counter[int] = Counter()
        # For each open call, the number of input gradients that are not computed yet. For each call
        # that was left, the run of autograd in which this happened.
        self._awaited: dict[Call, int] = {}
        self._left: dict[Call, int] = {}

    def observes(self, call: Call) -> bool:
        """Called when the backward of ``call`` begins. Returns whether this object must observe it.
        False, in a subclass: this method has done everything that the call needs."""
        return True

    def has_entered(self, call: Call) -> bool:
        """Returns whether the backward of ``call`` has begun. A call that was left in one run of
        autograd begins again in another run, which a hook may start with ``retain_graph``."""
        if call in self._awaited:
            return True
        return call in self._left and self._left[call] == current_run()

    def computes_with(self, units: Collection[Unit], containing: Collection[int]) -> bool:
        """Returns whether a unit in ``units``, or any unit that contains other units, has a call
        whose backward is running.

        Args:
            units: The units to look for.
            containing: Numbers of all units that contain other units.
        """
        return any(call.unit in units or call.unit.index in containing for call in self._awaited)

    def may_repeat(self, unit: Unit) -> bool:
        """Returns whether this backward may still reach a call of ``unit`` whose graph an earlier
        backward has retained."""
        return unit.num_retained > self.num_retained[unit.index]

    def open_calls(self, unit: Unit) -> list[Call]:
        """Returns the calls of ``unit`` whose backward is running."""
        return [call for call in self._awaited if call.unit is unit]

    def enter(self, call: Call, inputs: Sequence[Any]) -> None:
        """Begin the backward of ``call``.

        Args:
            call: The call.
            inputs: Autograd's nodes of the call's inputs, if there are several.

        Raises:
            RuntimeError: The unit is of a subclass whose :meth:`Unit.keep_recorded` does not allow
                ``create_graph``.
        """
        unit = call.unit
        self.creates_graph = torch.is_grad_enabled()
        if self.creates_graph:
            # Functions that autograd records in this backward will read the weights once more.
            unit.keep_recorded()
        num_inputs = sum(map(_will_run, inputs)) if inputs else 1
        self._awaited[call] = _UNKNOWN if call.input_changed else num_inputs
        if retains_graph():
            call.retain()
        if call.is_retained and call not in self._left:
            self.num_retained[unit.index] += 1
        self.touched[unit.index] = unit
        if call.reads_weights:
            self.open_units.add(unit.index)

    def count_input_gradient(self, call: Call) -> bool:
        """Count a gradient of an input of ``call``. Returns whether it was the last one."""
        awaited = self._awaited.get(call, 0)
        if awaited > 0:
            self._awaited[call] = awaited - 1
        return awaited == 1

    def leave(self, call: Call) -> bool:
        """End the backward of ``call``. Returns False if it was not running."""
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
        """End the backward, including that of calls whose end was not observed."""
        for call in list(self._awaited):
            self.leave(call)


def check_is_whole(units: Sequence[Unit]) -> None:
    """Check that the running backward computes the gradients of weights, and not only those of
    inputs. Called for stages of torch.distributed.pipelining.

    Raises:
        RuntimeError: The backward computes only gradients of inputs. The engine would not observe
            the later backward that computes gradients of weights.
    """
    params = [
        param
        for unit in units
        for buffer in unit.trainable
        for param in buffer.full_params
        if param.requires_grad
    ]
    if params and not any(_will_run(accumulator_of(param)) for param in params):
        advice = advice_for("split backward")
        raise RuntimeError(
            "backward of a stage of torch.distributed.pipelining: expected gradients of inputs "
            "and weights at once, since torch's own stage does not report a later backward of "
            "the weights to the engine; found gradients of inputs only (a zero-bubble "
            f"schedule){advice and '. '}{advice}"
        )


current_run: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the run of autograd on this thread, the innermost one, or ``NO_RUN``."""
NO_RUN = -1


def in_backward() -> bool:
    """Returns whether autograd is running a backward on this thread."""
    return current_run() != NO_RUN


def when_autograd_ends(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the innermost run of autograd."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
