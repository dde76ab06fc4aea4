"""Will it fit? Bytes and traffic of one rank, for any strategy and number of ranks, on one machine.

Nothing is allocated and no process group is needed. A model (also on the meta device) is laid out
as ``shard()`` would do it, so bytes at rest are exact, padding included; a number of elements is
laid out as so many equal units. Formulas are those of ``strategies/``:

    at rest     elements of a buffer x ``Level.fraction(role, ranks)`` for both axes x bytes
    transient   full parameters of the units in use and gathered ahead, full gradients until they
                are reduced: the prefetch windows and the budget of the engine, walked through
    traffic     elements x ``Level.traffic(ranks)`` x bytes on the wire

Along the outer axis a buffer's inner part travels where the inner axis cuts anything.

Activations are not included, nor what kernels and allocators take for themselves.

Worked example, 8e9 elements in 32 units on 64 ranks, bf16 with fp32 main weights and gradients and
AdamW: level 3 holds 8e9 x (4 + 4 + 8) / 64 bytes = 1.9 GiB and for a moment the bf16 weights of
two units, 0.9 GiB; level 0 holds 8e9 x (4 + 2 + 4 + 8) bytes = 134.1 GiB.
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

NOT_INCLUDED = "Activations are not included, nor what kernels and allocators take for themselves."


# Name and buffers of one unit to be, the root first.
class _Unit(NamedTuple):
    buffers: list[BufferPlan]
    is_loose: bool = False


@dataclass(frozen=True)
class Estimate:
    """What one rank holds and sends. Bytes; every rank holds as much.

    Attributes:
        strategy: the levels.
        inner_size: ranks on the inner axis.
        outer_size: ranks on the outer axis.
        num_elements: parameter elements of the whole model.
        padding: elements that flat buffers add, over all ranks.
        weight_bytes: main weights and whatever persists of the compute weights, at rest.
        grad_bytes: gradients, from their first reduction until they are cleared.
        optimizer_bytes: optimizer state at rest, if it were padded as the weights are.
        full_bytes: most that full parameters take at a time, beyond those at rest.
        staging_bytes: most that full gradients take until they are reduced, beyond those at rest.
        inner_traffic_bytes: sent along the inner axis in a step.
        outer_traffic_bytes: sent along the outer axis in a step.
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
        """Held as the optimizer steps: weights, gradients and optimizer state."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """At most held within a step, without activations: the peaks of full parameters and of
        staging need not fall on one moment."""
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
    """What one rank would hold and send.

    Args:
        model: a module, not changed, also on the meta device; or a number of elements. Of
            parameters that are DTensors this rank's shards count.
        world_size: data-parallel ranks in all.
        outer_size: how many of them are on the outer axis; the others are on the inner one.
        strategy, outer_strategy, units, mp_policy, config, granule, codec_rules, min_unit_size: as
            for :func:`~fsdp_engine.sharding.shard`.
        optimizer_bytes_per_element: 8 for AdamW in fp32, 4 for SGD with momentum, 0 for plain SGD.
        num_microbatches: microbatches of a step.
        num_units: for a number of elements: equal units that they are in.
        dtype: for a number of elements: the parameters' own dtype.

    Raises:
        ValueError: ranks that do not make a mesh, a number that is not positive, an unknown
            strategy, or what ``shard()`` would refuse in ``units`` and ``granule``.
        TypeError: ``model`` is neither a module nor a number.
    """
    sizes = _axis_sizes(world_size, outer_size)
    levels = Strategy.from_names(strategy, outer_strategy).on(outer_size)
    if outer_size == 1:
        levels = Strategy(levels.inner, NO_SHARD)  # as the engine has it: nothing to cut
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
    ahead, staged = options.budgets(blocks, others)
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
        full_bytes=peak_full_bytes(footprints, expected, ahead),
        staging_bytes=peak_staging_bytes(footprints, expected, staged),
        inner_traffic_bytes=traffic(Axis.INNER),
        outer_traffic_bytes=traffic(Axis.OUTER),
    )


def compare(
    model: nn.Module | float, *, world_size: int, outer_size: int = 1, **options: Any
) -> tuple[Estimate, ...]:
    """An estimate for each of the ten pairs of levels; the four levels where one axis is all.

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
    """As ``plan.make_plan``, whose other checks (of values, of optimizers) do not matter here."""
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
    """A root without parameters and equal units, of one tensor each."""
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
