"""The places of experts among the experts of all ranks."""

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
    """Record for each expert's parameter which of all experts it belongs to. Collective.

    Args:
        model: before anything is changed.
        records: its parameters.
        data: all data-parallel ranks.
        experts: The ranks that have the experts of this rank.
    """
    # DTensors know their places by themselves.
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
    """Modules that hold experts and nothing else, the outermost ones, by name with a dot behind it;
    how many numbered members each has."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        params = list(module.parameters())
        if not params or not all(map(is_expert, params)) or any(map(prefix.startswith, found)):
            continue
        # A module around them all, with nothing else in it, is not yet the layer.
        while len(members := _members(module)) == 1 and not members[0].isdigit():
            inner = module._modules.get(members[0])
            if inner is None:
                break  # a tensor of its own
            prefix, module = f"{prefix}{members[0]}.", inner
        found[prefix] = sum(each.isdigit() for each in _members(module))
    return found


def _members(module: nn.Module) -> list[str]:
    """Names of parameters and of children that have any."""
    own = [name for name, param in module._parameters.items() if param is not None]
    children = [
        name
        for name, child in module._modules.items()
        if child is not None and has_parameters(child)
    ]
    return own + children
