"""What is in a checkpoint, for people and programs. Nothing is printed here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from fsdp_engine.checkpoint.manifest import TensorRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    OPTIMIZER,
    RANKS,
    TRAINABLE_ONLY,
)
from fsdp_engine.checkpoint.offline import StoredCheckpoint, count_files, stray_files
from fsdp_engine.checkpoint.optimizer_state import GROUPS, KIND

# So many of an optimizer's groups are described.
MAX_GROUPS = 16
# An object that is larger is only counted.
MAX_OBJECT_BYTES = 16 << 20

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


@dataclasses.dataclass
class SectionRow:
    """What a part of a checkpoint holds: tensors, their elements and bytes, and other objects."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    objects: int = 0


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """A param group of an optimizer: how many parameters, and its hyperparameters."""

    number: str
    parameters: int
    hyperparameters: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Description:
    """What is in a checkpoint. None where it does not say.

    Attributes:
        path: its folder.
        step, world_size, mesh, strategy, libraries: from the manifest.
        saved_at: when it was complete, as ISO 8601.
        trainable_only: frozen parameters were left out.
        num_files, num_bytes: that are there.
        missing_files, stray_files: that are not, and that are besides.
        sections: tensors and objects by part: model (with buffers, and a tied weight under each of
            its names), optimizer, extra, ranks, and "other".
        optimizer: its class.
        groups: of the optimizer, the first ``MAX_GROUPS``; ``num_groups`` in all.
        extra: the ``extra`` of rank 0 by name, shortened.
        num_ranks: how many ranks have saved random states and ``extra`` of their own.
        tensors: a row for each, by key.
    """

    path: str
    step: int | None
    saved_at: str
    world_size: int | None
    mesh: dict[str, int] | None
    strategy: dict[str, str] | None
    libraries: dict[str, str] | None
    trainable_only: bool
    num_files: int
    num_bytes: int
    missing_files: list[str]
    stray_files: list[str]
    sections: dict[str, SectionRow]
    optimizer: str | None
    groups: list[GroupRow]
    num_groups: int
    extra: dict[str, str]
    num_ranks: int
    tensors: list[TensorRow]


def describe(checkpoint: StoredCheckpoint) -> Description:
    """What is in a checkpoint. Reads no tensors but 0-d ones of the optimizer's groups."""
    manifest, saved = checkpoint.manifest, checkpoint.saved
    files = checkpoint.files()
    num_files, num_bytes = count_files(checkpoint.folder, files)
    sections: dict[str, SectionRow] = {}
    for key in saved.entries:
        if key == TRAINABLE_ONLY:
            continue
        section = sections.setdefault(checkpoint.section(key), SectionRow())
        row = checkpoint.tensors.get(key)
        if row is None:
            section.objects += 1
        else:
            section.tensors += 1
            section.elements += math.prod(row.shape)
            section.bytes += tensor_bytes(row)
    kinds = saved.below(OPTIMIZER, KIND)
    groups, num_groups = _groups(checkpoint)
    return Description(
        path=str(checkpoint.folder),
        step=None if manifest is None else manifest.step,
        saved_at=checkpoint.saved_at().isoformat(timespec="seconds"),
        world_size=None if manifest is None else manifest.world_size,
        mesh=None if manifest is None else manifest.mesh,
        strategy=None if manifest is None else manifest.strategy,
        libraries=None if manifest is None else manifest.libraries,
        trainable_only=saved.is_trainable_only,
        num_files=num_files,
        num_bytes=num_bytes,
        missing_files=sorted(name for name in files if not (checkpoint.folder / name).is_file()),
        stray_files=stray_files(checkpoint.folder, files),
        sections=sections,
        optimizer=_shown(checkpoint, kinds[0]).strip("'") if kinds else None,
        groups=groups,
        num_groups=num_groups,
        extra=_extra(checkpoint),
        num_ranks=len(saved.below(RANKS)),
        tensors=list(checkpoint.tensors.values()),
    )


def tensor_bytes(row: TensorRow) -> int:
    """Bytes of a tensor's elements."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize


def shorten(value: Any, length: int = 100) -> str:
    """A value for people, on one line."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = f"{value.item()!r} ({dtype})" if value.numel() == 1 else f"{dtype} {[*value.shape]}"
        return str(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _groups(checkpoint: StoredCheckpoint) -> tuple[list[GroupRow], int]:
    """The optimizer's first groups, and how many there are."""
    saved = checkpoint.saved
    keys: dict[Any, list[str]] = {}
    for key in saved.below(OPTIMIZER, GROUPS):
        if len(saved.paths[key]) > 3:
            keys.setdefault(saved.paths[key][2], []).append(key)
    rows = []
    for number in list(keys)[:MAX_GROUPS]:
        hyperparameters: dict[str, str] = {}
        parameters = 0
        for key in keys[number]:
            name = str(saved.paths[key][3])
            if name != "params":
                hyperparameters[name] = _shown(checkpoint, key)
            elif len(saved.paths[key]) > 4:  # a name by itself
                parameters += 1
            else:
                parameters += len(_names(checkpoint, key))
        rows.append(GroupRow(str(number), parameters, hyperparameters))
    return rows, len(keys)


def _names(checkpoint: StoredCheckpoint, key: str) -> list[Any]:
    try:
        value = checkpoint.read_value(key)
    except (OSError, ValueError, EOFError):
        return []
    return value if isinstance(value, list) else []


def _extra(checkpoint: StoredCheckpoint) -> dict[str, str]:
    """What the user added, by name."""
    shown: dict[str, str] = {}
    for key in checkpoint.saved.below(EXTRA):
        name = ".".join(map(str, checkpoint.saved.paths[key][1:]))
        if name:
            shown[name] = _shown(checkpoint, key)
            continue
        size = checkpoint.object_bytes(key)
        try:
            value = checkpoint.read_value(key) if size <= MAX_OBJECT_BYTES else None
        except (OSError, ValueError, EOFError) as error:
            shown[key] = f"unreadable: {error}"
            continue
        if isinstance(value, Mapping):
            shown |= {str(each): shorten(content) for each, content in value.items()}
        else:
            shown[key] = f"{size:,} bytes"
    return shown


def _shown(checkpoint: StoredCheckpoint, key: str) -> str:
    """A value for people, also where it cannot be read."""
    row = checkpoint.tensors.get(key)
    if row is not None and math.prod(row.shape) != 1:
        return f"{row.dtype} {[*row.shape]}"
    if row is None and (size := checkpoint.object_bytes(key)) > MAX_OBJECT_BYTES:
        return f"{size:,} bytes"
    try:
        return shorten(checkpoint.read_value(key))
    except (OSError, ValueError, EOFError) as error:
        return f"unreadable: {error}"


@dataclasses.dataclass
class TensorGroup:
    """Tensors of one shape and dtype whose names differ in numbers only.

    Attributes:
        name: with a star for each number that differs.
        count: how many tensors.
        shape: of each.
        dtype: likewise.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str


def group_tensors(rows: Iterable[TensorRow]) -> list[TensorGroup]:
    """The rows of ``blocks.0.weight``, ``blocks.1.weight``, ... as one, in order of the first."""
    groups: dict[Any, TensorGroup] = {}
    for row in rows:
        pattern = _NUMBER.sub("*", row.name)
        group = groups.get((pattern, row.shape, row.dtype))
        if group is None:
            groups[pattern, row.shape, row.dtype] = TensorGroup(row.name, 1, row.shape, row.dtype)
        else:
            group.count += 1
            group.name = pattern
    return list(groups.values())


def matches(key: str, pattern: str | None) -> bool:
    """Whether a key, with or without its first part, matches a pattern such as ``*.weight``."""
    if pattern is None:
        return True
    return fnmatchcase(key, pattern) or fnmatchcase(key.partition(".")[2], pattern)
