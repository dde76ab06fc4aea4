"""Verifies the checksums of a checkpoint's files, and locates damage.

The manifest contains a checksum of each file. If one differs, the damaged entries are found by the
checksums that ``torch.save`` stores with each tensor (its archives are zip files).
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
    """Check that files exist, and have the sizes in the manifest.

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
    """Read files and compare their checksums with the manifest.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        names: files; None: all of them.
        progress: called with the number of bytes of each read.

    Raises:
        ValueError: files are missing or damaged; all of them are listed, with the damaged tensors.
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
    """Returns a line for each file that is missing or damaged. See :func:`verify_files`."""
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
    """Returns a line for each file with entries that differ from the checksums stored with them.

    For checkpoints without a manifest. Damaged bytes between entries, and entries that were
    replaced as a whole, are not detected.

    Args:
        folder: a checkpoint in DCP format.
        progress: called with the number of bytes of each read.
        trust: allow objects of any class in its metadata, which may run arbitrary code.

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


# Key of an entry, and its location in a file.
_Entry = tuple[str, Any]


def _places(folder: Path, trust: bool = False) -> dict[str, list[_Entry]]:
    """Entries by file."""
    found: dict[str, list[_Entry]] = {}
    for index, place in read_metadata(folder, trust).storage_data.items():
        found.setdefault(place.relative_path, []).append((index.fqn, place))
    return found


def _damaged_entries(folder: Path, name: str) -> str:
    """Describe the damaged entries of a file."""
    if name == METADATA:
        return "the list of all entries"
    try:
        entries = _places(folder).get(name, [])
    except (OSError, ValueError) as error:
        return f"entries unknown, because {METADATA} cannot be read ({type(error).__name__})"
    damaged = _find_damaged(folder / name, entries)
    return _listed(damaged) if damaged else "no tensor is damaged (padding between them)"


def _find_damaged(
    path: Path, entries: Iterable[_Entry], progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Keys of the entries of a file whose checksums differ."""
    damaged: dict[str, None] = {}
    with open(path, "rb") as file:
        for key, place in entries:
            try:
                with zipfile.ZipFile(FileView(file, place.offset, place.length)) as archive:
                    is_whole = archive.testzip() is None
            except Exception:  # damaged headers raise errors of any type
                is_whole = False
            if not is_whole:
                damaged[key] = None
            progress(place.length)
    return list(damaged)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"damaged are {', '.join(names[:8])}{more}"
