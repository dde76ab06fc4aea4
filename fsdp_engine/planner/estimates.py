"""Estimates of one rank's memory and traffic by formulas, for any strategy and number of ranks.

Estimates do not allocate tensors and need no process group. A model (also on the meta device) is
laid out as in ``shard()``, so bytes at rest are exact, including padding. If only a number of
elements is given, they are laid out as equal units. The formulas are those of ``strategies/``:

    at rest     elements of a buffer x ``Level.fraction(role, ranks)`` for both axes x bytes
    transient   full parameters of the units in use and of prefetched ones, and full gradients
                until they are reduced, from the engine's prefetch window and staging budget
    traffic     elements x ``Level.traffic(ranks)`` x bytes per element of the collectives

Along the outer axis a buffer's inner shard is communicated if the inner axis shards any role.

Activations are not included, nor is memory of kernels and allocators.

Worked example, 8e9 elements in 32 units on 64 ranks, bf16 with fp32 main weights and gradients and
AdamW: level 3 holds 8e9 x (4 + 4 + 8) / 64 bytes = 1.9 GiB and temporarily the bf16 weights of two
units, 0.9 GiB; level 0 holds 8e9 x (4 + 2 + 4 + 8) bytes = 134.1 GiB.

Offloaded state is counted as in training on an accelerator: at rest, the state is on the host or
disk. The device temporarily holds the chunks of two units in the optimizer step, reduced gradients
until they are copied to the host or disk, and main weights while they are encoded for a gather.

``buffers/weights.py`` and ``gradients.py`` determine which tensors a buffer has at rest and
temporarily; ``scheduler.py`` and ``reductions.py`` determine how many temporary tensors exist at a
time. This file counts the same bytes without allocating; ``tests/planner/test_estimates.py``
compares both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from fsdp_engine.kernel_interface import (
    Axis,
    PlannedBuffer,
    Rehearsal,
    Role,
    Strategy,
    allocator,
    checked_arguments,
    unchecked_plan,
)
from fsdp_engine.planner.simulation.ranks import SimulatedBackend
from fsdp_engine.planner.simulation.simulation_error import check_count, check_type
from fsdp_engine.planner.state_places import DISK, StatePlaces, offload_module, places_among
from fsdp_engine.terminal import format_bytes, format_count


@dataclass(frozen=True)
class Footprint:
    """Memory and traffic of one buffer on one rank.

    Attributes:
        buffer: The buffer.
        sizes: Number of ranks on each axis.
        strategy: The levels of both axes.
        offload: The places of offloaded state.
    """

    buffer: PlannedBuffer
    sizes: dict[Axis, int]
    strategy: Strategy
    offload: StatePlaces

    @property
    def is_trainable(self) -> bool:
        """Whether the buffer's parameters have gradients."""
        return self.buffer.kind.requires_grad

    def held(self, role: Role) -> int:
        """Returns the number of elements of ``role`` that are held at rest."""
        fraction = 1.0
        for axis, size in self.sizes.items():
            fraction *= self.strategy.level(axis).fraction(role, size)
        return round(self.buffer.layout.numel * fraction)

    @property
    def _reshards(self) -> bool:
        return self.strategy.depth(Role.PARAM) > 0

    @property
    def _main_leaves(self) -> bool:
        """Whether main weights are stored on the host or disk."""
        return self.offload.main_leaves(self.strategy, self.buffer.codec)

    @property
    def _grads_leave(self) -> bool:
        return self.is_trainable and "gradients" in self.offload.places

    @property
    def _is_cast_by_host(self) -> bool:
        """Whether the host also stores the compute weights, beside main weights."""
        return self.offload.is_cast_by_host(self.strategy, self.buffer.codec)

    @property
    def _main_bytes(self) -> int:
        return self.held(Role.OPTIM) * self.buffer.kind.dtypes.main.itemsize

    @property
    def elsewhere(self) -> dict[str, int]:
        """Bytes of offloaded weights and gradients, by place."""
        places, found = self.offload.places, Counter[str]()
        if self._main_leaves:
            found[places["main_weights"]] += self._main_bytes
            if self._is_cast_by_host:
                wire = self.held(Role.PARAM) * self.buffer.codec.wire_dtype.itemsize
                found[places["main_weights"]] += wire
        if self._grads_leave:
            found[places["gradients"]] += self._reduced_bytes
        return dict(found)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of offloaded weights and gradients that are copied to the device for the optimizer
        step."""
        if not self.is_trainable or self.offload.step_on == allocator.HOST:
            return 0
        dtypes = self.buffer.kind.dtypes
        grads = self.held(Role.OPTIM) * dtypes.optim_grad.itemsize
        return self._main_bytes * self._main_leaves + grads * self._grads_leave

    @property
    def encoded_main_bytes(self) -> int:
        """Bytes of offloaded main weights on the device, while they are encoded for a gather."""
        brings = self._main_leaves and not self.buffer.codec.is_identity
        return self._main_bytes if brings and not self._is_cast_by_host else 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of main weights and persistent compute weights, at rest."""
        codec, dtypes = self.buffer.codec, self.buffer.kind.dtypes
        if self._main_leaves and codec.is_identity:
            return 0
        total = 0 if codec.is_identity or self._main_leaves else self._main_bytes
        if not self._reshards:
            return total + self.buffer.layout.numel * codec.kept_itemsize(dtypes)
        refreshes = self.strategy.depth(Role.OPTIM) > self.strategy.depth(Role.PARAM)
        if codec.is_identity or codec.keeps_wire or refreshes:
            total += self.held(Role.PARAM) * codec.wire_dtype.itemsize * codec.num_gathers
        return total

    @property
    def full_bytes(self) -> int:
        """Bytes of full parameters in all encodings, and of the tensor they are decoded from."""
        if not self._reshards:
            return 0
        itemsize = self.buffer.codec.full_itemsize(self.buffer.kind.dtypes)
        return self.buffer.layout.numel * itemsize

    @property
    def grad_bytes(self) -> int:
        """Bytes of gradients at rest."""
        return self._reduced_bytes if self.is_trainable and not self._grads_leave else 0

    @property
    def _reduced_bytes(self) -> int:
        """Bytes of accumulated gradients, and of the optimizer's copy if its dtype differs."""
        dtypes = self.buffer.kind.dtypes
        kept = self.held(Role.GRAD) * dtypes.main_grad.itemsize
        if dtypes.optim_grad != dtypes.main_grad:
            kept += self.held(Role.OPTIM) * dtypes.optim_grad.itemsize
        return kept

    @property
    def staged_elements(self) -> int:
        """Number of elements of full gradients that count against the staging budget."""
        if not self.is_trainable or self.strategy.depth(Role.GRAD) == 0:
            return 0
        return self.buffer.layout.numel

    @property
    def staging_bytes(self) -> int:
        """Bytes of full gradients in flight, of the converted copy for the last reduction, and of
        the result that is copied to the host or disk."""
        if not self.is_trainable:
            return 0
        dtypes, elements = self.buffer.kind.dtypes, self.staged_elements
        reduces_last = any(
            size > 1 and not self.strategy.shards(Role.GRAD, axis)
            for axis, size in self.sizes.items()
        )
        if reduces_last and dtypes.comm != dtypes.main_grad:
            elements += self.held(Role.GRAD)
        return elements * dtypes.comm.itemsize + self._reduced_bytes * self._grads_leave

    def traffic_bytes(self, axis: Axis, num_microbatches: int, num_gathers: int) -> float:
        """Returns the bytes sent along ``axis`` per step. Along the outer axis the inner shard is
        sent, if there is one. Frozen weights do not change, so their gathers that run once per step
        are omitted.

        Args:
            axis: The axis.
            num_microbatches: Number of microbatches per step.
            num_gathers: Number of gathers of sharded parameters per microbatch. The levels'
                formulas assume 2, one for forward and one for backward.
        """
        size = self.sizes[axis]
        traffic = self.strategy.level(axis).traffic(size)
        elements: float = self.buffer.layout.numel
        if axis is Axis.OUTER:
            elements *= self.strategy.inner.fraction(Role.OPTIM, self.sizes[Axis.INNER])
        codec = self.buffer.codec
        # A gather per step gathers all encodings; a gather per use gathers one encoding.
        params = traffic.params_per_step * codec.num_gathers if self.is_trainable else 0.0
        # A unit that is not resharded before backward still gathers the encodings of backward.
        times = max(num_gathers, codec.num_gathers)
        params += num_microbatches * traffic.params_per_microbatch * times / 2
        sent = elements * params * codec.wire_dtype.itemsize
        if self.is_trainable:
            grads = traffic.grads_per_step + num_microbatches * traffic.grads_per_microbatch
            sent += grads * self._grad_bytes(axis, round(elements))
        return sent

    def _grad_bytes(self, axis: Axis, elements: int) -> float:
        """Returns the bytes of the gradients sent along ``axis``, averaged over both halves of an
        all-reduce. If sums have a wider dtype than summands (``sharded_buffer.py``), the second
        half sends sums. Elements that remain after an even division among the ranks are sent in
        the dtype of sums in both halves."""
        dtypes = self.buffer.kind.dtypes
        if self.strategy.shards(Role.OPTIM, axis) or dtypes.reduce == dtypes.comm:
            return elements * dtypes.comm.itemsize
        rest = elements % self.sizes[axis]
        halves = (dtypes.comm.itemsize + dtypes.main_grad.itemsize) / 2
        return (elements - rest) * halves + rest * dtypes.reduce.itemsize


@dataclass(frozen=True)
class UnitFootprint:
    """Memory and traffic of one planned unit.

    Attributes:
        buffers: Memory and traffic of the unit's buffers.
        is_loose: Whether some modules of the unit are not in the model's blocks.
    """

    buffers: tuple[Footprint, ...]
    is_loose: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the unit's buffers, including padding."""
        return self.total(lambda each: each.buffer.layout.numel)

    def total(self, count: Callable[[Footprint], int]) -> int:
        """Returns the sum of ``count`` over the unit's buffers."""
        return sum(count(each) for each in self.buffers)


NOT_INCLUDED = "Activations are not included, nor is memory of kernels and allocators."


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of one rank in bytes. All ranks have the same estimate.

    Attributes:
        strategy: The levels of both axes.
        inner_size: Number of ranks on the inner axis.
        outer_size: Number of ranks on the outer axis.
        num_elements: Number of parameter elements in the full model.
        padding: Elements of padding in flat buffers, over all ranks.
        weight_bytes: Main weights and persistent compute weights, at rest.
        grad_bytes: Gradients, from their first reduction until they are cleared.
        optimizer_bytes: Optimizer state at rest, with the padding of the weights. If state, weights
            or gradients are offloaded: plus the bytes of the two largest units that the optimizer
            step copies to the device.
        full_bytes: Peak of full parameters, in addition to those at rest.
        staging_bytes: Peak of full gradients before their reduction, in addition to those at rest.
        inner_traffic_bytes: Bytes sent along the inner axis per step.
        outer_traffic_bytes: Bytes sent along the outer axis per step.
        elsewhere: Bytes of offloaded state by place ("host", "disk").
    """

    strategy: Strategy
    inner_size: int
    outer_size: int
    num_elements: int
    padding: int
    weight_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    full_bytes: int
    staging_bytes: int
    inner_traffic_bytes: int
    outer_traffic_bytes: int
    elsewhere: dict[str, int] = field(default_factory=dict)

    @property
    def rest_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, all held in the optimizer step."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the peak in a step, without activations. The peaks of full parameters and
        of staging may occur at different times."""
        return self.rest_bytes + self.full_bytes + self.staging_bytes

    def __str__(self) -> str:
        levels = self.strategy.on_ranks(self.inner_size, self.outer_size)
        held = {
            "weights": self.weight_bytes,
            "gradients": self.grad_bytes,
            "optimizer state": self.optimizer_bytes,
            "full parameters": self.full_bytes,
            "staging": self.staging_bytes,
            **{f"on the {place}": size for place, size in self.elsewhere.items()},
        }
        sent = {"inner": self.inner_traffic_bytes}
        if self.outer_size > 1:
            sent["outer"] = self.outer_traffic_bytes
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
        sends = ", ".join(f"{format_bytes(size)} ({axis} axis)" for axis, size in sent.items())
        return (
            f"{format_count(self.num_elements)} parameters, {levels}: at most "
            f"{format_bytes(self.peak_bytes)} of a rank, without activations ({parts}); sent per "
            f"step: {sends}"
        )


def estimate(
    model: nn.Module | float,
    *,
    world_size: int,
    outer_size: int = 1,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
    optimizer_bytes_per_element: float | None = 8,
    num_microbatches: int = 1,
    num_units: int = 32,
    dtype: torch.dtype = torch.float32,
    on_cpu: bool = False,
    **options: Any,
) -> Estimate:
    """Estimate the memory and traffic of one rank.

    Args:
        model: A module (also on the meta device), which is not modified, or a number of elements.
            For parameters that are DTensors, this rank's shards are counted.
        world_size: Number of data-parallel ranks.
        outer_size: Number of ranks on the outer axis.
        strategy, outer_strategy: The levels, as for ``fe.shard``.
        optimizer_bytes_per_element: 8 for AdamW in fp32, 4 for SGD with momentum, 0 for plain SGD.
            None: the bytes of AdamW in the dtype of each parameter's main weights.
        num_microbatches: Number of microbatches per step.
        num_units: Number of equal units, if ``model`` is a number of elements.
        dtype: Dtype of the parameters, if ``model`` is a number of elements.
        on_cpu: Whether the model is on a CPU. On a CPU, main weights and gradients may be offloaded
            to a disk separately, at all levels, and without staging in host memory.
        **options: Arguments of ``fe.shard``: ``units``, ``mp_policy``, ``options``, ``extensions``.

    Raises:
        OffloadLevelError: The levels do not allow the given ``fe.Offload``. This error is a
            ``ValueError``.
        ValueError: ``outer_size`` does not divide ``world_size``, a number is not positive, the
            strategy is unknown, ``units`` is given with a number of elements, or ``units``,
            ``options`` or ``extensions`` are invalid for ``fe.shard``.
        TypeError: ``model`` is neither a module nor a number, or another argument has a wrong type.
    """
    sizes = _axis_sizes(world_size, outer_size)
    levels = Strategy.from_names(strategy, outer_strategy).on(outer_size)
    asked = checked_arguments(options, "estimate()")
    check_type("dtype", dtype, torch.dtype, "a dtype")
    if optimizer_bytes_per_element is not None:
        _check_at_least("optimizer_bytes_per_element", optimizer_bytes_per_element, 0)
    check_count("num_microbatches", num_microbatches, "1 or more")
    if isinstance(model, int | float) and not isinstance(model, bool):
        check_count("num_units", num_units, "1 or more")
        _check_at_least("model", model, 1)
        if asked.get("units") is not None:
            raise ValueError(
                "units: expected None with a number of elements, which form num_units equal units; "
                f"found {asked['units']!r}"
            )
        model, asked["units"] = _equal_blocks(round(model), num_units, dtype), _Block
    elif not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a module or a number of elements; found {model!r}")
    plan, settings = unchecked_plan(model, sizes, levels, **asked)
    where = places_among(settings.extensions)
    try:
        with SimulatedBackend(on_cpu).used():
            where.check_plan(plan, settings.axis_plans, torch.device("cpu"))
    except ValueError as error:
        raise OffloadLevelError(str(error)) from error
    footprints = [
        UnitFootprint(
            tuple(Footprint(buffer, sizes, levels, where) for buffer in unit.buffers),
            bool(unit.loose),
        )
        for unit in plan.units
    ]
    expected = plan.expected
    blocks = [unit.numel for unit in footprints[1:] if not unit.is_loose]
    others = [unit.numel for unit in footprints if unit.buffers]
    full = [unit.total(lambda each: each.full_bytes) for unit in footprints]
    brought = [unit.total(lambda each: each.encoded_main_bytes) for unit in footprints]
    rehearsal = Rehearsal(
        expected,
        [unit.numel if size else 0 for unit, size in zip(footprints, full, strict=True)],
        [unit.total(lambda each: each.staged_elements) for unit in footprints],
        *settings.options.budgets(blocks, others),
    )
    if any(full):
        gathered = [sum(pair) for pair in zip(full, brought, strict=True)]
        full_bytes = _peak(rehearsal.full(), gathered)
    else:  # all units are encoded before the first one computes
        full_bytes = sum(brought)
    staging = [unit.total(lambda each: each.staging_bytes) for unit in footprints]
    every = [each for unit in footprints for each in unit.buffers]

    def state_bytes(each: Footprint) -> float:
        size = optimizer_bytes_per_element
        if size is None:
            size = 2 * each.buffer.kind.dtypes.main.itemsize
        return size * each.held(Role.OPTIM) if each.is_trainable else 0

    states = [math.ceil(sum(map(state_bytes, unit.buffers))) for unit in footprints]
    elsewhere: Counter[str] = Counter()
    for each in every:
        elsewhere.update(each.elsewhere)
    chunks = [unit.total(lambda each: each.chunk_bytes) for unit in footprints]
    if DISK in where.places.values() and not on_cpu:
        elsewhere[allocator.HOST] += offload_module("disk_staging").NUM_BYTES
    at_rest, place = sum(states), where.places.get("optimizer_state")
    if place is not None:
        elsewhere[place] += at_rest
        at_rest = 0
        if where.step_on != allocator.HOST:
            chunks = [sum(pair) for pair in zip(chunks, states, strict=True)]

    def traffic(axis: Axis) -> int:
        return round(
            sum(
                each.traffic_bytes(axis, num_microbatches, expected.num_gathers(index))
                for index, unit in enumerate(footprints)
                for each in unit.buffers
            )
        )

    return Estimate(
        strategy=levels,
        inner_size=sizes[Axis.INNER],
        outer_size=sizes[Axis.OUTER],
        num_elements=sum(each.buffer.layout.num_tensor_elements for each in every),
        padding=sum(each.buffer.layout.padding for each in every),
        weight_bytes=sum(each.weight_bytes for each in every),
        grad_bytes=sum(each.grad_bytes for each in every),
        optimizer_bytes=at_rest + sum(sorted(chunks)[-2:]),
        full_bytes=full_bytes,
        staging_bytes=_peak(rehearsal.staging(), staging),
        inner_traffic_bytes=traffic(Axis.INNER),
        outer_traffic_bytes=traffic(Axis.OUTER),
        elsewhere={place: count for place, count in elsewhere.items() if count},
    )


def compare(
    model: nn.Module | float, *, world_size: int, outer_size: int = 1, **options: Any
) -> tuple[Estimate, ...]:
    """Returns estimates for the ten pairs of levels, or for the four levels if there is one axis.
    Levels that do not allow the offload are left out.

    Args:
        model, world_size, outer_size, options: Arguments of :func:`estimate`, except strategies.

    Raises:
        OffloadLevelError: No pair of levels allows the offload.
        ValueError, TypeError: See :func:`estimate`.
    """
    found: list[Estimate] = []
    refused: OffloadLevelError | None = None
    for pair in Strategy.all_on(1 + (outer_size > 1)):
        options["strategy"], options["outer_strategy"] = pair.inner.name, pair.outer.name
        try:
            each = estimate(model, world_size=world_size, outer_size=outer_size, **options)
        except OffloadLevelError as error:
            refused = error
            continue
        found.append(each)
    if not found and refused is not None:
        raise refused
    return tuple(found)


class OffloadLevelError(ValueError):
    """The levels do not allow an offload on an accelerator."""


def _axis_sizes(world_size: int, outer_size: int) -> dict[Axis, int]:
    for name, size in (("world_size", world_size), ("outer_size", outer_size)):
        check_count(name, size, "a number of ranks, 1 or more")
    if world_size % outer_size:
        raise ValueError(
            f"outer_size: expected a divisor of the {world_size} ranks; found {outer_size}"
        )
    return {Axis.INNER: world_size // outer_size, Axis.OUTER: outer_size}


def _check_at_least(name: str, value: float, least: int) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number, {least} or more; found {value!r}")
    if not value >= least or math.isinf(value):
        raise ValueError(f"{name}: expected {least} or more; found {value}")


class _Block(nn.Module):
    """A unit of a model that is given as a number of elements.

    Args:
        numel: Number of elements of the block's parameter.
        dtype: The dtype of the parameter.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, dtype=dtype, device="meta"))


def _equal_blocks(num_elements: int, num_blocks: int, dtype: torch.dtype) -> nn.Module:
    """Returns a model of blocks with one parameter each."""
    ends = [num_elements * number // num_blocks for number in range(num_blocks + 1)]
    return nn.ModuleList(_Block(end - start, dtype) for start, end in pairwise(ends) if end > start)


def _peak(moments: Iterable[Sequence[int]], sizes: Sequence[int]) -> int:
    """Returns the largest number of bytes at one moment.

    Args:
        moments: For each moment, the indices of the units whose memory is held.
        sizes: Bytes of each unit.
    """
    return max((sum(sizes[unit] for unit in moment) for moment in moments), default=0)
