"""The process groups of model parallelism, and the group that several of them span."""

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
    """This rank's process groups of model and data parallelism. None: the group does not exist.

    The value that ``dist.new_group`` returns on ranks outside the group is treated as None.

    Attributes:
        tensor: ranks that hold shards of the same layers.
        pipeline: ranks that hold the stages of one pipeline, first to last.
        embedding: the stages that hold a copy of the tied word embedding: the first and the last.
        position_embedding: the stages that hold a copy of the position embedding.
        data: ranks that hold the same weights and process different samples.
        context: ranks that hold the same weights and process different parts of the same samples.
        expert: ranks over which experts are distributed. If these ranks are within the other
            groups, as in Megatron-Core, the field has no effect; otherwise token counts are also
            summed over it.

    Raises:
        TypeError: a field is neither a ``ProcessGroup`` nor None.
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


# Keyed by the first group, then by the names of all groups. Values are weak references because the
# spanned group may be the key itself; ``mesh.py`` keeps the groups that were created here alive.
_SPANNED: weakref.WeakKeyDictionary[
    ProcessGroup, dict[tuple[str, ...], weakref.ref[ProcessGroup]]
] = weakref.WeakKeyDictionary()


def spanned_group(device: torch.device, *groups: ProcessGroup | None) -> ProcessGroup | None:
    """The group of all ranks that are reachable along ``groups``, the axes of one grid. Collective.

    The result is cached. The first call gathers, along one axis after the other, the set of ranks
    reached so far. Every rank of the grid must therefore call this function with its own groups
    of these axes, in the same order. A group that is contained in the others adds no ranks.

    Args:
        device: of the tensors that the group will communicate.
        *groups: None and groups of one rank are ignored.

    Returns:
        One of ``groups`` if it contains all of these ranks; None for a single rank.
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
        equal = [group for group in axes if set(dist.get_process_group_ranks(group)) == ranks]
        spanned = equal[0] if equal else group_of_ranks(ranks, axes[0], device)
        known[names] = weakref.ref(spanned)
    return spanned
