"""Several microbatches in progress at a time, as in a pipeline.

    GPipe          F0 F1 F2 B0 B1 B2
    1F1B           F0 F1 B0 F2 B1 B2
    zero bubble    F0 F1 I0 F2 I1 W0 I2 W1 W2        I: gradients of inputs, W: of weights

[Note: Several microbatches]
The code that runs such a schedule names the microbatch of each forward and backward, and the last
backward of the step. Without the former a unit's gradients would count as complete only when the
backward is over, since the backwards of other microbatches are pending: all gradients of a stage
would be staged at a time where gradients are sharded. Without the latter every
backward would reduce all axes.

A backward in two parts is no backward in autograd's eyes: both parts are ``autograd.grad``, which
accumulates nothing. So

- the first part, of inputs, reads weights and brings no gradients: units are gathered and released
  as in any backward, and nothing is reduced;
- the second goes through the units in the order of their reductions. Each one is full while its
  gradients are computed (functions between a weight and what it is multiplied with, a cast or a
  parametrization, may read it; so may those of other units, if a weight is used in both). They are
  written into their places as if autograd had accumulated them, and the unit is reduced.

Where parameters are cut, a unit is gathered three times for such a microbatch, not twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import Unit


class WeightGradients(NamedTuple):
    """Gradients that are computed together.

    Attributes:
        params: of these full parameters.
        compute: adds them to ``.grad`` of ``params``.
    """

    params: Sequence[nn.Parameter]
    compute: Callable[[], object]


class Microbatches:
    """See the module docstring.

    Args:
        scheduler: of the engine.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._places: dict[int, tuple[Unit, int, int]] = {
            id(param): (unit, number, index)
            for unit in scheduler.units
            for number, buffer in enumerate(unit.trainable)
            for index, param in enumerate(buffer.full_params)
        }

    @property
    def full_params(self) -> list[nn.Parameter]:
        """The leaves that graphs of forwards lead to; those that are frozen now left out."""
        return [
            param
            for unit in self._scheduler.units
            for buffer in unit.trainable
            for param in buffer.full_params
            if param.requires_grad
        ]

    @contextmanager
    def forward(self, microbatch: Hashable) -> Iterator[None]:
        """Within it, a forward of ``microbatch``."""
        with self._within(microbatch, last=True, inputs_only=False):
            yield

    @contextmanager
    def backward(self, microbatch: Hashable, *, last: bool) -> Iterator[None]:
        """Within it, the backward of ``microbatch``.

        Args:
            microbatch: as its forward had it.
            last: of the step, unless an outer ``no_sync()`` denies it.
        """
        with self._within(microbatch, last=last, inputs_only=False):
            yield

    @contextmanager
    def backward_of_inputs(self, microbatch: Hashable) -> Iterator[None]:
        """Within it, a backward of ``microbatch`` that brings no gradients of parameters."""
        with self._within(microbatch, last=False, inputs_only=True):
            yield

    def backward_of_weights(
        self, microbatch: Hashable, gradients: Sequence[WeightGradients], *, last: bool
    ) -> None:
        """The rest of the backward of ``microbatch``, whose inputs' gradients have come.

        Args:
            microbatch: as its forward had it.
            gradients: what it brings.
            last: see :meth:`backward`.

        Raises:
            RuntimeError: a backward runs.
        """
        scheduler = self._scheduler
        if not scheduler.is_at_rest:
            raise RuntimeError(
                "backward of weights: expected no forward or backward in progress; found one "
                "(after an exception, call engine.reset())"
            )
        order = [scheduler.units[index] for index in reversed(scheduler.reductions.canonical_order)]
        turns = {unit.index: turn for turn, unit in enumerate(order)}
        todo: dict[int, list[WeightGradients]] = {}
        for each in gradients:
            units = [self._places[id(param)][0] for param in each.params]
            first = min(units, key=lambda unit: turns[unit.index])
            todo.setdefault(first.index, []).append(each)
        with self._within(microbatch, last=last, inputs_only=False):
            scheduler.begin_backward(weights_only=True)
            read = [unit for unit in order if unit.index in todo]
            after = dict(itertools.pairwise(read))
            for unit in order:
                for each in todo.get(unit.index, ()):
                    scheduler.use_for_weights(unit, after.get(unit))
                    self._compute(each, turns)
                scheduler.weights_came(unit)
            scheduler.end_backward()

    def _compute(self, gradients: WeightGradients, turns: Mapping[int, int]) -> None:
        places = [self._places[id(param)] for param in gradients.params]
        # Those of other units, too; in one order on all ranks.
        for unit in sorted({place[0] for place in places}, key=lambda unit: turns[unit.index]):
            self._scheduler.use_for_weights(unit)
        gradients.compute()
        with torch.no_grad():
            for unit, number, index in places:
                unit.trainable[number].gradient_came(index)

    @contextmanager
    def _within(self, microbatch: Hashable, *, last: bool, inputs_only: bool) -> Iterator[None]:
        scheduler, reductions = self._scheduler, self._scheduler.reductions
        before = scheduler.microbatch, scheduler.inputs_only, reductions.sync
        scheduler.microbatch, scheduler.inputs_only = microbatch, inputs_only
        reductions.sync = reductions.sync and last
        try:
            yield
        finally:
            scheduler.microbatch, scheduler.inputs_only, reductions.sync = before
