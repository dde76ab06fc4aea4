"""Reads and writes the manifest of a checkpoint, in JSON: properties of the save, tensors, files.

    {
      "crc32": "8f0c2ad1", "format_version": 1,
      "step": 200, "world_size": 8, "mesh": {"outer": 2, "inner": 4},
      "strategy": {"inner": "optim_grads_params", "outer": "no_shard"},
      "libraries": {"fsdp_engine": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
      "tensors": [{"name": "model.head.weight", "shape": [256, 384], "dtype": "float32"}, ...],
      "files": {"__shards_0_0.distcp": {"bytes": 1048576, "crc32": "1c291ca3"}, ...}
    }

The manifest of a checkpoint without frozen parameters contains ``"trainable_only": true`` and has
format version 2. It has version 3 if ``extra`` contains sharded tensors, or if there is a
``"stage"``, the pipeline stage of the model (``stage_place.py``). It has version 4 if there are
tied weights: ``"ties": {"head.weight": "embedding.weight"}`` maps further names to first names.

The manifest is written last. The checksum of a file detects changes after the write: CRC-32 detects
all bursts of up to 32 bits, and misses one in four billion other changes. It does not protect
against intentional changes. The manifest's own checksum is that of its text with eight zeros in
place of the checksum.
"""

from __future__ import annotations

import json
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_engine.checkpoint.model_state import EXTRA_TENSORS

MANIFEST = "manifest.json"
# The newest format that this code reads. Older code refuses a format with a higher number.
FORMAT_VERSION = 4
_OF_EXTRA_OR_STAGE, _OF_TRAINABLE, _OF_WHOLE_MODELS = 3, 2, 1

_BLOCK_BYTES = 1 << 20
_NO_CRC = "0" * 8
# The temporary name of the metadata file. In checkpoints of a single process, the first version of
# the engine also listed the file under this name.
_RENAMED = ".metadata.tmp"


class NewerFormatError(ValueError):
    """A newer version of the engine wrote the checkpoint."""


@dataclass(frozen=True)
class FileRow:
    """A file of a checkpoint: its size in bytes, and its CRC-32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class TensorRow:
    """A tensor of a checkpoint: its key, shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """The values in the manifest of a checkpoint; see the module docstring."""

    step: int
    world_size: int
    mesh: dict[str, int]
    strategy: dict[str, str]
    tensors: tuple[TensorRow, ...]
    files: dict[str, FileRow]
    libraries: dict[str, str]
    trainable_only: bool = False
    stage: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write and sync the manifest in ``folder``."""
        values = asdict(self)
        if not self.trainable_only:
            del values["trainable_only"]
        version = _OF_TRAINABLE if self.trainable_only else _OF_WHOLE_MODELS
        if not self.stage:
            del values["stage"]
        if not self.ties:
            del values["ties"]
        if self.stage or any(row.name.startswith(f"{EXTRA_TENSORS}.") for row in self.tensors):
            version = _OF_EXTRA_OR_STAGE
        if self.ties:
            version = FORMAT_VERSION
        text = json.dumps({"crc32": _NO_CRC, "format_version": version, **values}, indent=1)
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            file.write(text.replace(_NO_CRC, _crc_of(text), 1))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest in ``folder``.

        Raises:
            FileNotFoundError: There is no manifest.
            ValueError: The manifest is damaged.
            NewerFormatError: The format is newer than this code.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"path: expected {MANIFEST} in {folder}; found none")
        try:
            text = path.read_text(encoding="utf-8")
            values: dict[str, Any] = json.loads(text)
            crc, version = values.pop("crc32"), values.pop("format_version")
            if version > FORMAT_VERSION:
                library = values.get("libraries", {}).get("fsdp_engine", "?")
                raise NewerFormatError(
                    f"{path}: expected format version {FORMAT_VERSION} or older; found {version} "
                    f"(saved by fsdp_engine {library})"
                )
            if (found := _crc_of(text.replace(crc, _NO_CRC, 1))) != crc:
                raise ValueError(f"expected checksum {crc}; found {found}")
            rows = values["tensors"]
            tensors = tuple(TensorRow(r["name"], tuple(r["shape"]), r["dtype"]) for r in rows)
            files = {name: FileRow(**row) for name, row in values["files"].items()}
            files.pop(_RENAMED, None)
            manifest = cls(**{**values, "tensors": tensors, "files": files})
            manifest._check_values()
            return manifest
        except NewerFormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            is_known = type(error) is ValueError
            reason = error if is_known else f"expected the values of a manifest; found {error!r}"
            raise ValueError(f"{path}: {reason}") from error

    def _check_values(self) -> None:
        """Check that values have the declared types.

        Raises:
            ValueError: A value has another type, or a file is outside the checkpoint's folder.
        """
        are_right = {
            "step": type(self.step) is int,
            "world_size": type(self.world_size) is int,
            "mesh": _is_dict_of(self.mesh, int),
            "strategy": _is_dict_of(self.strategy, str),
            "libraries": _is_dict_of(self.libraries, str),
            "stage": _is_dict_of(self.stage, str),
            "ties": _is_dict_of(self.ties, str),
            "trainable_only": type(self.trainable_only) is bool,
            "tensors": all(
                type(row.name) is str
                and type(getattr(torch, str(row.dtype), None)) is torch.dtype
                and all(type(size) is int and size >= 0 for size in row.shape)
                for row in self.tensors
            ),
            "files": all(
                type(row.bytes) is int and row.bytes >= 0 and type(row.crc32) is str
                for row in self.files.values()
            ),
        }
        for name in self.files:
            check_file_name(name, "a file")
        if wrong := [name for name, is_right in are_right.items() if not is_right]:
            raise ValueError(
                f"expected values of the types that a manifest declares; found other types for "
                f"{', '.join(wrong)}"
            )


def check_file_name(name: str, where: str) -> str:
    """Returns ``name`` if it names a file within the checkpoint's folder.

    Raises:
        ValueError: The name is absolute, outside of the folder, or empty.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{where}: expected a file in the checkpoint's folder; found {name!r}")
    return name


def _is_dict_of(value: Any, kind: type) -> bool:
    return type(value) is dict and all(type(each) is kind for each in value.values())


def tensor_rows(saved: Metadata) -> tuple[TensorRow, ...]:
    """Returns a row for each tensor of a checkpoint's metadata."""
    return tuple(
        TensorRow(name, tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in saved.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    )


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that write a checkpoint."""
    try:
        own = metadata.version("fsdp_engine")
    except metadata.PackageNotFoundError:
        own = "not installed"  # imported from its source folder
    return {
        "fsdp_engine": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _crc_of(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def file_row(path: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> FileRow:
    """Compute the size and checksum of a file. Calls ``progress`` with the bytes of each read."""
    size = crc = 0
    for block in _blocks(path):
        size += len(block)
        crc = zlib.crc32(block, crc)
        progress(len(block))
    return FileRow(size, f"{crc:08x}")


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
