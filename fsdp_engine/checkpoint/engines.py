"""Several engines in one checkpoint: an actor and a critic, say, under one optimizer.

What reads and writes checkpoints asks a model for its ``state_dict`` and for its buffers. Engines
by name answer together: entries and parameters are called ``actor.head.weight``, as those of one
module that holds both would be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor, nn

from fsdp_engine.checkpoint.sharded_model import (
    MissingValues,
    NamedRecord,
    ShardedBuffer,
    ShardedModel,
)
from fsdp_engine.devices.mesh import DataMesh
from fsdp_engine.devices.ranks import Ranks
from fsdp_engine.layout.expert_place import ExpertPlace
from fsdp_engine.strategies import Axis, Strategy


class EngineLike(ShardedModel, Protocol):
    """One engine."""

    strategy: Strategy


Engines = EngineLike | Mapping[str, EngineLike]


@dataclass
class _Record:
    """A parameter under the name that it has in the checkpoint."""

    name: str
    owners: list[tuple[nn.Module, str]]
    aliases: list[str]
    is_written: bool
    expert: ExpertPlace | None


@dataclass
class _Buffer:
    """One engine's buffer, with such records."""

    records: Sequence[NamedRecord]
    sharded_params: Sequence[Tensor]
    mesh: DataMesh
    grads: object | None


class _JointMissingValues:
    """Missing values of several engines, by names that begin with the engine's name."""

    def __init__(self, engines: Mapping[str, EngineLike]) -> None:
        self._engines = engines

    def check(self) -> None:
        """Raise if any entry of any engine has no valid value."""
        for engine in self._engines.values():
            engine.missing_values.check()

    @contextmanager
    def replacing(self, keys: Iterable[Hashable]) -> Iterator[None]:
        """Context in which entries are replaced. An exception marks them in every engine."""
        keys = list(keys)
        with ExitStack() as stack:
            for name, engine in self._engines.items():
                own = (_without_engine(key, f"{name}.") for key in keys)
                replaced = [key for key in own if key is not None]
                stack.enter_context(engine.missing_values.replacing(replaced))
            yield


def _without_engine(key: Hashable, prefix: str) -> Hashable | None:
    """An engine's own key; None: ``key`` is a tensor of another engine. Keys of entries outside
    models are those of every engine."""
    if not isinstance(key, str):
        return key
    return key.removeprefix(prefix) if key.startswith(prefix) else None


class _Together:
    """Engines by name, as one sharded model.

    Attributes:
        model: has each engine's model under the engine's name.
        mesh, ranks: the first engine's.
    """

    def __init__(self, engines: Mapping[str, EngineLike]) -> None:
        self._engines = dict(engines)
        self.model: nn.Module = nn.ModuleDict({name: each.model for name, each in engines.items()})
        first = next(iter(engines.values()))
        self.mesh, self.ranks = first.mesh, first.ranks
        self.missing_values: MissingValues = _JointMissingValues(self._engines)

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

    def weights_changed(self) -> None:
        """Main weights were changed from outside."""
        for engine in self._engines.values():
            engine.weights_changed()

    def check_modules(self) -> None:
        """Raise where modules have other parameters than at ``shard()``."""
        for engine in self._engines.values():
            engine.check_modules()


def _named(record: NamedRecord, engine: str) -> _Record:
    aliases = [f"{engine}.{alias}" for alias in record.aliases]
    expert = record.expert
    if expert is not None and expert.layer:
        expert = dataclasses.replace(expert, layer=f"{engine}.{expert.layer}")
    elif expert is not None:
        names = tuple(f"{engine}.{name}" for name in expert.names)
        expert = dataclasses.replace(expert, names=names)
    return _Record(f"{engine}.{record.name}", record.owners, aliases, record.is_written, expert)


def as_one(engine: Engines) -> ShardedModel:
    """One engine as it is; several, by name, as one.

    Raises:
        TypeError: a mapping of something else.
        ValueError: no engine, a name with a dot, one engine under two names, or engines of other
            ranks.
    """
    if not isinstance(engine, Mapping):
        return engine
    for name, each in engine.items():
        if not isinstance(name, str) or not hasattr(each, "check_modules"):
            raise TypeError(
                f"engine[{name!r}]: expected a str and what shard() returned; found a "
                f"{type(each).__name__}"
            )
        if "." in name or not name:
            raise ValueError(f"engine: expected names without a dot; found {name!r}")
    engines = list(engine.values())
    if not engines or len({id(each) for each in engines}) < len(engines):
        raise ValueError(
            f"engine: expected engines, each of them once; found {list(engine) or 'none'}"
        )
    ranks = [_ranks(each.ranks) for each in engines]
    if any(others != ranks[0] for others in ranks):
        raise ValueError(
            "engine: expected engines of the same ranks; found "
            + ", ".join(f"{name} of {each}" for name, each in zip(engine, ranks, strict=True))
        )
    return _Together(engine)


def level_names(engine: Engines) -> dict[str, str]:
    """Levels by axis; where engines differ, all of them."""
    engines = list(engine.values()) if isinstance(engine, Mapping) else [engine]
    found = [
        {axis.value: each.strategy.level(axis).name for axis in (Axis.INNER, Axis.OUTER)}
        for each in engines
    ]
    return {axis: ", ".join(dict.fromkeys(names[axis] for names in found)) for axis in found[0]}


def axis_sizes(engine: ShardedModel) -> dict[str, int]:
    """Ranks along each axis of the mesh; those of others' dimensions, that DTensor parameters are
    over, beside them."""
    mesh = engine.mesh
    sizes = {axis.value: mesh.axis(axis).size for axis in (Axis.OUTER, Axis.INNER)}
    if engine.ranks.size > mesh.size:
        sizes["others"] = engine.ranks.size // mesh.size
    return sizes


def _ranks(ranks: Ranks) -> list[int]:
    group = ranks.control_group
    return [] if group is None else dist.get_process_group_ranks(group)
