"""What checkpoints need to know of an engine, and its parameters as checkpoints have them."""

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
    """What a checkpoint needs to know of a parameter; attributes as in ``ParamRecord``."""

    name: str
    owners: list[tuple[nn.Module, str]]
    aliases: list[str]
    is_written: bool
    expert: ExpertPlace | None


class ShardedBuffer(Protocol):
    """What a checkpoint needs to know of a buffer; attributes as in ``ParamAndGradBuffer``."""

    @property
    def records(self) -> Sequence[NamedRecord]:
        """Its parameters."""
        ...

    @property
    def sharded_params(self) -> Sequence[Tensor]:
        """What users see of them."""
        ...

    @property
    def mesh(self) -> DataMesh:
        """Whose ranks share them."""
        ...

    @property
    def grads(self) -> object | None:
        """Their gradients; None: they were frozen when the model was sharded."""
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
    """What a checkpoint needs to know of an engine."""

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
        """Main weights were changed from outside."""
        ...

    def check_modules(self) -> None:
        """Raise where modules have other parameters than at ``shard()``."""
        ...


@dataclass(frozen=True)
class SavedParam:
    """A parameter as checkpoints have it: see [Note: Names of experts] in
    ``layout/expert_place.py``.

    Attributes:
        name: the first of its names there.
        aliases: all of them.
        of_others: names of what other ranks hold in its place, its own among them.
        held: what users see of it.
        saved: the same memory, as a part of what is saved.
        is_frozen: it was when the model was sharded.
    """

    name: str
    aliases: tuple[str, ...]
    of_others: tuple[str, ...]
    held: Tensor
    saved: Tensor
    is_frozen: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether its name or its shape there is another."""
        return self.saved is not self.held or self.of_others != self.aliases

    def as_saved(self, state: Tensor) -> Tensor:
        """A state that lies as ``held`` does, as ``saved`` does."""
        if self.saved is self.held or not isinstance(self.saved, FlatDTensor):
            return state
        local = state.local if isinstance(state, FlatDTensor) else state.detach().reshape(-1)
        return FlatDTensor.from_flat_local(local, self.saved.flat_placement)

    def as_held(self, state: Tensor) -> Tensor:
        """A state that lies as ``saved`` does, as ``held`` does."""
        if self.saved is self.held or not isinstance(state, FlatDTensor):
            return state
        if isinstance(self.held, FlatDTensor):
            return FlatDTensor.from_flat_local(state.local, self.held.flat_placement)
        return state.local.view(self.held.shape)


def saved_params(engine: ShardedModel) -> dict[int, SavedParam]:
    """Every parameter of the model, by ``id`` of what users see of it.

    Raises:
        ValueError: ranks hold parts of a tensor of all experts that has no first dim.
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
    """This rank's part of the tensor of all experts."""
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
            flat.num_cut_axes,
            flat.name,
            num_rows=flat.num_rows,
        )
    else:
        local = param.detach().view(-1)
        placement = FlatPlacement(shape, before, before + param.numel(), mesh.alone, name=name)
    return FlatDTensor.from_flat_local(local, placement)
