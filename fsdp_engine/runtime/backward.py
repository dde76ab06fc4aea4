"""What a backward has gone through so far: calls, and the units that may be full when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from fsdp_engine.flat_dtensor import accumulator_of
from fsdp_engine.runtime.unit import Call, Unit


class Backward:
    """See the module docstring.

    Attributes:
        is_open: it is under way.
        is_told: whoever runs it tells what is computed, or nobody computes a part of it alone.
        weights_only: it is that of weights alone.
        for_weights: units that it reads.
        creates_graph: it runs its functions with gradients enabled (``create_graph``).
        touched: units that may be full when it ends.
        open_units: those in whose backward it is.
        run_again: units of several calls whose graph was kept and runs once more: nobody counts
            calls that will come again.
        uncounted: units of several modules, of which some ran without autograd (re-entrant
            checkpoints may run them again), or have hidden their outputs: how many calls. While any
            of their gradients is missing, it may be yet to come.
        num_run_again: of these, how many calls this backward has run again.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.is_told = True
        self.weights_only = False
        self.for_weights: list[Unit] = []
        self.creates_graph = False
        self.touched: dict[int, Unit] = {}
        self.open_units: set[int] = set()
        self.run_again: set[int] = set()
        self.uncounted: Counter[int] = Counter()
        self.num_run_again: Counter[int] = Counter()
        self._calls: list[Call] = []
        # Units that backwards with create_graph went through since the last one without.
        self._recorded: set[int] = set()

    def enters(self, call: Call) -> None:
        """The backward of ``call`` begins."""
        unit = call.unit
        self.creates_graph = torch.is_grad_enabled()
        if self.creates_graph:
            # What is recorded now will read the weights once more.
            unit.stay_for_recorded()
            self._recorded.add(unit.index)
        if call.follows_another and not call.is_counted:
            self.run_again.add(unit.index)
        call.opened = True
        self._calls.append(call)
        unit.open_calls.append(call)
        self.touched[unit.index] = unit
        if call.reads_weights:
            self.open_units.add(unit.index)

    def leaves(self, call: Call) -> None:
        """The backward of ``call`` is over."""
        unit = call.unit
        call.closed = True
        unit.open_calls.remove(call)
        call.uncount()
        if call.reads_weights:
            unit.leave()
            if not unit.uses:
                self.open_units.discard(unit.index)

    def end(self, units: Sequence[Unit]) -> list[Unit]:
        """It is over; returns units that may be full."""
        for call in self._calls:
            # The graph may be kept and run once more.
            if not call.closed:
                call.unit.uses -= call.reads_weights
                call.unit.open_calls.remove(call)
                call.uncount()
            call.opened = call.closed = False
        self._calls.clear()
        for unit in self.for_weights:
            unit.leave()
        self.for_weights.clear()
        self.open_units.clear()
        self.run_again.clear()
        self._forget_uncounted()
        if not self.creates_graph:
            for index in sorted(self._recorded):
                units[index].forget_recorded()
                self.touched[index] = units[index]
            self._recorded.clear()
        touched = list(self.touched.values())
        self.touched.clear()
        self.is_open = False
        return touched

    def _forget_uncounted(self) -> None:
        """Calls that have run again are counted off. The others stay where some have: of a pipeline
        whose next forward precedes this backward. Where none has, they were of an evaluation."""
        for index in list(self.uncounted):
            self.uncounted[index] -= self.num_run_again[index]
            if not self.num_run_again[index] or self.uncounted[index] <= 0:
                del self.uncounted[index]
        self.num_run_again.clear()


def check_is_whole(units: Sequence[Unit]) -> None:
    """A stage of torch's own runs a backward.

    Raises:
        RuntimeError: it is that of inputs alone. That of weights would follow, whose gradients
            nobody would see.
    """
    params = [
        param
        for unit in units
        for buffer in unit.trainable
        for param in buffer.full_params
        if param.requires_grad
    ]
    will_run = torch._C._will_engine_execute_node
    if params and not any(will_run(accumulator_of(param)) for param in params):
        raise RuntimeError(
            "backward of a pipeline's stage: expected gradients of inputs and weights at once, "
            "since torch's own PipelineStage does not tell the engine of parts; found those of "
            "inputs alone (a zero-bubble schedule). Use fsdp_engine.pipelining.PipelineStage"
        )
