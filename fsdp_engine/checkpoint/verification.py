"""Is every byte of a checkpoint as it was written? And if not, whose byte is it?

The manifest has a checksum for each file. Where one differs, the damage is narrowed down by the
checksums that ``torch.save`` puts beside each tensor (its archives are zip files).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch.distributed import checkpoint as dcp

from fsdp_engine.checkpoint.manifest import Manifest, file_row
from fsdp_engine.checkpoint.storage import METADATA, FileView


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Whether these files are there, and as long as they were written.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: one has another size.
    """
    for name in names:
        path, expected = folder / name, manifest.files[name].bytes
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected a file of {expected} bytes; found none")
        if (found := path.stat().st_size) != expected:
            raise ValueError(f"{path}: expected {expected} bytes; found {found}")


def verify_files(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read files and compare them with the manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        names: files; None: all of them.
        progress: is told the number of bytes as they are read.

    Raises:
        FileNotFoundError, ValueError: files that are missing or are not as they were written; all
            of them are listed, with the tensors concerned.
    """
    damages: list[str] = []
    names = manifest.files if names is None else names
    for name in names:
        path, expected = folder / name, manifest.files[name]
        if not path.is_file():
            damages.append(f"{name}: expected a file of {expected.bytes} bytes; found none")
            continue
        found = file_row(path, progress)
        if found != expected:
            damages.append(
                f"{name}: expected {expected.bytes} bytes with checksum {expected.crc32}; found "
                f"{found.bytes} with {found.crc32}: {_damaged_entries(folder, name)}"
            )
    if damages:
        raise ValueError(
            f"checkpoint {folder}: expected files as they were written; found {len(damages)} that "
            "are not\n  " + "\n  ".join(damages)
        )


def _damaged_entries(folder: Path, name: str) -> str:
    """Which entries of a damaged file are concerned, in words."""
    if name == METADATA:
        return "the list of all entries"
    try:
        places: dict[Any, Any] = dcp.FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:
        return f"entries unknown, because {METADATA} cannot be read ({type(error).__name__})"
    damaged: dict[str, None] = {}
    with open(folder / name, "rb") as file:
        for index, place in places.items():
            if place.relative_path != name:
                continue
            try:
                with zipfile.ZipFile(FileView(file, place.offset, place.length)) as entry:
                    is_whole = entry.testzip() is None
            except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError):
                is_whole = False
            if not is_whole:
                damaged[index.fqn] = None
    if not damaged:
        return "no tensor is concerned (padding between them)"
    names = list(damaged)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"damaged are {', '.join(names[:8])}{more}"
