"""``model.to(dtype)``, ``model.to_empty(device)`` and their kind, for parameters of units."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.devices import memory
from fsdp_engine.fsdp2.group import Group


def convert(group: Group, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """What ``nn.Module._apply`` does, where parameters are a unit's.

    What ``fn`` makes of a tensor shows on one without elements. Where that has another dtype, or
    comes off the meta device, the unit is made anew, of whole parameters: collective.

    Args:
        group: of the module that is converted.
        fn: what ``_apply`` was given.
        apply: ``_apply`` of the module itself: for buffers, parameters of no unit, inner modules.

    Raises:
        RuntimeError: the dtype would change, and there was a forward; or a forward or backward is
            under way.
        ValueError: the device would change.
    """
    unit = group.unit
    if unit.uses:
        raise RuntimeError(
            f"conversion of {unit.label}: expected no forward or backward of it under way; found "
            "one"
        )
    unit.release()
    changes = _changes(group, fn)
    places = [owner for record in group.records for owner in record.owners]
    kept = [module._parameters[attribute] for module, attribute in places]
    for module, attribute in places:
        module._parameters[attribute] = None
    try:
        apply()
    finally:
        for (module, attribute), param in zip(places, kept, strict=True):
            module._parameters[attribute] = param
    if changes:
        whole = _whole_parameters(group, changes)
        group.rebuild(whole, next(iter(changes.values()))[1])


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


def _changes(
    group: Group, fn: Callable[[Tensor], Tensor]
) -> dict[torch.dtype, tuple[torch.dtype, torch.device]]:
    """What becomes of each dtype, and where; none, if all stays as it is."""
    device = group.resources.memory.device
    found: dict[torch.dtype, tuple[torch.dtype, torch.device]] = {}
    stays = True
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        probe = fn(memory.empty(0, main.dtype, main.device))
        found[main.dtype] = (probe.dtype, probe.device)
        if probe.device.type not in (device.type, "meta"):
            raise ValueError(
                f"conversion of {group.unit.label}: expected parameters to stay on {device}, the "
                f"mesh's device; found {probe.device}"
            )
        if (probe.dtype, probe.device.type) == (main.dtype, main.device.type):
            continue
        stays = False
        if probe.is_meta and not main.is_meta:
            raise ValueError(
                f"conversion of {group.unit.label}: expected parameters to keep their values; "
                "found the meta device"
            )
    if stays:
        return {}
    if group.engine is not None:
        raise RuntimeError(
            f"conversion of {group.unit.label}: expected it before the first forward; found a "
            "forward behind. Save a state dict, and load it into a model that is built anew"
        )
    return {
        old: (new, device if where.type == device.type else where)
        for old, (new, where) in found.items()
    }


def _whole_parameters(
    group: Group, changes: dict[torch.dtype, tuple[torch.dtype, torch.device]]
) -> dict[tuple[int, str], nn.Parameter]:
    """By their first place, as users had them; without values, where there were none."""
    whole = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        dtype, device = changes[main.dtype]
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
