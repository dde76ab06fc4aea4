"""Megatron-Core's process groups, from a ``ProcessGroupCollection`` or from ``parallel_state``.

This file does not import Megatron-Core: a program that created groups with it has imported it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import gather_objects
from fsdp_engine.comm.groups import group_of_ranks


@dataclass(frozen=True)
class ModelParallelGroups:
    """This rank's process groups of model and data parallelism. None: the group does not exist.

    The value that ``dist.new_group`` returns on ranks outside the group is treated as None.

    Attributes:
        tensor: Ranks that hold shards of the same layers.
        pipeline: Ranks that hold the stages of one pipeline, first to last.
        embedding: The stages that hold a copy of the tied word embedding: the first and the last.
        position_embedding: The stages that hold a copy of the position embedding.
        data: Ranks that hold the same weights and process different samples.
        context: Ranks that hold the same weights and process different parts of the same samples.
        expert: Ranks over which experts are distributed. If these ranks are within the other
            groups, as in Megatron-Core, the field has no effect; otherwise the token counts of
            routers are also summed over it.

    Raises:
        TypeError: A field is neither a ``ProcessGroup`` nor None.
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


# Results of ``spanned_group``, by the first of its groups, then by the names of all of them. Values
# are weak references because the spanned group may be the key itself; ``group_of_ranks`` keeps the
# groups that were created here alive.
_SPANNED: weakref.WeakKeyDictionary[
    ProcessGroup, dict[tuple[str, ...], weakref.ref[ProcessGroup]]
] = weakref.WeakKeyDictionary()


def spanned_group(device: torch.device, *groups: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group of all ranks that are reachable along ``groups``, the axes of one grid.
    Collective.

    The result is cached. The first call gathers, along one axis after the other, the set of ranks
    reached so far. Every rank of the grid must therefore call this function with its own groups
    of these axes, in the same order. A group that is contained in the others adds no ranks.

    Args:
        device: The device of the tensors that the group will communicate.
        *groups: The groups of the axes. None and groups of one rank are ignored.

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


# Fields of a collection, with the getter of parallel_state and its arguments.
_MAY_BE_MISSING = {"check_initialized": False}
_GETTERS: dict[str, tuple[str, dict[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", _MAY_BE_MISSING),
    "pp": ("get_pipeline_model_parallel_group", _MAY_BE_MISSING),
    "embd": ("get_embedding_group", _MAY_BE_MISSING),
    "pos_embd": ("get_position_embedding_group", _MAY_BE_MISSING),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "ep": ("get_expert_model_parallel_group", _MAY_BE_MISSING),
    "expt_dp": ("get_expert_data_parallel_group", _MAY_BE_MISSING),
}


@dataclass(frozen=True)
class CollectedGroups:
    """This rank's groups by the field names of a ``ProcessGroupCollection``. None: no such group.

    Attributes:
        tp, pp, ep: The groups of tensor, pipeline and expert parallelism.
        embd, pos_embd: Stages that hold a copy of the word or the position embedding.
        dp, dp_cp: The groups of data parallelism without and with context parallelism.
        expt_dp: Ranks that hold the same experts.
    """

    tp: ProcessGroup | None = None
    pp: ProcessGroup | None = None
    embd: ProcessGroup | None = None
    pos_embd: ProcessGroup | None = None
    dp: ProcessGroup | None = None
    dp_cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    expt_dp: ProcessGroup | None = None

    @property
    def data(self) -> ProcessGroup | None:
        """Ranks that hold the same dense weights."""
        return self.dp_cp if self.dp_cp is not None else self.dp

    def for_gradients(self) -> ModelParallelGroups:
        """Returns the groups for :func:`~.finalize_model_grads.finalize_model_grads`."""
        return ModelParallelGroups(
            tensor=self.tp,
            pipeline=self.pp,
            embedding=self.embd,
            position_embedding=self.pos_embd,
            data=self.data,
            expert=self.ep,
        )


def collect_groups(collection: object | None) -> CollectedGroups | None:
    """Returns the groups of ``collection``, or of Megatron-Core's ``parallel_state`` if it is None.

    Returns:
        None if there is neither a collection nor an initialized ``parallel_state``.

    Raises:
        ValueError: The collection has neither ``dp`` nor ``dp_cp``.
        TypeError: A field of the collection is neither a ``ProcessGroup`` nor None.
    """
    if collection is None:
        return _of_parallel_state()
    found = {name: _group(name, getattr(collection, name, None)) for name in _GETTERS}
    groups = CollectedGroups(**found)
    if groups.data is None:
        raise ValueError(
            "pg_collection: expected a ProcessGroup in dp_cp or dp; found "
            f"{type(collection).__name__} with neither"
        )
    return groups


def _of_parallel_state() -> CollectedGroups | None:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return CollectedGroups(
        **{
            name: _group(name, getattr(state, getter)(**arguments))
            for name, (getter, arguments) in _GETTERS.items()
        }
    )


def _group(name: str, found: object) -> ProcessGroup | None:
    if found is None or found is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    if not isinstance(found, ProcessGroup):
        raise TypeError(f"pg_collection.{name}: expected a ProcessGroup or None; found {found!r}")
    return found
