"""Checkpoints without an engine: what is in one, and is it whole? One process, no process group.

A path may be the folder of a checkpoint, with a manifest or a plain one of
``torch.distributed.checkpoint``; or a directory of a ``Checkpointer``, which stands for its latest
checkpoint. Nothing is printed here, and nothing is changed.

Metadata and objects are pickles, which are read so that they cannot run code.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.directory import CheckpointDirectory
from fsdp_engine.checkpoint.folder import read_entries
from fsdp_engine.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    TensorRow,
    tensor_rows,
)
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    RANKS,
    Saved,
)
from fsdp_engine.checkpoint.objects import read_object
from fsdp_engine.checkpoint.reader import Reader
from fsdp_engine.checkpoint.run_state import unpack
from fsdp_engine.checkpoint.verification import find_damaged_archives, find_damages

OTHER = "other"
_SECTIONS = (MODEL, OPTIMIZER, EXTRA, RANKS)


def find_folders(
    path: Path, step: int | None = None, *, every: bool = False, broken: bool = False
) -> list[Path]:
    """Folders of the checkpoints that a path stands for.

    Args:
        path: of a checkpoint, or of a directory of checkpoints.
        step: which of a directory's; None: the latest.
        every: all of them, unless ``step`` is given.
        broken: besides, those that have lost their manifest.

    Raises:
        FileNotFoundError: there is none, or not that step.
        NotADirectoryError: the path is a file.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"path: expected the folder of a checkpoint; found the file {path}"
        )
    if not path.exists():
        raise FileNotFoundError(f"path: expected a checkpoint at {path}; found nothing")
    is_one = (path / MANIFEST).is_file() or (path / METADATA).is_file()
    if is_one or (broken and _has_lost_manifest(path)):
        _check_step(path, step)
        return [path]
    directory = CheckpointDirectory(path)
    complete = directory.complete()
    incomplete = directory.incomplete() if broken and step is None else []
    if step is not None:
        if step not in complete:
            found = f"those of steps {list(complete)}" if complete else "none"
            raise FileNotFoundError(
                f"step: expected the complete checkpoint of step {step} in {path}; found {found}"
            )
        return [complete[step]]
    if not complete and not incomplete:
        raise FileNotFoundError(
            f"path: expected a checkpoint, or a directory of checkpoints; found neither {MANIFEST} "
            f"nor {METADATA} in {path}, and no complete step-... below it"
        )
    return [*list(complete.values())[0 if every else -1 :], *incomplete]


def _check_step(folder: Path, step: int | None) -> None:
    """Whether a single checkpoint is that of a step."""
    if step is None:
        return
    found = Manifest.read(folder).step if (folder / MANIFEST).is_file() else "an unknown one"
    if found != step:
        raise FileNotFoundError(f"step: expected step {step} at {folder}; found {found}")


class StoredCheckpoint:
    """A checkpoint on disk, whatever wrote it.

    Args:
        folder: that of the checkpoint itself.
        trust: whoever wrote it may run code here: its objects may be of any class.

    Attributes:
        folder: as given.
        manifest: what it says about itself; None for a plain one.
        saved: its keys.
        metadata: DCP's.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: manifest or metadata are damaged.
        NewerFormatError: this code is too old for it.
    """

    def __init__(self, folder: Path, trust: bool = False) -> None:
        self.folder = folder
        self.trust = trust
        has_manifest = (folder / MANIFEST).is_file()
        self.manifest = Manifest.read(folder) if has_manifest else None
        self.metadata = read_metadata(folder, trust)
        self.saved = Saved(self.metadata)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.folder, self.metadata)

    @cached_property
    def tensors(self) -> dict[str, TensorRow]:
        """All tensors by key."""
        return {row.name: row for row in tensor_rows(self.metadata)}

    @cached_property
    def objects(self) -> list[str]:
        """Keys of everything else."""
        return [key for key in self.saved.entries if key not in self.tensors]

    def section(self, key: str) -> str:
        """Which part of a checkpoint an entry belongs to."""
        first = str(self.saved.paths[key][0])
        return first if first in _SECTIONS else OTHER

    def object_bytes(self, key: str) -> int:
        """Size of an object as it is stored."""
        return int(self._place(key).length)

    def read_object(self, key: str) -> bytes:
        """An object as it is stored, which ``torch.load`` reads.

        Raises:
            FileNotFoundError: its file is missing.
            ValueError: its file is too short, or damaged.
        """
        return self._reader.read_object(key)

    def read_value(self, key: str) -> Any:
        """An object, or a tensor on the CPU; what is packed in bytes is unpacked.

        Raises:
            FileNotFoundError: see :meth:`read_object`.
            ValueError: it cannot be read, or is of a class that could run code.
        """
        if key in self.tensors:
            targets = {key: self.saved.empty(key)}
            read_entries(self.folder, self.metadata, targets)
            return targets[key]
        where = f"{self.folder}: {key}"
        value = read_object(io.BytesIO(self.read_object(key)), where, self.trust)
        is_packed = isinstance(value, bytes) and self.section(key) in (EXTRA, RANKS)
        return unpack(value, where, self.trust) if is_packed else value

    def files(self) -> set[str]:
        """Names of its files."""
        return _files(self.manifest, self.metadata)

    def saved_at(self) -> datetime:
        """When it was complete, in local time."""
        name = METADATA if self.manifest is None else MANIFEST
        return datetime.fromtimestamp((self.folder / name).stat().st_mtime).astimezone()

    def _place(self, key: str) -> Any:
        return self.metadata.storage_data[MetadataIndex(key)]


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is as it was written.

    Attributes:
        folder: the checkpoint.
        step: None where it does not say.
        has_checksums: whether every byte was compared; False: only what is within entries.
        num_files, num_bytes: that are there.
        damages: a line for each file that is missing or damaged, with the entries concerned.
        strays: names of what else is in its folder.
    """

    folder: Path
    step: int | None
    has_checksums: bool
    num_files: int
    num_bytes: int
    damages: list[str]
    strays: list[str]


def verify(
    folder: Path,
    progress: Callable[[int], None] = lambda num_bytes: None,
    trust: bool = False,
) -> Verdict:
    """Read every byte of a checkpoint, and compare it with the checksums that there are.

    Args:
        folder: of a checkpoint, see :func:`find_folders`.
        progress: is told the number of bytes as they are read.
        trust: whoever wrote it may run code here.

    Raises:
        NewerFormatError: this code is too old for it.
        OSError: it cannot be read.
    """
    damages: list[str] = []
    manifest: Manifest | None = None
    files: set[str] | None = None
    if (folder / MANIFEST).is_file():
        try:
            manifest = Manifest.read(folder)
        except NewerFormatError:
            raise
        except ValueError as error:
            damages.append(str(error).removeprefix(f"{folder}/"))
    elif _has_lost_manifest(folder):
        damages.append(f"{MANIFEST}: expected the manifest of {folder.name}; found none")
    if manifest is not None:
        files = _files(manifest, None)
        damages += find_damages(folder, manifest, None, progress)
    else:
        try:
            files = {MANIFEST, *_files(None, read_metadata(folder, trust))}
            damages += find_damaged_archives(folder, progress, trust)
        except (FileNotFoundError, ValueError) as error:
            damages.append(str(error).removeprefix(f"{folder}/"))
    num_files, num_bytes = count_files(folder, files)
    return Verdict(
        folder=folder,
        step=None if manifest is None else manifest.step,
        has_checksums=manifest is not None,
        num_files=num_files,
        num_bytes=num_bytes,
        damages=damages,
        strays=[] if files is None else stray_files(folder, files),
    )


def count_files(folder: Path, names: set[str] | None = None) -> tuple[int, int]:
    """How many of these files are in a folder, and their bytes. None: all files."""
    sizes = [
        path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and (names is None or path.name in names)
    ]
    return len(sizes), sum(sizes)


def stray_files(folder: Path, names: set[str]) -> list[str]:
    """What is in a folder besides these files."""
    return sorted(path.name for path in folder.iterdir() if path.name not in names)


def _has_lost_manifest(folder: Path) -> bool:
    """Whether a folder without a manifest looks like one that a ``Checkpointer`` has written."""
    folder = folder.resolve()
    if folder not in CheckpointDirectory(folder.parent).incomplete():
        return False
    try:  # others may name their folders so, but have no entries of ranks
        return bool(Saved(read_metadata(folder)).below(RANKS))
    except (OSError, ValueError):
        return True


def _files(manifest: Manifest | None, metadata: Metadata | None) -> set[str]:
    """Names of a checkpoint's files."""
    if manifest is not None:
        return {MANIFEST, *manifest.files}
    places = (metadata.storage_data if metadata is not None else None) or {}
    return {METADATA, *(place.relative_path for place in places.values())}
