"""A plan of one unit: the modules that a user names, and what of their parameters is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fsdp_engine.buffers.param_record import ParamRecord
from fsdp_engine.planning.assignment import check_memory, collect_records
from fsdp_engine.planning.dtensors import set_spreads
from fsdp_engine.planning.plan import Plan, PlannedUnit, PlanSettings, check_record, plan_buffers

Place = tuple[nn.Module, str]


def plan_one(
    name: str,
    modules: Sequence[nn.Module],
    is_free: Callable[[ParamRecord], bool],
    settings: PlanSettings,
) -> Plan:
    """A plan of one unit. Changes nothing, sends nothing.

    Args:
        name: of the unit, for people.
        modules: its modules; none within another.
        is_free: whether a parameter is the unit's; it may raise.
        settings: what the plan follows.

    Raises:
        ValueError: a parameter that no unit can have, two that share memory, or some on the meta
            device beside others that are not.
    """
    root = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    records = [record for record in collect_records(root) if is_free(record)]
    set_spreads(records)
    for record in records:
        check_record(record, settings)
    check_memory(root, records)
    metas = [record.name for record in records if record.param.is_meta]
    if metas and len(metas) < len(records):
        other = next(record.name for record in records if not record.param.is_meta)
        raise ValueError(
            f"{other}: expected all parameters of {name} on the meta device, or none; found this "
            f"one with values and {metas[0]} without"
        )
    unit = PlannedUnit(name, modules, plan_buffers(records, settings))
    return Plan([unit], records, on_meta=bool(metas))
