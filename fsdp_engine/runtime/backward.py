"""One backward: made at its first event, dropped at autograd's end callback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.unit import Call, Unit

# Of a call whose input was changed in place: its end is not observed.
_UNKNOWN = -1


class Backward:
    """The calls that a backward has entered and left, and the units that it may leave unsharded.

    Args:
        weights_only: it computes gradients of weights alone, in several runs of autograd.

    Attributes:
        weights_only: see above.
        for_weights: units that such a backward reads.
        creates_graph: it runs its functions with gradients enabled (``create_graph``).
        touched: units that may be unsharded when it ends, by number.
        open_units: numbers of units that it computes with, passed over in the recorded order.
        run_again: numbers of units of several calls whose graph was retained and runs once more:
            the number of calls that will come again is not known.
        num_run_again: calls of modules that ran again within this backward, by unit.
    """

    def __init__(self, *, weights_only: bool = False) -> None:
        self.weights_only = weights_only
        self.for_weights: list[Unit] = []
        self.creates_graph = False
        self.touched: dict[int, Unit] = {}
        self.open_units: set[int] = set()
        self.run_again: set[int] = set()
        self.num_run_again: Counter[int] = Counter()
        # Gradients of inputs that have not come yet, by open call; and calls that were left.
        self._awaited: dict[Call, int] = {}
        self._left: set[Call] = set()

    def has_entered(self, call: Call) -> bool:
        """Whether the backward of ``call`` has begun."""
        return call in self._awaited or call in self._left

    def open_calls(self, unit: Unit) -> Iterator[Call]:
        """Calls of ``unit`` whose backward has begun and is not over."""
        return (call for call in list(self._awaited) if call.unit is unit)

    def enter(self, call: Call, num_inputs: int) -> None:
        """The backward of ``call`` begins.

        Args:
            call: which.
            num_inputs: inputs whose gradients this backward computes.

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
        self._left.add(call)
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
        for unit in self.for_weights:
            unit.leave()


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
    will_run = torch._C._will_engine_execute_node  # type: ignore[attr-defined]
    if params and not any(will_run(accumulator_of(param)) for param in params):
        raise RuntimeError(
            "backward of a pipeline's stage: expected gradients of inputs and weights at once, "
            "since torch's own PipelineStage does not tell the engine of parts; found those of "
            "inputs alone (a zero-bubble schedule). Use fsdp_engine.pipelining.PipelineStage"
        )
