"""The interface of an engine that checkpoints use, and the form in which parameters are saved.

A dict of engines, such as an actor and a critic under one optimizer, is saved and loaded like one
engine of a module that contains all models: entries and parameters have names such as
``actor.head.weight``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.comm.groups import Ranks
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement
from fsdp_engine.layout.expert_place import ExpertPlace
from fsdp_engine.memory import allocator
from fsdp_engine.strategies import Axis, Strategy


class NamedRecord(Protocol):
    """The attributes of ``ParamRecord`` that checkpoints use."""

    name: str
    holders: list[tuple[nn.Module, str]]
    aliases: list[str]
    is_written: bool
    expert: ExpertPlace | None


class ShardedBuffer(Protocol):
    """The attributes of ``ParamAndGradBuffer`` that checkpoints use."""

    @property
    def records(self) -> Sequence[NamedRecord]:
        """The records of the buffer's parameters."""
        ...

    @property
    def sharded_params(self) -> Sequence[Tensor]:
        """The buffer's parameters as the user's modules hold them."""
        ...

    @property
    def mesh(self) -> DataMesh:
        """The ranks over which the buffer is sharded."""
        ...

    @property
    def grads(self) -> object | None:
        """The gradients of the buffer's parameters; None: they were frozen at ``shard()``."""
        ...


class MissingValues(Protocol):
    """The methods of :class:`~fsdp_engine.runtime.missing_values.MissingValues` that loads use."""

    def check(self) -> None:
        """Raise an error if any entry has no valid value."""
        ...

    def replacing(self, keys: Iterable[Hashable]) -> AbstractContextManager[None]:
        """Context in which entries are replaced. An exception marks them as missing."""
        ...


class ShardedModel(Protocol):
    """The attributes of ``Engine`` that checkpoints use."""

    model: nn.Module
    mesh: DataMesh
    ranks: Ranks

    model_part: str

    @property
    def missing_values(self) -> MissingValues:
        """The parameters and buffers that have no valid values."""
        ...

    @property
    def buffers(self) -> Sequence[ShardedBuffer]:
        """All buffers of all units."""
        ...

    @property
    def has_trained(self) -> bool:
        """Whether gradients of a step were reduced since ``shard()``."""
        ...

    def weights_changed(self) -> None:
        """Notify the engine that main weights were changed."""
        ...

    def check_modules(self) -> None:
        """Raise an error if modules have other parameters than at ``shard()``."""
        ...

    def await_ranks(self) -> None:
        """Take part in the gathers of other ranks until no rank needs one."""
        ...


@dataclass(frozen=True)
class SavedParam:
    """A parameter as checkpoints contain it. See [Note: Names of experts] in
    ``layout/expert_place.py``.

    Attributes:
        name: The first of the parameter's names in checkpoints.
        aliases: All of its names in checkpoints.
        of_others: For an expert: the names of the parameters that all ranks hold at its position,
            including its own. Otherwise equal to ``aliases``.
        held: The parameter as the user's modules hold it.
        saved: A tensor over the same memory, with the placement in the checkpoint.
        is_frozen: Whether the parameter was frozen at ``shard()``.
    """

    name: str
    aliases: tuple[str, ...]
    of_others: tuple[str, ...]
    held: Tensor
    saved: Tensor
    is_frozen: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether the parameter belongs to an expert, so that the checkpoint contains it under
        another name, or as a part of a tensor of all experts."""
        return self.saved is not self.held or self.of_others != self.aliases

    def as_saved(self, state: Tensor) -> Tensor:
        """Convert state with the placement of ``held`` to the placement of ``saved``."""
        if self.saved is self.held or not isinstance(self.saved, FlatDTensor):
            return state
        if isinstance(state, FlatDTensor) and state.flat_placement != self._held_placement:
            return self._of_owner(state)
        local = state.local if isinstance(state, FlatDTensor) else state.detach().reshape(-1)
        return FlatDTensor.from_flat_local(local, self.saved.flat_placement)

    def zeros(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Allocate zeros with the placement of ``saved``, on its device if ``device`` is None."""
        device = self.held.device if device is None else device
        if not isinstance(self.saved, FlatDTensor):
            return allocator.zeros(tuple(self.saved.shape), dtype, device)
        placement = self.saved.flat_placement
        return FlatDTensor.from_flat_local(
            allocator.zeros(placement.numel, dtype, device), placement
        )

    @property
    def _held_placement(self) -> FlatPlacement | None:
        return self.held.flat_placement if isinstance(self.held, FlatDTensor) else None

    def _of_owner(self, state: FlatDTensor) -> FlatDTensor:
        """Convert state whose elements are all on the parameter's owner to the placement of
        ``saved``."""
        assert isinstance(self.saved, FlatDTensor)
        saved, placement = self.saved.flat_placement, state.flat_placement
        first = saved.start - (self._held_placement.start if self._held_placement else 0)
        place = replace(saved, start=first + placement.start, stop=first + placement.stop)
        return FlatDTensor.from_flat_local(state.local, place)

    def as_held(self, state: Tensor) -> Tensor:
        """Convert state with the placement of ``saved`` to the placement of ``held``."""
        if self.saved is self.held or not isinstance(state, FlatDTensor):
            return state
        if isinstance(self.held, FlatDTensor):
            return FlatDTensor.from_flat_local(state.local, self.held.flat_placement)
        return state.local.view(self.held.shape)


def saved_params(engine: ShardedModel) -> dict[int, SavedParam]:
    """Returns each parameter of the model as it is saved, by ``id`` of the sharded parameter.

    Raises:
        ValueError: A tensor that contains all experts is 0-d, and cannot be sharded.
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
    saved = _part_of_all(record.name, param, expert, buffer.mesh) if expert.is_sharded else param
    name = expert.rename(record.name)
    return SavedParam(name, aliases, of_others, param, saved, is_frozen)


def _part_of_all(name: str, param: Tensor, expert: ExpertPlace, mesh: DataMesh) -> Tensor:
    """Returns this rank's part of the tensor that contains all experts."""
    if not param.ndim:
        raise ValueError(
            f"checkpoint: expected the experts of {name} along its first dim; found a tensor "
            "without dims"
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


class EngineLike(ShardedModel, Protocol):
    """The interface of a single engine that checkpoints use."""

    strategy: Strategy

    @property
    def number(self) -> int:
        """The number of engines that these ranks made before this one; equal on all of them."""
        ...


Engines = EngineLike | Mapping[str, EngineLike]


@dataclass
class _Record:
    """A parameter of one of several engines, under its name in the checkpoint."""

    name: str
    holders: list[tuple[nn.Module, str]]
    aliases: list[str]
    is_written: bool
    expert: ExpertPlace | None


@dataclass
class _Buffer:
    """A buffer of one of several engines. Its parameters are named as in the checkpoint."""

    records: Sequence[NamedRecord]
    sharded_params: Sequence[Tensor]
    mesh: DataMesh
    grads: object | None


class _JointMissingValues:
    """The missing values of several engines, by names that begin with the engine's name."""

    def __init__(self, engines: Mapping[str, EngineLike]) -> None:
        self._engines = engines

    def check(self) -> None:
        """Raise an error if any entry of any engine has no valid value."""
        for engine in self._engines.values():
            engine.missing_values.check()

    @contextmanager
    def replacing(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Context in which entries are replaced. An exception marks them as missing in every
        engine."""
        keys = list(keys)
        with ExitStack() as stack:
            for name, engine in self._engines.items():
                own = (_without_engine(key, f"{name}.") for key in keys)
                replaced = [key for key in own if key is not None]
                stack.enter_context(engine.missing_values.replacing(replaced))
            yield


def _without_engine(key: Hashable, prefix: str) -> Hashable | None:
    """Returns the key within an engine. None: ``key`` is a tensor of another engine. Keys of
    entries outside models belong to every engine."""
    if not isinstance(key, str):
        return key
    return key.removeprefix(prefix) if key.startswith(prefix) else None


class _JointModel:
    """Several engines with the interface of one.

    Attributes:
        model: A module that contains the model of each engine under the engine's name.
        mesh, ranks: The mesh and ranks of the first engine.
        missing_values: The missing values of all engines.
        model_part: The model parts of the engines that have one.
    """

    def __init__(self, engines: Mapping[str, EngineLike]) -> None:
        self._engines = dict(engines)
        self.model: nn.Module = nn.ModuleDict({name: each.model for name, each in engines.items()})
        first = next(iter(engines.values()))
        self.mesh, self.ranks = first.mesh, first.ranks
        self.missing_values: MissingValues = _JointMissingValues(self._engines)
        stages = {name: each.model_part for name, each in engines.items()}
        self.model_part = ", ".join(f"{name} {stage}" for name, stage in stages.items() if stage)

    @property
    def buffers(self) -> list[ShardedBuffer]:
        """All buffers of all engines."""
        return [
            _Buffer(
                [_named(record, name) for record in buffer.records],
                buffer.sharded_params,
                buffer.mesh,
                buffer.grads,
            )
            for name, engine in self._engines.items()
            for buffer in engine.buffers
        ]

    @property
    def has_trained(self) -> bool:
        """Whether an engine has reduced gradients of a step."""
        return any(engine.has_trained for engine in self._engines.values())

    def weights_changed(self) -> None:
        """Notify the engines that main weights were changed."""
        for engine in self._engines.values():
            engine.weights_changed()

    def check_modules(self) -> None:
        """Raise an error if modules have other parameters than at ``shard()``."""
        for engine in self._engines.values():
            engine.check_modules()

    def await_ranks(self) -> None:
        """Take part in the gathers of other ranks until no rank needs one."""
        for engine in self._engines.values():
            engine.await_ranks()


def _named(record: NamedRecord, engine: str) -> _Record:
    aliases = [f"{engine}.{alias}" for alias in record.aliases]
    expert = record.expert
    if expert is not None and expert.layer:
        expert = dataclasses.replace(expert, layer=f"{engine}.{expert.layer}")
    elif expert is not None:
        names = tuple(f"{engine}.{name}" for name in expert.names)
        expert = dataclasses.replace(expert, names=names)
    return _Record(f"{engine}.{record.name}", record.holders, aliases, record.is_written, expert)


def join_engines(engine: Engines) -> ShardedModel:
    """Returns a single engine unchanged, and joins a dict of engines.

    Raises:
        TypeError: ``engine``, or a value of the mapping, is not an engine.
        ValueError: The mapping is empty, a name contains a dot, an engine has two names, or engines
            have different ranks.
    """
    if not isinstance(engine, Mapping):
        _check_engine("engine", engine)
        return engine
    for name, each in engine.items():
        if not isinstance(name, str):
            raise TypeError(f"engine: expected names that are str; found {name!r}")
        _check_engine(f"engine[{name!r}]", each)
        if "." in name or not name:
            raise ValueError(f"engine: expected names without a dot; found {name!r}")
    engines = list(engine.values())
    if not engines or len({id(each) for each in engines}) < len(engines):
        raise ValueError(
            "engine: expected at least one engine, and each engine under one name; found "
            f"{list(engine) or 'none'}"
        )
    ranks = [_ranks(each.ranks) for each in engines]
    if any(others != ranks[0] for others in ranks):
        raise ValueError(
            "engine: expected engines of the same ranks; found "
            + ", ".join(f"{name} of {each}" for name, each in zip(engine, ranks, strict=True))
        )
    return _JointModel(engine)


def _check_engine(where: str, engine: object) -> None:
    if not hasattr(engine, "check_modules"):
        raise TypeError(
            f"{where}: expected an engine: the result of fe.shard(), or of "
            "fsdp_engine.fsdp2.engine_of(model) for a model of fully_shard; found a "
            f"{type(engine).__name__}"
        )


def level_names(engine: Engines) -> dict[str, str]:
    """Returns the names of the levels by axis. If engines differ, the names of all are joined."""
    engines = list(engine.values()) if isinstance(engine, Mapping) else [engine]
    found = [
        {axis.value: each.strategy.level(axis).name for axis in (Axis.INNER, Axis.OUTER)}
        for each in engines
    ]
    return {axis: ", ".join(dict.fromkeys(names[axis] for names in found)) for axis in found[0]}


def axis_sizes(engine: ShardedModel) -> dict[str, int]:
    """Returns the number of ranks along each axis of the mesh. If parameters are DTensors, the item
    "others" is the number of ranks along their other mesh dimensions."""
    mesh = engine.mesh
    sizes = {axis.value: mesh.axis(axis).size for axis in (Axis.OUTER, Axis.INNER)}
    if engine.ranks.size > mesh.size:
        sizes["others"] = engine.ranks.size // mesh.size
    return sizes


def _ranks(ranks: Ranks) -> list[int]:
    group = ranks.control_group
    return [] if group is None else dist.get_process_group_ranks(group)
