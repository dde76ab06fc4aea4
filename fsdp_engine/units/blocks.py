"""Finds the blocks of a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from fsdp_engine.units.assignment import (
    UnitSelector,
    collect_records,
    find_units,
    reads_weights_in_backward,
)


def find_blocks(
    model: nn.Module, units: UnitSelector | Iterable[UnitSelector] | None
) -> dict[str, nn.Module]:
    """Returns the outermost modules of units by name, in module order.

    Loose modules, embeddings and other modules whose backward reads no weights are left out.

    Args:
        model: Any module.
        units: The units, as in :func:`~fsdp_engine.shard`.
    """
    chosen: dict[str, nn.Module] = {}
    for unit in find_units(model, units, collect_records(model)):
        loose = {id(module) for module in unit.loose}
        for name, module in zip(unit.names, unit.modules, strict=True):
            if id(module) not in loose and reads_weights_in_backward(module):
                chosen[name] = module
    places = {id(module): place for place, module in enumerate(model.modules())}
    inside = {
        id(inner) for each in chosen.values() for inner in each.modules() if inner is not each
    }
    outermost = {name: module for name, module in chosen.items() if id(module) not in inside}
    return dict(sorted(outermost.items(), key=lambda item: places[id(item[1])]))
