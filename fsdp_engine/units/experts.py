"""Finds the indices of this rank's experts among the experts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdp_engine.buffers.spec import ParamRecord
from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.layout.expert_place import ExpertPlace
from fsdp_engine.units.assignment import has_parameters
from fsdp_engine.units.plan import is_expert


def place_experts(
    model: nn.Module, records: Sequence[ParamRecord], data: DataMesh, experts: DataMesh
) -> None:
    """Record the global index of each expert that owns a parameter. Collective.

    Args:
        model: The model, not yet sharded.
        records: The model's parameters.
        data: All data-parallel ranks.
        experts: The data-parallel ranks that share the experts of this rank.
    """
    # DTensors are left out: their placements define which experts a rank holds.
    members = [each for each in records if is_expert(each.param) and each.spread is None]
    names = [record.name for record in members]
    heads: list[Any] = gather_objects((experts.ranks[0], names), data.control_group)
    firsts = sorted({first for first, _ in heads})
    if len(firsts) == 1:
        return
    rank, size = firsts.index(experts.ranks[0]), len(firsts)
    shared = set(names).intersection(*(each for _, each in heads))
    layers = _layers(model)
    for place, record in enumerate(members):
        layer = next((each for each in layers if record.name.startswith(each)), "")
        if record.name not in shared or not layer:
            there = dict.fromkeys(each[place] for _, each in heads if place < len(each))
            record.expert = ExpertPlace(rank, size, names=tuple(there))
            continue
        number = record.name[len(layer) :].partition(".")[0]
        is_numbered = number.isdigit()
        record.expert = ExpertPlace(rank, size, layer, layers[layer] if is_numbered else 0)


def _layers(model: nn.Module) -> dict[str, int]:
    """Returns the outermost modules that hold only experts.

    Keys are their names with a trailing dot. A value is the number of members whose names are
    numbers.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        params = list(module.parameters())
        if not params or not all(map(is_expert, params)) or any(map(prefix.startswith, found)):
            continue
        # If the only member is a module that is not numbered, that module is the layer.
        while len(members := _members(module)) == 1 and not members[0].isdigit():
            inner = module._modules.get(members[0])
            if inner is None:
                break  # the only member is a parameter
            prefix, module = f"{prefix}{members[0]}.", inner
        found[prefix] = sum(each.isdigit() for each in _members(module))
    return found


def _members(module: nn.Module) -> list[str]:
    """Returns the names of a module's own parameters, and of its children with parameters."""
    own = [name for name, param in module._parameters.items() if param is not None]
    children = [
        name
        for name, child in module._modules.items()
        if child is not None and has_parameters(child)
    ]
    return own + children
