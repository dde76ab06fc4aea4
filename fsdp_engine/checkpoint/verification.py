"""Is every byte of a checkpoint as it was written? And if not, whose byte is it?

The manifest has a checksum for each file. Where one differs, the damage is narrowed down by the
checksums that ``torch.save`` puts beside each tensor (its archives are zip files).
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_engine.checkpoint.dcp_metadata import METADATA, read_metadata
from fsdp_engine.checkpoint.manifest import Manifest, file_row
from fsdp_engine.checkpoint.reader import FileView


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
        ValueError: files that are missing or are not as they were written; all of them are listed,
            with the tensors concerned.
    """
    damages = find_damages(folder, manifest, names, progress)
    if damages:
        raise ValueError(
            f"checkpoint {folder}: expected files as they were written; found {len(damages)} that "
            "are not\n  " + "\n  ".join(damages)
        )


def find_damages(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[str]:
    """A line for each file that is missing or not as it was written. See :func:`verify_files`."""
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
    return damages


def find_damaged_archives(
    folder: Path,
    progress: Callable[[int], None] = lambda num_bytes: None,
    trust: bool = False,
) -> list[str]:
    """A line for each file with entries that differ from the checksums beside them.

    This is all that can be said without a manifest: bytes between entries, and what replaced an
    entry as a whole, go unnoticed.

    Args:
        folder: a checkpoint in DCP format.
        progress: is told the number of bytes as they are read.
        trust: whoever wrote it may run code here.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: its metadata cannot be read.
    """
    places = _places(folder, trust)
    damages: list[str] = []
    for name, entries in places.items():
        if not (folder / name).is_file():
            damages.append(f"{name}: expected a file; found none")
        elif damaged := _find_damaged(folder / name, entries, progress):
            damages.append(f"{name}: {_listed(damaged)}")
    return damages


# The key and the place of an entry.
_Entry = tuple[str, Any]


def _places(folder: Path, trust: bool = False) -> dict[str, list[_Entry]]:
    """What is in each file of a checkpoint."""
    found: dict[str, list[_Entry]] = {}
    for index, place in read_metadata(folder, trust).storage_data.items():
        found.setdefault(place.relative_path, []).append((index.fqn, place))
    return found


def _damaged_entries(folder: Path, name: str) -> str:
    """Which entries of a damaged file are concerned, in words."""
    if name == METADATA:
        return "the list of all entries"
    try:
        entries = _places(folder).get(name, [])
    except (OSError, ValueError) as error:
        return f"entries unknown, because {METADATA} cannot be read ({type(error).__name__})"
    damaged = _find_damaged(folder / name, entries)
    return _listed(damaged) if damaged else "no tensor is concerned (padding between them)"


def _find_damaged(
    path: Path, entries: Iterable[_Entry], progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Keys of the entries of a file whose checksums are not those of their bytes."""
    damaged: dict[str, None] = {}
    with open(path, "rb") as file:
        for key, place in entries:
            try:
                with zipfile.ZipFile(FileView(file, place.offset, place.length)) as archive:
                    is_whole = archive.testzip() is None
            except Exception:  # whatever damaged headers make of it; one bit reads "encrypted"
                is_whole = False
            if not is_whole:
                damaged[key] = None
            progress(place.length)
    return list(damaged)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"damaged are {', '.join(names[:8])}{more}"
