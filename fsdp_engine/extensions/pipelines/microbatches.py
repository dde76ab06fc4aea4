"""Schedules with several microbatches in flight, as in a pipeline.

    GPipe          F0 F1 F2 B0 B1 B2
    1F1B           F0 F1 B0 F2 B1 B2
    zero bubble    F0 F1 I0 F2 I1 W0 I2 W1 W2        I: gradients of inputs, W: of weights

[Note: Several microbatches]
The code that runs such a schedule tells the engine the microbatch of each forward and backward, and
whether a backward is the last one of the step. Without the microbatch, the gradients of a unit
would be complete only at the end of the backward, because backwards of other microbatches are
pending: where gradients are sharded, all gradients of a stage would be staged at the same time. If
the last backward were unknown, every backward would reduce over all axes.

Both parts of a split backward call ``autograd.grad``, which accumulates no gradients. Therefore

- in the first part, for inputs, units are gathered and freed as in any backward, and nothing is
  reduced;
- the second part processes the units in the order of their reductions. Each unit is full while its
  gradients are computed, since functions of a weight (a cast, a parametrization) may read it.
  If gradients of several units are computed together, all of these units are full. The gradients
  are written into the staging buffer as if autograd had accumulated them, and the unit is reduced.

If parameters are sharded, a unit is gathered three times for such a microbatch instead of twice.

[Note: Late weight gradients]
A module may compute the gradient of its input in backward, and the gradients of its weights later,
in ``backward_dw()`` (Transformer Engine's modules with ``delay_wgrad_compute=True``). Such a module

- marks the parameters: ``skip_backward_post_hook = True``;
- accepts callbacks in ``register_wgrad_accumulation_and_reduce_hooks(callback)``, and calls them
  without arguments once the gradients are in ``.grad`` of its parameters.

Until then the reduction of the unit waits, and so do the later reductions in the canonical order.
The full parameters stay installed in their modules (without memory if parameters are sharded),
because the module stores the gradient in their ``.grad``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.runtime.inputs import iter_tensors
from fsdp_engine.runtime.passes import Backward
from fsdp_engine.runtime.schedule import Use
from fsdp_engine.runtime.scheduler import Scheduler
from fsdp_engine.runtime.unit import BACKWARD, Call, Unit


class WeightGradients(NamedTuple):
    """Weight gradients that are computed together.

    Attributes:
        params: The full parameters that get the gradients.
        compute: Function that sets ``.grad`` of ``params`` to the gradients.
    """

    params: Sequence[nn.Parameter]
    compute: Callable[[], object]


class BackwardOfWeights(Backward):
    """A backward that computes only weight gradients, in several runs of autograd.

    Args:
        scheduler: The scheduler of the engine.
    """

    is_recorded = False

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._read: list[Unit] = []

    def observes(self, call: Call) -> bool:
        """See the base class."""
        if call.reads_weights:
            self.use(call.unit)
        return False

    def use(self, unit: Unit, following: Unit | None = None) -> None:
        """Gather ``unit``, whose weights are read from now on, and prefetch ``following``."""
        scheduler = self._scheduler
        if unit in self._read or not unit.buffers:
            return
        self._read.append(unit)
        self.touched[unit.index] = unit
        scheduler.schedule.provide(unit, BACKWARD)
        scheduler.schedule.use_reserved(unit)
        may_prefetch = scheduler.prefetches and not scheduler.ranks_differ
        if following is not None and may_prefetch:
            scheduler.schedule.gather_ahead([Use(following.index, BACKWARD)], None)
        unit.install()
        unit.enter()

    def on_gradients(self, unit: Unit) -> None:
        """Free ``unit``, all of whose gradients have been computed, and report it as ready."""
        if unit in self._read:
            self._read.remove(unit)
            unit.leave()
            if unit.uses == 0 and not self._scheduler.schedule.is_reserved(unit):
                unit.release()
        self._scheduler.reductions.unit_is_ready(unit)

    def end(self) -> None:
        """See the base class."""
        super().end()
        for unit in self._read:
            unit.leave()


class Microbatches:
    """Contexts for the forwards and backwards of microbatches. See the module docstring.

    Args:
        engine: The engine of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._scheduler = scheduler = engine.scheduler
        self._places: dict[int, tuple[Unit, int, int]] = {
            id(param): (unit, number, index)
            for unit in scheduler.units
            for number, buffer in enumerate(unit.trainable)
            for index, param in enumerate(buffer.full_params)
        }

    @property
    def full_params(self) -> list[nn.Parameter]:
        """The trainable full parameters, which are the leaves of autograd graphs."""
        return [
            param
            for unit in self._scheduler.units
            for buffer in unit.trainable
            for param in buffer.full_params
            if param.requires_grad
        ]

    @contextmanager
    def forward(self, microbatch: Hashable) -> Iterator[None]:
        """Context within which a forward of ``microbatch`` runs."""
        with self._within(microbatch, last=True, inputs_only=False):
            yield

    @contextmanager
    def backward(self, microbatch: Hashable, *, last: bool) -> Iterator[None]:
        """Context within which the backward of ``microbatch`` runs.

        Args:
            microbatch: The microbatch that was passed for its forward.
            last: Whether this backward is the last one of the step. Ignored in an outer
                ``no_sync()``.
        """
        with self._within(microbatch, last=last, inputs_only=False):
            yield

    @contextmanager
    def backward_of_inputs(self, microbatch: Hashable) -> Iterator[None]:
        """Context within which ``microbatch`` runs a backward without weight gradients."""
        with self._within(microbatch, last=False, inputs_only=True):
            yield

    def backward_of_weights(
        self, microbatch: Hashable, gradients: Sequence[WeightGradients], *, last: bool
    ) -> None:
        """Compute the weight gradients of ``microbatch`` after its input gradients.

        Args:
            microbatch: The microbatch that was passed for its forward.
            gradients: The weight gradients to compute.
            last: See :meth:`backward`.

        Raises:
            RuntimeError: A forward or backward is running.
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
        # torch's order differs between steps. Without sorting, so would the peak of memory.
        for each in sorted(gradients, key=self._last_place, reverse=True):
            units = [self._places[id(param)][0] for param in each.params]
            first = min(units, key=lambda unit: turns[unit.index])
            todo.setdefault(first.index, []).append(each)
        with self._within(microbatch, last=last, inputs_only=False):
            backward = BackwardOfWeights(scheduler)
            scheduler.run_backward(backward)
            read = [unit for unit in order if unit.index in todo]
            after = dict(itertools.pairwise(read))
            for unit in order:
                for each in todo.get(unit.index, ()):
                    backward.use(unit, after.get(unit))
                    self._compute(backward, each, turns)
                backward.on_gradients(unit)
            scheduler.end_backward()

    def _last_place(self, gradients: WeightGradients) -> tuple[int, int]:
        """Returns the buffer number and the index of the last parameter in ``gradients``."""
        return max(self._places[id(param)][1:] for param in gradients.params)

    def _compute(
        self, backward: BackwardOfWeights, gradients: WeightGradients, turns: Mapping[int, int]
    ) -> None:
        places = sorted(
            (self._places[id(param)] for param in gradients.params), key=lambda place: place[1:]
        )
        # Gather all units whose gradients are computed together, in the same order on all ranks.
        for unit in sorted({place[0] for place in places}, key=lambda unit: turns[unit.index]):
            backward.use(unit)
        gradients.compute()
        with torch.no_grad():
            for unit, number, index in places:
                buffer = unit.trainable[number]
                assert buffer.gradient_hooks is not None
                buffer.gradient_hooks.arrived(index, buffer.full_params[index])

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


_REGISTER = "register_wgrad_accumulation_and_reduce_hooks"


@dataclass(frozen=True)
class LateGradients(EngineExtension):
    """Allows modules to compute weight gradients late; see [Note: Late weight gradients]."""

    awaits_late_gradients = True

    def start(self, engine: Engine) -> None:
        """Add hooks for the late gradients of ``engine``.

        Raises:
            ValueError: See :func:`hook_delayed_gradients`.
        """
        for unit in engine.units:
            hook_delayed_gradients(engine.scheduler, unit)


def hook_delayed_gradients(scheduler: Scheduler, unit: Unit) -> None:
    """Add hooks for the weight gradients that modules of ``unit`` compute after backward.

    Raises:
        ValueError: A parameter is marked, but none of its modules accepts callbacks.
    """
    for buffer in unit.trainable:
        for index, param in enumerate(buffer.full_params):
            if not getattr(param, "skip_backward_post_hook", False):
                continue
            record = buffer.records[index]
            modules = [module for module, _ in record.holders if hasattr(module, _REGISTER)]
            if not modules:
                raise ValueError(
                    f"{record.name}: expected a module with {_REGISTER}, since the parameter is "
                    f"marked skip_backward_post_hook; found {type(record.holders[0][0]).__name__}"
                )
            awaited = _Awaited(scheduler, unit, buffer, index)
            for module in modules:
                module.register_forward_hook(awaited.listen)
                getattr(module, _REGISTER)(awaited.arrived)


class _Awaited:
    """A parameter whose gradient is computed after backward.

    Attributes:
        is_due: Whether the module's backward has begun since this gradient was last computed.
    """

    def __init__(
        self, scheduler: Scheduler, unit: Unit, buffer: ParamAndGradBuffer, index: int
    ) -> None:
        self._scheduler = scheduler
        self._unit = unit
        self._buffer = buffer
        self._index = index
        self.is_due = False

    def listen(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the module: add a hook to its output that fires in backward."""
        for tensor in iter_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._due)
                return

    def _due(self, grad: Tensor) -> None:
        if not self.is_due:
            self.is_due = True
            self._unit.num_late += 1
            self._scheduler.begin_gradient(self._unit)

    def arrived(self) -> None:
        """Write the gradient that the module has computed into the gradients of its unit.

        Raises:
            RuntimeError: The module's backward has not begun, or ``.grad`` is None.
        """
        param = self._buffer.full_params[self._index]
        grad, param.grad = param.grad, None
        if not self.is_due or grad is None:
            name = self._buffer.records[self._index].name
            raise RuntimeError(
                f"backward_dw: expected a backward of {name} before this call, and its gradient in "
                f".grad; found {'that .grad is None' if self.is_due else 'no backward'}"
            )
        self.is_due = False
        grads = self._buffer.grads
        assert grads is not None
        assert grads.writer is not None
        shard_of = self._buffer.gradient_to_shard()
        shard = grad if shard_of is None else shard_of(self._index, grad)
        grads.writer.write(self._index, shard)
        self._unit.num_late -= 1
        if not self._unit.num_late:
            self._scheduler.on_late_gradient(self._unit)


def _microbatches(engine: Engine) -> Microbatches:
    """Contexts for schedules that interleave several microbatches, as pipelines do."""
    return engine.extension(Microbatches)


microbatches = property(_microbatches)
