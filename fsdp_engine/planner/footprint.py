"""What planned buffers take on one rank: the rules of weights and gradients, as numbers.

``buffers/weights.py`` and ``gradients.py`` say which tensors a buffer has at rest and for a moment,
``scheduler.py`` and ``reductions.py`` how many of the momentary ones there are at a time. Here the
same is counted without making any; ``tests/planner/test_estimates.py`` holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_engine.codecs import ParamCodec
from fsdp_engine.config import StagingBudget
from fsdp_engine.layout import Layout
from fsdp_engine.planning.assignment import Expected
from fsdp_engine.precision import ParamDtypes
from fsdp_engine.runtime.rehearsal import full_moments, staged_moments
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis, Role, Strategy

AxisSizes = dict[Axis, int]


@dataclass(frozen=True)
class BufferPlan:
    """One flat buffer to be."""

    layout: Layout
    dtypes: ParamDtypes
    trainable: bool
    codec: ParamCodec


@dataclass(frozen=True)
class Footprint:
    """What one buffer takes on one rank.

    Attributes:
        buffer: which.
        strategy: the levels.
        sizes: ranks on each axis.
    """

    buffer: BufferPlan
    strategy: Strategy
    sizes: AxisSizes

    def held(self, role: Role) -> int:
        """Elements of ``role`` at rest."""
        fraction = 1.0
        for axis, size in self.sizes.items():
            fraction *= self.strategy.level(axis).fraction(role, size)
        return round(self.buffer.layout.numel * fraction)

    @property
    def _reshards(self) -> bool:
        return self.strategy.depth(Role.PARAM) > 0

    @property
    def weight_bytes(self) -> int:
        """Main weights and what persists of the compute weights, at rest."""
        codec, dtypes = self.buffer.codec, self.buffer.dtypes
        total = 0 if codec.is_identity else self.held(Role.OPTIM) * dtypes.main.itemsize
        if codec.decodes and not self._reshards:
            return total + self.buffer.layout.numel * dtypes.compute.itemsize
        refreshes = self.strategy.depth(Role.OPTIM) > self.strategy.depth(Role.PARAM)
        if codec.is_identity or codec.encodes_once or refreshes or not self._reshards:
            total += self.held(Role.PARAM) * codec.wire_dtype.itemsize * codec.num_planes
        return total

    @property
    def full_bytes(self) -> int:
        """Full parameters, of all planes, and the wire that they are decoded from."""
        if not self._reshards:
            return 0
        codec = self.buffer.codec
        itemsize = codec.wire_dtype.itemsize * codec.num_planes
        itemsize += self.buffer.dtypes.compute.itemsize if codec.decodes else 0
        return self.buffer.layout.numel * itemsize

    @property
    def grad_bytes(self) -> int:
        """Gradients at rest."""
        if not self.buffer.trainable:
            return 0
        dtypes = self.buffer.dtypes
        kept = self.held(Role.GRAD) * dtypes.main_grad.itemsize
        if dtypes.optim_grad != dtypes.main_grad:
            kept += self.held(Role.OPTIM) * dtypes.optim_grad.itemsize
        return kept

    @property
    def staged_elements(self) -> int:
        """Elements of full gradients that count against the budget."""
        if not self.buffer.trainable or self.strategy.depth(Role.GRAD) == 0:
            return 0
        return self.buffer.layout.numel

    @property
    def staging_bytes(self) -> int:
        """Full gradients on their way, and the copy that the last reduction sends."""
        if not self.buffer.trainable:
            return 0
        dtypes, depth = self.buffer.dtypes, self.strategy.depth(Role.GRAD)
        elements = self.staged_elements
        reduces_last = any(self.sizes[axis] > 1 for axis in AXIS_BELOW_DEPTH[depth:])
        if reduces_last and dtypes.comm != dtypes.main_grad:
            elements += self.held(Role.GRAD)
        return elements * dtypes.comm.itemsize

    def traffic_bytes(self, axis: Axis, num_microbatches: int, num_gathers: int) -> float:
        """Sent along ``axis`` in a step. Along the outer one the inner part travels, if there is
        one. Frozen weights do not change, so what is gathered once a step is not gathered again.

        Args:
            axis: which.
            num_microbatches: of a step.
            num_gathers: how often cut parameters are gathered for a microbatch; formulas of the
                levels have 2, for forward and for backward.
        """
        size = self.sizes[axis]
        traffic = self.strategy.level(axis).traffic(size)
        elements: float = self.buffer.layout.numel
        if axis is Axis.OUTER:
            elements *= self.strategy.inner.fraction(Role.OPTIM, self.sizes[Axis.INNER])
        codec = self.buffer.codec
        # What is gathered once a step is gathered in all planes, what is for each use in one.
        params = traffic.params_per_step * codec.num_planes if self.buffer.trainable else 0.0
        # A unit that stays full for its backward still needs what only backward reads.
        times = max(num_gathers, codec.num_planes)
        params += num_microbatches * traffic.params_per_microbatch * times / 2
        sent = params * codec.wire_dtype.itemsize
        if self.buffer.trainable:
            grads = traffic.grads_per_step + num_microbatches * traffic.grads_per_microbatch
            sent += grads * self._grad_itemsize(axis, round(elements))
        return elements * sent

    def _grad_itemsize(self, axis: Axis, elements: int) -> float:
        """Bytes of an element of gradients along ``axis``, the mean of both halves of an
        all-reduce: where sums are wider than summands (``redistribute.py``), the second half
        carries sums, and ``elements`` that ranks cannot divide equally are sent as wide in both."""
        dtypes = self.buffer.dtypes
        if self.strategy.shards(Role.OPTIM, axis) or dtypes.reduce == dtypes.comm:
            return dtypes.comm.itemsize
        if elements % self.sizes[axis]:
            return dtypes.main_grad.itemsize
        return (dtypes.comm.itemsize + dtypes.main_grad.itemsize) / 2


@dataclass(frozen=True)
class UnitFootprint:
    """One unit to be.

    Attributes:
        buffers: what its buffers take.
        is_loose: some of its modules lie beside the model's blocks.
    """

    buffers: tuple[Footprint, ...]
    is_loose: bool = False

    @property
    def numel(self) -> int:
        """Elements of its buffers, padding included."""
        return self.total(lambda each: each.buffer.layout.numel)

    def total(self, count: Callable[[Footprint], int]) -> int:
        """``count`` over its buffers."""
        return sum(count(each) for each in self.buffers)


def peak_full_bytes(units: Sequence[UnitFootprint], expected: Expected, budget: int) -> int:
    """Full parameters of a unit, of those around it, and of those gathered ahead, at most."""
    sizes = [unit.total(lambda each: each.full_bytes) for unit in units]
    elements = [unit.numel if size else 0 for unit, size in zip(units, sizes, strict=True)]
    moments = full_moments(expected, elements, budget)
    return max((sum(sizes[index] for index in moment) for moment in moments), default=0)


def peak_staging_bytes(
    units: Sequence[UnitFootprint], expected: Expected, budget: StagingBudget
) -> int:
    """Full gradients at most, if no reduction were done before somebody waits for it."""
    staged = [unit.total(lambda each: each.staged_elements) for unit in units]
    sizes = [unit.total(lambda each: each.staging_bytes) for unit in units]
    moments = staged_moments(expected, staged, budget)
    return max((sum(sizes[index] for index in moment) for moment in moments), default=0)
