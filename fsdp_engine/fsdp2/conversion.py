"""``model.to(dtype)``, ``model.to_empty(device)`` and their kind, before there is an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.devices import memory
from fsdp_engine.fsdp2.group import Group, groups_within
from fsdp_engine.runtime.conversion import changes_of, hidden

# What becomes of each dtype of a unit that gets memory: another one, and where.
_Moves = dict[torch.dtype, tuple[torch.dtype, torch.device]]

_here = threading.local()


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """What ``nn.Module._apply`` does, where parameters are those of units.

    Dtypes are changed in place, of whole units. Units that come off the meta device are made anew,
    of whole parameters: collective.

    Args:
        module: that is converted; ``fully_shard`` was called on it.
        fn: what ``_apply`` was given.
        apply: ``_apply`` of the module itself: for buffers, parameters of no unit, inner modules.

    Raises:
        RuntimeError: a unit is in the hands of an engine whose outermost module is another; or
            shows full parameters that somebody computes with.
        ValueError: the device would change; see also :func:`changes_of`.
    """
    if getattr(_here, "is_under_way", False):
        apply()
        return
    groups = groups_within(module)
    for group in groups:
        if group.unit.uses:
            raise RuntimeError(
                f"conversion of {group.unit.label}: expected no forward or backward of it under "
                "way; found one"
            )
    moves = [(group, _moves(group, fn)) for group in groups]
    changes = [
        change
        for group, moved in moves
        if not moved
        for change in changes_of(
            group.unit, fn, group.resources.config, [m for g in group.modules for m in g.modules()]
        )
    ]
    for group in groups:
        group.unit.release()
    _here.is_under_way = True
    try:
        moved_buffers = [b for group, moved in moves if moved for b in group.unit.buffers]
        with hidden([*moved_buffers, *(buffer for buffer, _, _ in changes)]):
            apply()
    finally:
        _here.is_under_way = False
    for buffer, kind, codec in changes:
        buffer.convert(kind, codec, are_reduced=False)
    for group, moved in moves:
        if moved:
            group.rebuild(_whole_parameters(group, moved), next(iter(moved.values()))[1])


def take_assigned(group: Group) -> None:
    """Where all parameters are on the meta device, and values were assigned to all of them
    (``load_state_dict(assign=True)``): the unit gets memory, and those values."""
    found = {
        (id(module), attribute): module._parameters[attribute]
        for record in group.records
        for module, attribute in record.owners[:1]
    }
    if not group.metas or any(value is None or value.is_meta for value in found.values()):
        return
    device = group.resources.memory.device
    dtypes = {b.weights.main.tensor.dtype for b in group.unit.buffers}
    group.rebuild(_whole_parameters(group, {dtype: (dtype, device) for dtype in dtypes}), device)
    with torch.no_grad():
        for record in group.records:
            module, attribute = record.owners[0]
            value = found[id(module), attribute]
            assert value is not None
            sharded = module._parameters[attribute]
            assert sharded is not None
            sharded.copy_(value)


def _moves(group: Group, fn: Callable[[Tensor], Tensor]) -> _Moves:
    """What becomes of each dtype, where parameters come off the meta device; else nothing."""
    device = group.resources.memory.device
    found: _Moves = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        if main.is_meta:
            probe = fn(memory.empty(0, main.dtype, main.device))
            if probe.device.type == device.type:
                found[main.dtype] = (probe.dtype, device)
    return found


def _whole_parameters(group: Group, moves: _Moves) -> dict[tuple[int, str], nn.Parameter]:
    """By their first place, as users had them; without values, where there were none."""
    whole = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        dtype, device = moves[main.dtype]
        if main.is_meta:
            flat = memory.empty(buffer.layout.numel, dtype, device)
            full = ShardedBuffer(buffer.layout, buffer.mesh.coordinate, 0, flat)
        else:
            full = buffer.gather_main()
        params = zip(buffer.records, buffer.sharded_params, buffer.main_params(full), strict=True)
        for record, old, main_param in params:
            value = main_param.detach().to(dtype)
            module, attribute = record.owners[0]
            whole[id(module), attribute] = nn.Parameter(value, requires_grad=old.requires_grad)
    return whole
