"""Megatron-Core's process groups, from a ``ProcessGroupCollection`` or from ``parallel_state``.

This file does not import Megatron-Core: a program that created groups with it has imported it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from fsdp_engine.megatron.model_parallel_groups import ModelParallelGroups

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
        tp, pp, ep: tensor, pipeline and expert parallelism.
        embd, pos_embd: stages that hold a copy of the word or the position embedding.
        dp, dp_cp: data parallelism without and with context parallelism.
        expt_dp: ranks that hold the same experts.
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
        """The groups for :func:`~.finalize_model_grads.finalize_model_grads`."""
        return ModelParallelGroups(
            tensor=self.tp,
            pipeline=self.pp,
            embedding=self.embd,
            position_embedding=self.pos_embd,
            data=self.data,
            expert=self.ep,
        )


def collect_groups(collection: object | None) -> CollectedGroups | None:
    """The groups of ``collection``, or of Megatron-Core's ``parallel_state`` if it is None.

    Returns:
        None if there is neither a collection nor an initialized ``parallel_state``.

    Raises:
        ValueError: the collection has neither ``dp`` nor ``dp_cp``.
        TypeError: a field of the collection is neither a ``ProcessGroup`` nor None.
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
