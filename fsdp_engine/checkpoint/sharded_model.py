"""The interface of an engine that checkpoints use, and its parameters as they are saved."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.devices.ranks import Ranks
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.layout.expert_place import ExpertPlace


class NamedRecord(Protocol):
    """The attributes of ``ParamRecord`` that checkpoints use."""

    name: str
    owners: list[tuple[nn.Module, str]]
    aliases: list[str]
    is_written: bool
    expert: ExpertPlace | None


class ShardedBuffer(Protocol):
    """The attributes of ``ParamAndGradBuffer`` that checkpoints use."""

    @property
    def records(self) -> Sequence[NamedRecord]:
        """Records of its parameters."""
        ...

    @property
    def sharded_params(self) -> Sequence[Tensor]:
        """Its parameters as the user's modules hold them."""
        ...

    @property
    def mesh(self) -> DataMesh:
        """The ranks over which it is sharded."""
        ...

    @property
    def grads(self) -> object | None:
        """Gradients of its parameters; None: they were frozen at ``shard()``."""
        ...


class MissingValues(Protocol):
    """The part of :class:`~fsdp_engine.runtime.missing_values.MissingValues` that loads use."""

    def check(self) -> None:
        """Raise if any entry has no valid value."""
        ...

    def replacing(self, keys: Iterable[Hashable]) -> AbstractContextManager[None]:
        """Context in which entries are replaced. An exception marks them as missing."""
        ...


class ShardedModel(Protocol):
    """The attributes of ``Engine`` that checkpoints use."""

    model: nn.Module
    mesh: DataMesh
    ranks: Ranks

    @property
    def missing_values(self) -> MissingValues:
        """The parameters and buffers that have no valid values."""
        ...

    @property
    def buffers(self) -> Sequence[ShardedBuffer]:
        """All buffers of all units."""
        ...

    def weights_changed(self) -> None:
        """Notify the engine that main weights were changed."""
        ...

    def check_modules(self) -> None:
        """Raise if modules have other parameters than at ``shard()``."""
        ...


@dataclass(frozen=True)
class SavedParam:
    """A parameter as checkpoints have it: see [Note: Names of experts] in
    ``layout/expert_place.py``.

    Attributes:
        name: the first of its names there.
        aliases: all of them.
        of_others: names of what other ranks hold in its place, its own among them.
        held: the parameter as the user's modules hold it.
        saved: the same memory, with the placement in the checkpoint.
        is_frozen: it was frozen at ``shard()``.
    """

    name: str
    aliases: tuple[str, ...]
    of_others: tuple[str, ...]
    held: Tensor
    saved: Tensor
    is_frozen: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether the checkpoint has it under another name or shape, as a part of all experts."""
        return self.saved is not self.held or self.of_others != self.aliases

    def as_saved(self, state: Tensor) -> Tensor:
        """Convert state with the placement of ``held`` to the placement of ``saved``."""
        if self.saved is self.held or not isinstance(self.saved, FlatDTensor):
            return state
        local = state.local if isinstance(state, FlatDTensor) else state.detach().reshape(-1)
        return FlatDTensor.from_flat_local(local, self.saved.flat_placement)

    def as_held(self, state: Tensor) -> Tensor:
        """Convert state with the placement of ``saved`` to the placement of ``held``."""
        if self.saved is self.held or not isinstance(state, FlatDTensor):
            return state
        if isinstance(self.held, FlatDTensor):
            return FlatDTensor.from_flat_local(state.local, self.held.flat_placement)
        return state.local.view(self.held.shape)


def saved_params(engine: ShardedModel) -> dict[int, SavedParam]:
    """Returns every parameter of the model, by ``id`` of the sharded parameter.

    Raises:
        ValueError: a tensor that contains all experts is 0-d, and cannot be sharded.
    """
    return {
        id(param): _saved_param(record, param, buffer)
        for buffer in engine.buffers
        for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
    }


def _saved_param(record: NamedRecord, param: Tensor, buffer: ShardedBuffer) -> SavedParam:
    expert, is_frozen = record.expert, buffer.grads is None
    if expert is None:
        aliases = tuple(record.aliases)
        return SavedParam(record.name, aliases, aliases, param, param, is_frozen)
    aliases = tuple(map(expert.rename, record.aliases))
    of_others = tuple(name for alias in record.aliases for name in expert.all_names(alias))
    saved = _part_of_all(record.name, param, expert, buffer.mesh) if expert.is_cut else param
    name = expert.rename(record.name)
    return SavedParam(name, aliases, of_others, param, saved, is_frozen)


def _part_of_all(name: str, param: Tensor, expert: ExpertPlace, mesh: DataMesh) -> Tensor:
    """This rank's part of the tensor that contains all experts."""
    if not param.ndim:
        raise ValueError(
            f"checkpoint: expected {name}, of several experts, to have them as its first dim; "
            "found a scalar"
        )
    shape = torch.Size(expert.whole_shape(param.shape))
    before = expert.rank * param.numel()
    if isinstance(param, FlatDTensor):
        flat, local = param.flat_placement, param.local
        start, stop = before + flat.start, before + flat.stop
        placement = FlatPlacement(
            shape,
            start,
            stop,
            flat.mesh,
            flat.split_groups,
            flat.num_sharded_axes,
            flat.name,
            num_rows=flat.num_rows,
        )
    else:
        local = param.detach().view(-1)
        placement = FlatPlacement(shape, before, before + param.numel(), mesh.alone, name=name)
    return FlatDTensor.from_flat_local(local, placement)
