"""``model.to(dtype)``, ``model.to_empty(device)`` and their kind, before there is an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_engine.devices import memory
from fsdp_engine.fsdp2.group import Group, groups_within
from fsdp_engine.runtime.conversion import agree_on_changes, changes_of, hidden

# What becomes of each dtype of a unit that gets memory.
_Moves = dict[torch.dtype, torch.dtype]

_here = threading.local()


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """What ``nn.Module._apply`` does, where parameters are those of units.

    Dtypes are changed in place, of whole units; units that come off the meta device get memory.
    Parameters stay the objects that they are. Collective where a dtype changes.

    Args:
        module: that is converted; ``fully_shard`` was called on it.
        fn: what ``_apply`` was given.
        apply: ``_apply`` of the module itself: for buffers, parameters of no unit, inner modules.

    Raises:
        RuntimeError: a unit is in the hands of an engine whose outermost module is another; or
            shows full parameters that somebody computes with.
        ValueError: the device would change; see also :func:`changes_of`,
            :func:`agree_on_changes`.
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
    changes: list[Any] = []
    by_ranks: dict[tuple[int, ...], Any] = {}
    for group, moved in moves:
        if not moved:
            inside = [each for outer in group.modules for each in outer.modules()]
            found = list(changes_of(group.unit, fn, group.resources.config, inside))
            changes += found
            known = by_ranks.setdefault(tuple(group.ladders.ranks.ranks), (group.ladders, []))
            known[1].extend(found)
    for ladders, found in by_ranks.values():
        if found:
            agree_on_changes(ladders, found)
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
            group.values.forget()
            group.give_memory(moved.__getitem__)


def _moves(group: Group, fn: Callable[[Tensor], Tensor]) -> _Moves:
    """What becomes of each dtype, where parameters come off the meta device; else nothing."""
    device = group.resources.memory.device
    found: _Moves = {}
    for buffer in group.unit.buffers:
        main = buffer.weights.main.tensor
        if main.is_meta:
            probe = fn(memory.empty(0, main.dtype, main.device))
            if probe.device.type == device.type:
                found[main.dtype] = probe.dtype
    return found
