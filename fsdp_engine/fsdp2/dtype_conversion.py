"""``model.to(dtype)``, ``model.to_empty(device)`` and similar, before the engine is constructed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.fsdp2.param_group import ParamGroup, groups_within
from fsdp_engine.memory import allocator
from fsdp_engine.runtime.conversion import agree_on_changes, changes_of, hidden

# New dtypes by old ones, for a unit whose memory is allocated.
_DtypeMap = dict[torch.dtype, torch.dtype]

_thread = threading.local()


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """Implements ``nn.Module._apply`` for parameters that belong to units.

    Converts the dtypes of full units in place, and allocates memory for units that are moved off
    the meta device. Parameters remain the same objects. Collective if a dtype changes.

    Args:
        module: the module to convert; ``fully_shard`` was called on it.
        fn: the argument of ``_apply``.
        apply: ``_apply`` of the module itself, for buffers, parameters of no unit, inner modules.

    Raises:
        RuntimeError: a forward or backward of a unit is in progress; see also :func:`changes_of`.
        ValueError: the device would change; see also :func:`changes_of`,
            :func:`agree_on_changes`.
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
    changes: list[Any] = []
    by_ranks: dict[tuple[int, ...], Any] = {}
    for group, dtypes in allocations:
        if not dtypes:
            inside = [each for outer in group.modules for each in outer.modules()]
            found = list(changes_of(group.unit, fn, group.resources.config, inside))
            changes += found
            known = by_ranks.setdefault(
                tuple(group.communicators.ranks.ranks), (group.communicators, [])
            )
            known[1].extend(found)
    for communicators, found in by_ranks.values():
        if found:
            agree_on_changes(communicators, found)
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


def _new_dtypes(group: ParamGroup, fn: Callable[[Tensor], Tensor]) -> _DtypeMap:
    """The new dtype for each dtype of parameters that ``fn`` moves off the meta device; empty if it
    moves none."""
    device = group.resources.memory.device
    found: _DtypeMap = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        if main.is_meta:
            probe = fn(allocator.empty(0, main.dtype, main.device))
            if probe.device.type == device.type:
                found[main.dtype] = probe.dtype
    return found
