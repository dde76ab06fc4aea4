"""``model.to(dtype)``, ``model.to_empty(device)`` and similar, before the engine is constructed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_engine.devices import memory
from fsdp_engine.fsdp2.param_group import ParamGroup, groups_within
from fsdp_engine.runtime.conversion import changes_of, hidden
from fsdp_engine.runtime.same_dtypes import note_conversion

# New dtypes by old ones, for a unit whose memory is allocated.
_DtypeMap = dict[torch.dtype, torch.dtype]

_thread = threading.local()


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """Implements ``nn.Module._apply`` for parameters that belong to units.

    Converts the dtypes of full units in place, and allocates memory for units that are moved off
    the meta device. Parameters remain the same objects. Not collective.

    Args:
        module: the module to convert; ``fully_shard`` was called on it.
        fn: the argument of ``_apply``.
        apply: ``_apply`` of the module itself, for buffers, parameters of no unit, inner modules.

    Raises:
        RuntimeError: a forward or backward of a unit is in progress; see also :func:`changes_of`.
        ValueError: the device would change; see also :func:`changes_of`.
    """
    if getattr(_thread, "is_converting", False):
        apply()
        return
    groups = groups_within(module)
    for group in groups:
        if group.unit.uses:
            raise RuntimeError(
                f"conversion of {group.unit.label}: expected no forward or backward of it in "
                "progress; found one"
            )
    allocations = [(group, _new_dtypes(group, fn)) for group in groups]
    changes = [
        change
        for group, dtypes in allocations
        if not dtypes
        for change in changes_of(
            group.unit, fn, group.resources.config, [m for g in group.modules for m in g.modules()]
        )
    ]
    before = {
        id(group): [(buffer, buffer.kind) for buffer in group.unit.buffers] for group in groups
    }
    for group in groups:
        group.unit.release()
    _thread.is_converting = True
    try:
        allocated = [b for group, dtypes in allocations if dtypes for b in group.unit.buffers]
        with hidden([*allocated, *(buffer for buffer, _, _ in changes)]):
            apply()
    finally:
        _thread.is_converting = False
    for buffer, kind, codec in changes:
        buffer.convert(kind, codec, are_reduced=False)
    for group, dtypes in allocations:
        if dtypes:
            group.values.drop_pending()
            group.give_memory(dtypes.__getitem__)
    for group in groups:
        note_conversion(group.ladders, before[id(group)])


def _new_dtypes(group: ParamGroup, fn: Callable[[Tensor], Tensor]) -> _DtypeMap:
    """The new dtype for each dtype of parameters that ``fn`` moves off the meta device; empty if it
    moves none."""
    device = group.resources.memory.device
    found: _DtypeMap = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        if main.is_meta:
            probe = fn(memory.empty(0, main.dtype, main.device))
            if probe.device.type == device.type:
                found[main.dtype] = probe.dtype
    return found
