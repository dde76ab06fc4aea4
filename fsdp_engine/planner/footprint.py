"""Memory of planned buffers on one rank, from the rules for weights and gradients.

``buffers/weights.py`` and ``gradients.py`` determine which tensors a buffer has at rest and
temporarily; ``scheduler.py`` and ``reductions.py`` determine how many temporary ones exist at a
time. This file counts the same bytes without allocating; ``tests/planner/test_estimates.py``
compares both.
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
    """One planned flat buffer."""

    layout: Layout
    dtypes: ParamDtypes
    trainable: bool
    codec: ParamCodec


@dataclass(frozen=True)
class Footprint:
    """Memory and traffic of one buffer on one rank.

    Attributes:
        buffer: the buffer.
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
        """Main weights and persistent compute weights, at rest."""
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
        """Full parameters of all planes, and the encoded tensor that they are decoded from."""
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
        """Elements of full gradients that count against the staging budget."""
        if not self.buffer.trainable or self.strategy.depth(Role.GRAD) == 0:
            return 0
        return self.buffer.layout.numel

    @property
    def staging_bytes(self) -> int:
        """Full gradients in flight, and the converted copy for the last reduction."""
        if not self.buffer.trainable:
            return 0
        dtypes, depth = self.buffer.dtypes, self.strategy.depth(Role.GRAD)
        elements = self.staged_elements
        reduces_last = any(self.sizes[axis] > 1 for axis in AXIS_BELOW_DEPTH[depth:])
        if reduces_last and dtypes.comm != dtypes.main_grad:
            elements += self.held(Role.GRAD)
        return elements * dtypes.comm.itemsize

    def traffic_bytes(self, axis: Axis, num_microbatches: int, num_gathers: int) -> float:
        """Bytes sent along ``axis`` per step. Along the outer axis the inner shard is sent, if
        there is one. Frozen weights do not change, so gathers that run once per step are omitted.

        Args:
            axis: the axis.
            num_microbatches: per step.
            num_gathers: gathers of sharded parameters per microbatch. The levels' formulas have 2,
                for forward and for backward.
        """
        size = self.sizes[axis]
        traffic = self.strategy.level(axis).traffic(size)
        elements: float = self.buffer.layout.numel
        if axis is Axis.OUTER:
            elements *= self.strategy.inner.fraction(Role.OPTIM, self.sizes[Axis.INNER])
        codec = self.buffer.codec
        # A gather per step gathers all planes; a gather per use gathers one plane.
        params = traffic.params_per_step * codec.num_planes if self.buffer.trainable else 0.0
        # A unit that is not resharded before backward still gathers the planes of backward.
        times = max(num_gathers, codec.num_planes)
        params += num_microbatches * traffic.params_per_microbatch * times / 2
        sent = params * codec.wire_dtype.itemsize
        if self.buffer.trainable:
            grads = traffic.grads_per_step + num_microbatches * traffic.grads_per_microbatch
            sent += grads * self._grad_itemsize(axis, round(elements))
        return elements * sent

    def _grad_itemsize(self, axis: Axis, elements: int) -> float:
        """Bytes per element of gradients along ``axis``, averaged over both halves of an
        all-reduce. If sums have a wider dtype than summands (``redistribute.py``), the second half
        sends sums; if the ranks do not divide ``elements`` evenly, both halves use the wider
        dtype."""
        dtypes = self.buffer.dtypes
        if self.strategy.shards(Role.OPTIM, axis) or dtypes.reduce == dtypes.comm:
            return dtypes.comm.itemsize
        if elements % self.sizes[axis]:
            return dtypes.main_grad.itemsize
        return (dtypes.comm.itemsize + dtypes.main_grad.itemsize) / 2


@dataclass(frozen=True)
class UnitFootprint:
    """One planned unit.

    Attributes:
        buffers: memory and traffic of its buffers.
        is_loose: some of its modules are not in the model's blocks.
    """

    buffers: tuple[Footprint, ...]
    is_loose: bool = False

    @property
    def numel(self) -> int:
        """Elements of its buffers, including padding."""
        return self.total(lambda each: each.buffer.layout.numel)

    def total(self, count: Callable[[Footprint], int]) -> int:
        """The sum of ``count`` over its buffers."""
        return sum(count(each) for each in self.buffers)


def peak_full_bytes(units: Sequence[UnitFootprint], expected: Expected, budget: int) -> int:
    """Peak bytes of full parameters: of a unit, of enclosing units, and of prefetched ones."""
    sizes = [unit.total(lambda each: each.full_bytes) for unit in units]
    elements = [unit.numel if size else 0 for unit, size in zip(units, sizes, strict=True)]
    moments = full_moments(expected, elements, budget)
    return max((sum(sizes[index] for index in moment) for moment in moments), default=0)


def peak_staging_bytes(
    units: Sequence[UnitFootprint], expected: Expected, budget: StagingBudget
) -> int:
    """Peak bytes of full gradients if every reduction completes only when it is waited for."""
    staged = [unit.total(lambda each: each.staged_elements) for unit in units]
    sizes = [unit.total(lambda each: each.staging_bytes) for unit in units]
    moments = staged_moments(expected, staged, budget)
    return max((sum(sizes[index] for index in moment) for moment in moments), default=0)
