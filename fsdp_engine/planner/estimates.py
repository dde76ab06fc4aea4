"""Estimates of one rank's bytes and traffic by formulas, for any strategy and number of ranks.

Does not allocate tensors or need a process group. A model (also on the meta device) is laid out as
in ``shard()``, so bytes at rest are exact, including padding. A number of elements is laid out as
equal units. Formulas are those of ``strategies/``:

    at rest     elements of a buffer x ``Level.fraction(role, ranks)`` for both axes x bytes
    transient   full parameters of the units in use and of prefetched ones, and full gradients
                until they are reduced, from the engine's prefetch window and staging budget
    traffic     elements x ``Level.traffic(ranks)`` x bytes per element of the collectives

Along the outer axis a buffer's inner shard is communicated if the inner axis shards any role.

Activations, and memory of kernels and allocators, are not included.

Worked example, 8e9 elements in 32 units on 64 ranks, bf16 with fp32 main weights and gradients and
AdamW: level 3 holds 8e9 x (4 + 4 + 8) / 64 bytes = 1.9 GiB and temporarily the bf16 weights of two
units, 0.9 GiB; level 0 holds 8e9 x (4 + 2 + 4 + 8) bytes = 134.1 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_engine.codecs import CastCodec, CodecRule
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.layout.placement import TensorRequest, plan_layouts
from fsdp_engine.planner.footprint import (
    AxisSizes,
    BufferPlan,
    Footprint,
    UnitFootprint,
    peak_full_bytes,
    peak_staging_bytes,
)
from fsdp_engine.planning.assignment import Expected, UnitSelector, collect_records, expect
from fsdp_engine.planning.dtensors import set_spreads
from fsdp_engine.planning.plan import AxisPlan, AxisPlans, Granule, PlanSettings, plan_units
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.simulation.arguments import check_callable, check_count, check_type, listed
from fsdp_engine.strategies import ALL_STRATEGIES, NO_SHARD, Axis, Role, Strategy

NOT_INCLUDED = "Activations are not included, nor is memory of kernels and allocators."


# The buffers of one planned unit; the root is the first unit.
class _Unit(NamedTuple):
    buffers: list[BufferPlan]
    is_loose: bool = False


@dataclass(frozen=True)
class Estimate:
    """Memory and traffic of one rank in bytes; equal on all ranks.

    Attributes:
        strategy: the levels.
        inner_size: ranks on the inner axis.
        outer_size: ranks on the outer axis.
        num_elements: parameter elements of the full model.
        padding: elements of padding in flat buffers, over all ranks.
        weight_bytes: main weights and persistent compute weights, at rest.
        grad_bytes: gradients, from their first reduction until they are cleared.
        optimizer_bytes: optimizer state at rest, with the padding of the weights.
        full_bytes: peak of full parameters, in addition to those at rest.
        staging_bytes: peak of full gradients before their reduction, in addition to those at rest.
        inner_traffic_bytes: sent along the inner axis per step.
        outer_traffic_bytes: sent along the outer axis per step.
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

    @property
    def rest_bytes(self) -> int:
        """Weights, gradients and optimizer state, which are held during the optimizer's step."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """Upper bound of the peak in a step, without activations. (The peaks of full parameters and
        of staging may be at different times.)"""
        return self.rest_bytes + self.full_bytes + self.staging_bytes


def estimate(
    model: nn.Module | float,
    *,
    world_size: int,
    outer_size: int = 1,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
    units: UnitSelector | Iterable[UnitSelector] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    config: DistributedDataParallelConfig | None = None,
    granule: Granule | None = None,
    codec_rules: Sequence[CodecRule] = (),
    min_unit_size: int | None = None,
    optimizer_bytes_per_element: float = 8,
    num_microbatches: int = 1,
    num_units: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Estimate:
    """Estimate the memory and traffic of one rank.

    Args:
        model: a module, also on the meta device, which is not modified; or a number of elements.
            For parameters that are DTensors, this rank's shards are counted.
        world_size: number of data-parallel ranks.
        outer_size: number of ranks on the outer axis.
        strategy, outer_strategy, units, mp_policy, config, granule, codec_rules, min_unit_size: as
            for :func:`~fsdp_engine.sharding.shard`.
        optimizer_bytes_per_element: 8 for AdamW in fp32, 4 for SGD with momentum, 0 for plain SGD.
        num_microbatches: microbatches per step.
        num_units: for a number of elements: the number of equal units.
        dtype: for a number of elements: the parameters' own dtype.

    Raises:
        ValueError: ``outer_size`` does not divide ``world_size``, a number is not positive, the
            strategy is unknown, or ``units`` or ``granule`` are invalid for ``shard()``.
        TypeError: ``model`` is neither a module nor a number.
    """
    sizes = _axis_sizes(world_size, outer_size)
    levels = Strategy.from_names(strategy, outer_strategy).on(outer_size)
    if outer_size == 1:
        levels = Strategy(levels.inner, NO_SHARD)  # as in the engine
    for name, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("config", config, DistributedDataParallelConfig),
        ("dtype", dtype, torch.dtype),
    ):
        if value is not None:
            check_type(name, value, kind, f"a {kind.__name__}")
    _check_at_least("optimizer_bytes_per_element", optimizer_bytes_per_element, 0)
    check_count("num_microbatches", num_microbatches, "1 or more")
    listed("codec_rules", codec_rules, "a sequence of rules")
    if granule is not None:
        check_callable("granule", granule, "a function of a name and a parameter, or None")
    policy, options = mp_policy or MixedPrecisionPolicy(), config or DistributedDataParallelConfig()
    axes = AxisPlan(sizes, levels)
    settings = PlanSettings(
        options.applied_to(policy), options, AxisPlans(axes), granule, codec_rules, min_unit_size
    )
    if isinstance(model, nn.Module):
        planned, expected = _units_of(model, units, settings)
    elif isinstance(model, int | float) and not isinstance(model, bool):
        check_count("num_units", num_units, "1 or more")
        _check_at_least("model", model, 1)
        planned = _equal_units(round(model), num_units, dtype, settings)
        order = list(range(1, len(planned)))
        expected = Expected(order, order[::-1], [set() for _ in planned])
    else:
        raise TypeError(f"model: expected a module or a number of elements; found {model!r}")
    footprints = [
        UnitFootprint(
            tuple(Footprint(buffer, levels, sizes) for buffer in unit.buffers),
            unit.is_loose,
        )
        for unit in planned
    ]
    blocks = [unit.numel for unit in footprints[1:] if not unit.is_loose]
    others = [unit.numel for unit in footprints if unit.buffers]
    prefetched, staged = options.budgets(blocks, others)
    every = [each for unit in footprints for each in unit.buffers]
    state = sum(each.held(Role.OPTIM) for each in every if each.buffer.trainable)

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
        optimizer_bytes=math.ceil(optimizer_bytes_per_element * state),
        full_bytes=peak_full_bytes(footprints, expected, prefetched),
        staging_bytes=peak_staging_bytes(footprints, expected, staged),
        inner_traffic_bytes=traffic(Axis.INNER),
        outer_traffic_bytes=traffic(Axis.OUTER),
    )


def compare(
    model: nn.Module | float, *, world_size: int, outer_size: int = 1, **options: Any
) -> tuple[Estimate, ...]:
    """Estimates for each of the ten pairs of levels, or of the four levels on one axis.

    Args:
        model, world_size, outer_size, options: as for :func:`estimate`, without strategies.
    """
    pairs = [s for s in ALL_STRATEGIES if outer_size > 1 or not s.shards(Role.OPTIM, Axis.OUTER)]
    return tuple(
        estimate(
            model,
            world_size=world_size,
            outer_size=outer_size,
            strategy=pair.inner.name,
            outer_strategy=pair.outer.name,
            **options,
        )
        for pair in pairs
    )


def _axis_sizes(world_size: int, outer_size: int) -> AxisSizes:
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


def _units_of(
    model: nn.Module,
    selectors: UnitSelector | Iterable[UnitSelector] | None,
    settings: PlanSettings,
) -> tuple[list[_Unit], Expected]:
    """Plan units like ``plan.make_plan``, without its checks of values and optimizers."""
    records = collect_records(model)
    if not records:
        raise ValueError(f"model: expected parameters; found none in {type(model).__name__}")
    set_spreads(records)
    made = plan_units(model, records, selectors, settings)
    units = [
        _Unit(
            [
                BufferPlan(
                    each.layout, each.kind.dtypes, each.kind.requires_grad, each.make_codec()
                )
                for each in unit.buffers
            ],
            bool(unit.loose),
        )
        for unit in made
    ]
    return units, expect(model, [unit.modules for unit in made])


def _equal_units(
    num_elements: int, num_units: int, dtype: torch.dtype, settings: PlanSettings
) -> list[_Unit]:
    """A root without parameters, and equal units of one tensor each."""
    param = torch.empty(0, dtype=dtype, device="meta").requires_grad_()
    narrow = settings.config.reduce_scatter_with_fp32_accumulation
    dtypes = settings.policy.resolve(param, narrow)
    axes = settings.axis_plans.data
    codec = CastCodec(dtypes.main, dtypes.compute)
    units = [_Unit([])]
    for index in range(num_units):
        count = num_elements * (index + 1) // num_units - num_elements * index // num_units
        if count:
            requests = [TensorRequest(f"unit {index}", (count,))]
            (layout,) = plan_layouts(
                requests, inner_size=axes.cut(Axis.INNER), outer_size=axes.cut(Axis.OUTER)
            )
            units.append(_Unit([BufferPlan(layout, dtypes, True, codec)]))
    return units
