"""Reads and verifies checkpoints without an engine, in one process without a process group.

A path is the folder of a checkpoint of the engine or of ``torch.distributed.checkpoint``, or the
directory of a ``Checkpointer``, whose latest checkpoint is used by default. No function prints or
changes anything.

Metadata and objects are pickles. Unless ``trust`` is set, they are read without running code.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fsdp_engine.checkpoint.dcp_metadata import METADATA, file_sums, read_metadata
from fsdp_engine.checkpoint.directory import CheckpointDirectory, directories_below
from fsdp_engine.checkpoint.folder import read_entries
from fsdp_engine.checkpoint.inert_pickle import read_object
from fsdp_engine.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    NewerFormatError,
    TensorRow,
    tensor_rows,
)
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    EXTRA_TENSORS,
    MODEL,
    OPTIMIZER,
    RANKS,
    Saved,
)
from fsdp_engine.checkpoint.reader import Reader, find_damages, find_damages_without_manifest
from fsdp_engine.checkpoint.run_state import unpack

OTHER = "other"
# Checkpoints of trainers contain the sharded state in this subfolder.
TRAINER_SUBFOLDER = "fsdp_engine"
_TRAINER_FOLDER = re.compile(r"checkpoint[-_](\d+)")
# The section of an entry by the first component of its key.
_SECTIONS = {name: name for name in (MODEL, OPTIMIZER, EXTRA, RANKS)} | {EXTRA_TENSORS: EXTRA}


def find_folders(
    path: Path, step: int | None = None, *, every: bool = False, broken: bool = False
) -> list[Path]:
    """Find the folders of checkpoints at a path.

    Args:
        path: The path of a checkpoint, or of a directory of checkpoints. The checkpoints may be
            those of a trainer (``checkpoint-<step>``).
        step: The step of a checkpoint in a directory. None: the latest step.
        every: Find all checkpoints, unless ``step`` is given.
        broken: Also find checkpoints whose manifest is missing.

    Raises:
        FileNotFoundError: There is no checkpoint, or none of that step.
        NotADirectoryError: The path is a file.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"path: expected the folder of a checkpoint; found the file {path}"
        )
    if not path.exists():
        raise FileNotFoundError(f"path: expected a checkpoint at {path}; found nothing")
    if (of_trainer := _of_trainer(path)) is not None:
        _check_step(of_trainer, step)
        return [of_trainer]
    is_one = (path / MANIFEST).is_file() or (path / METADATA).is_file()
    if is_one or (broken and _has_lost_manifest(path)):
        _check_step(path, step)
        return [path]
    directory = CheckpointDirectory(path)
    complete = directory.complete() or _folders_of_trainer(path)
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
            f"nor {METADATA} in {path}, and no complete step-... in it{directories_below(path)}"
        )
    return [*list(complete.values())[0 if every else -1 :], *incomplete]


def _of_trainer(folder: Path) -> Path | None:
    """Returns the folder of the sharded state within a trainer's checkpoint."""
    state = folder / TRAINER_SUBFOLDER
    return state if (state / METADATA).is_file() else None


def _folders_of_trainer(path: Path) -> dict[int, Path]:
    """Returns the folders of the sharded state within a trainer's directory by step, ascending."""
    found = {}
    for folder in path.iterdir():
        name, state = _TRAINER_FOLDER.fullmatch(folder.name), _of_trainer(folder)
        if name is not None and state is not None:
            found[int(name[1])] = state
    return dict(sorted(found.items()))


def _check_step(folder: Path, step: int | None) -> None:
    """Check that a single checkpoint has the given step."""
    if step is None:
        return
    found = step_of(folder, Manifest.read(folder) if (folder / MANIFEST).is_file() else None)
    if found != step:
        what = "an unknown one" if found is None else found
        raise FileNotFoundError(f"step: expected step {step} at {folder}; found {what}")


def step_of(folder: Path, manifest: Manifest | None) -> int | None:
    """Returns the step of a checkpoint; None if it is unknown.

    A trainer's checkpoint has no manifest: the name of its folder contains the step.

    Args:
        folder: The folder of the checkpoint.
        manifest: Its manifest, if it has one.
    """
    if manifest is not None:
        return manifest.step
    folder = folder.resolve()
    # In accelerate's names, "checkpoint_3", the number counts saves.
    name = re.fullmatch(r"checkpoint-(\d+)", folder.parent.name)
    return int(name[1]) if name is not None and folder.name == TRAINER_SUBFOLDER else None


class StoredCheckpoint:
    """A checkpoint on disk, of this engine or of DCP.

    Args:
        folder: The folder of the checkpoint.
        trust: Allow objects of any class, which may run arbitrary code.

    Attributes:
        folder: The folder of the checkpoint.
        manifest: The manifest; None for a plain checkpoint of DCP.
        saved: The keys of the checkpoint.
        metadata: The metadata of DCP.

    Raises:
        FileNotFoundError, NotADirectoryError: There is no checkpoint.
        ValueError: The manifest or the metadata are damaged.
        NewerFormatError: The format of the checkpoint is newer than this code.
    """

    def __init__(self, folder: Path, trust: bool = False) -> None:
        self.folder = folder
        self.trust = trust
        has_manifest = (folder / MANIFEST).is_file()
        self.manifest = Manifest.read(folder) if has_manifest else None
        self.metadata = read_metadata(folder, trust)
        self.saved = Saved(self.metadata)

    @property
    def step(self) -> int | None:
        """The step; None if it is unknown."""
        return step_of(self.folder, self.manifest)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.folder, self.metadata)

    @cached_property
    def tensors(self) -> dict[str, TensorRow]:
        """All tensors by key."""
        return {row.name: row for row in tensor_rows(self.metadata)}

    @cached_property
    def objects(self) -> list[str]:
        """The keys of all entries that are not tensors."""
        return [key for key in self.saved.entries if key not in self.tensors]

    def section(self, key: str) -> str:
        """Returns the section of an entry."""
        first = str(self.saved.paths[key][0])
        return _SECTIONS.get(first, OTHER)

    def object_bytes(self, key: str) -> int:
        """Returns the stored size of an object in bytes."""
        return int(self._place(key).length)

    def read_object(self, key: str) -> bytes:
        """Returns the stored bytes of an object, in the format of ``torch.load``.

        Raises:
            FileNotFoundError: The file of the object is missing.
            ValueError: The file is too short or damaged.
        """
        return self._reader.read_object(key)

    def read_value(self, key: str) -> Any:
        """Read an entry: a tensor, on the CPU, or an object. Objects that were serialized by
        :func:`.pack` are deserialized.

        Raises:
            FileNotFoundError: The file of the entry is missing.
            ValueError: The object cannot be read, or is of a class that could run code.
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
        """Returns the names of the checkpoint's files."""
        return _files(self.manifest, self.metadata)

    def saved_at(self) -> datetime:
        """Returns the time at which the checkpoint was completed, in local time."""
        name = METADATA if self.manifest is None else MANIFEST
        return datetime.fromtimestamp((self.folder / name).stat().st_mtime).astimezone()

    def _place(self, key: str) -> Any:
        return self.metadata.storage_data[MetadataIndex(key)]


@dataclass(frozen=True)
class Verdict:
    """The result of the verification of a checkpoint.

    Attributes:
        folder: The folder of the checkpoint.
        step: The step; None if the checkpoint does not contain it.
        has_checksums: Whether every byte was verified, by checksums in the manifest or in the
            metadata. False: only the bytes within entries were verified.
        num_files, num_bytes: The number and the total bytes of existing files.
        damages: A line for each file that is missing or damaged, with the damaged entries.
        strays: Names of other files in the folder.
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
    """Verify the checksums of all files in the manifest of a checkpoint. Without a manifest, verify
    those in the metadata, or else those that are stored with the entries.

    Args:
        folder: The folder of a checkpoint; see :func:`find_folders`.
        progress: Function that is called with the number of bytes of each read.
        trust: Allow objects of any class, which may run arbitrary code.

    Raises:
        NewerFormatError: The format of the checkpoint is newer than this code.
        OSError: The folder or a file cannot be read.
    """
    damages: list[str] = []
    manifest: Manifest | None = None
    files: set[str] | None = None
    has_checksums = False
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
        has_checksums = True
        damages += find_damages(folder, manifest, None, progress)
    else:
        try:
            metadata = read_metadata(folder, trust)
            has_checksums = bool(file_sums(metadata))
            files = {MANIFEST, *_files(None, metadata)}
            damages += find_damages_without_manifest(folder, metadata, progress)
        except (FileNotFoundError, ValueError) as error:
            damages.append(str(error).removeprefix(f"{folder}/"))
    num_files, num_bytes = count_files(folder, files)
    return Verdict(
        folder=folder,
        step=step_of(folder, manifest),
        has_checksums=has_checksums,
        num_files=num_files,
        num_bytes=num_bytes,
        damages=damages,
        strays=[] if files is None else stray_files(folder, files),
    )


def count_files(folder: Path, names: set[str] | None = None) -> tuple[int, int]:
    """Returns the number and the total bytes of files in a folder.

    Args:
        folder: The folder of a checkpoint.
        names: The names of the files to count; None: all files.
    """
    sizes = [
        path.stat().st_size
        for path in folder.iterdir()
        if path.is_file() and (names is None or path.name in names)
    ]
    return len(sizes), sum(sizes)


def stray_files(folder: Path, names: set[str]) -> list[str]:
    """Returns the names in a folder that are not in ``names``."""
    return sorted(path.name for path in folder.iterdir() if path.name not in names)


def _has_lost_manifest(folder: Path) -> bool:
    """Returns whether a folder without a manifest was probably written by a ``Checkpointer``."""
    folder = folder.resolve()
    if folder not in CheckpointDirectory(folder.parent).incomplete():
        return False
    try:  # folders of other programs may have such names, but contain no entries of ranks
        return bool(Saved(read_metadata(folder)).below(RANKS))
    except (OSError, ValueError):
        return True


def _files(manifest: Manifest | None, metadata: Metadata | None) -> set[str]:
    """Returns the names of a checkpoint's files."""
    if manifest is not None:
        return {MANIFEST, *manifest.files}
    places = (metadata.storage_data if metadata is not None else None) or {}
    return {METADATA, *(place.relative_path for place in places.values())}
