"""The process groups of model parallelism, and the group that several of them span together."""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_engine.devices.collectives import gather_objects
from fsdp_engine.devices.groups import group_of_ranks


@dataclass(frozen=True)
class ModelParallelGroups:
    """This rank's process groups, by what its ranks have in common; None: not there.

    What ``dist.new_group`` returns to ranks outside the group counts as None, too.

    Attributes:
        tensor: ranks that hold parts of the same layers.
        pipeline: ranks that hold the stages of one pipeline, first to last.
        embedding: the stages that hold a copy of the tied word embedding: the first and the last.
        position_embedding: the stages that hold a copy of the position embedding.
        data: ranks that hold the same weights and see other samples.
        context: ranks that hold the same weights and see other parts of the same samples.
        expert: ranks over which experts are spread. Where they lie within the other groups, as in
            Megatron-Core, this changes nothing; else token counts are summed over it, too.

    Raises:
        TypeError: something else is given.
    """

    tensor: ProcessGroup | None = None
    pipeline: ProcessGroup | None = None
    embedding: ProcessGroup | None = None
    position_embedding: ProcessGroup | None = None
    data: ProcessGroup | None = None
    context: ProcessGroup | None = None
    expert: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is dist.GroupMember.NON_GROUP_MEMBER:
                object.__setattr__(self, field.name, None)
            elif value is not None and not isinstance(value, ProcessGroup):
                raise TypeError(f"{field.name}: expected a ProcessGroup or None; found {value!r}")


# By the first of the groups and the names of all. Weak both ways: what is spanned may be that first
# group itself, and groups that were made for it are kept in ``mesh.py``.
_SPANNED: weakref.WeakKeyDictionary[
    ProcessGroup, dict[tuple[str, ...], weakref.ref[ProcessGroup]]
] = weakref.WeakKeyDictionary()


def spanned_group(device: torch.device, *groups: ProcessGroup | None) -> ProcessGroup | None:
    """The group of all ranks that can be reached along ``groups``, axes of one grid.

    Found once, by telling each other along every axis in turn who was reached so far; so every
    rank of the grid must call it with its own groups of these axes, in one order. A group that
    lies within others adds nobody.

    Args:
        device: of the tensors that shall travel.
        *groups: None, and groups of one rank, are left out.

    Returns:
        One of ``groups`` where that is all; None for one rank.
    """
    axes = [group for group in groups if group is not None and group.size() > 1]
    if len(axes) < 2:
        return axes[0] if axes else None
    known = _SPANNED.setdefault(axes[0], {})
    names = tuple(group.group_name for group in axes)
    spanned = known[names]() if names in known else None
    if spanned is None:
        ranks = set(dist.get_process_group_ranks(axes[0]))
        for group in axes[1:]:
            for others in gather_objects(ranks, group):
                assert isinstance(others, set)
                ranks = ranks | others
        whole = [group for group in axes if set(dist.get_process_group_ranks(group)) == ranks]
        spanned = whole[0] if whole else group_of_ranks(ranks, axes[0], device)
        known[names] = weakref.ref(spanned)
    return spanned
