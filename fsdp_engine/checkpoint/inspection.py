"""Describes the contents of a checkpoint. Prints nothing."""

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

# Maximum number of an optimizer's groups that are described.
MAX_GROUPS = 16
# Larger objects are not read.
MAX_OBJECT_BYTES = 16 << 20

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a dotted name


@dataclasses.dataclass
class SectionRow:
    """Numbers of tensors, their elements and bytes, and of other objects in a section."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    objects: int = 0


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """A param group of an optimizer: number of parameters, and hyperparameters."""

    number: str
    parameters: int
    hyperparameters: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Description:
    """Contents of a checkpoint. Values that it does not contain are None.

    Attributes:
        path: its folder.
        step, world_size, mesh, strategy, libraries: from the manifest.
        saved_at: time of completion, in ISO 8601.
        trainable_only: it was saved without frozen parameters.
        num_files, num_bytes: of existing files.
        missing_files, stray_files: files that do not exist, and files that do not belong to it.
        sections: tensors and objects by section: model (with buffers, and a tied weight under each
            of its names), optimizer, extra, ranks, and "other".
        optimizer: name of its class.
        groups: the first ``MAX_GROUPS`` groups of the optimizer, of ``num_groups``.
        extra: the ``extra`` of rank 0 by name, shortened.
        num_ranks: number of ranks that have saved random states and ``extra``.
        tensors: a row for each tensor.
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
    """Describe a checkpoint. Reads no tensors except 0-d ones of the optimizer's groups."""
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
    """Size of a tensor in bytes."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize


def shorten(value: Any, length: int = 100) -> str:
    """Format a value in one line of at most ``length`` characters."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = f"{value.item()!r} ({dtype})" if value.numel() == 1 else f"{dtype} {[*value.shape]}"
        return str(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _groups(checkpoint: StoredCheckpoint) -> tuple[list[GroupRow], int]:
    """The first groups of the optimizer, and the number of groups."""
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
            elif len(saved.paths[key]) > 4:  # an entry for each name
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
    """The user's ``extra``, by name."""
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
    """Format a value, or the reason why it cannot be read."""
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
    """Tensors of one shape and dtype whose names differ only in numbers.

    Attributes:
        name: with a star for each number.
        count: number of tensors.
        shape: of each tensor.
        dtype: of each tensor.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str


def group_tensors(rows: Iterable[TensorRow]) -> list[TensorGroup]:
    """Group rows such as ``blocks.0.weight`` and ``blocks.1.weight``, in order of the first."""
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
    """Whether a key, with or without its section, matches a pattern such as ``*.weight``."""
    if pattern is None:
        return True
    return fnmatchcase(key, pattern) or fnmatchcase(key.partition(".")[2], pattern)
