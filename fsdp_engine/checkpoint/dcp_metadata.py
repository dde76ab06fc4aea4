"""DCP's metadata of a checkpoint, ``.metadata``: written with checksums, read without running code.

The metadata is a pickle, which can call any function. Therefore it is read as data
(``inert_pickle.py``), names outside a short list are refused, and every value is validated
(``metadata_records.py``).

Two additions to DCP's content are ignored by other readers:

- an attribute with the checksums of all files (``checksums.py``)
- after the end of the pickle, a seal: the checksum of all preceding bytes

A checkpoint of plain DCP contains neither, and is read without verification.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from fsdp_engine.checkpoint.checksums import BLOCK_BYTES, BlockSummer, DamagedError, FileSums
from fsdp_engine.checkpoint.inert_pickle import RefusedError
from fsdp_engine.checkpoint.metadata_records import SUMS, unpickle_metadata

METADATA = ".metadata"

_SEAL = re.compile(rb"\nfsdp_engine: CRC-32C ([0-9a-f]{8})\n")
_SEAL_BYTES = len(b"\nfsdp_engine: CRC-32C 00000000\n")


def read_metadata(folder: Path, trust: bool = False) -> Metadata:
    """Read DCP's metadata of the checkpoint in ``folder``.

    Args:
        folder: of the checkpoint.
        trust: allow any class and function in the pickle, which may run arbitrary code.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no checkpoint.
        ValueError: the metadata is damaged, or names a class that DCP's metadata does not contain.
    """
    path = folder / METADATA
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"path: expected the folder of a checkpoint; found file {folder}")
    if not path.is_file():
        found = f"a folder without {METADATA}" if folder.exists() else "nothing"
        raise FileNotFoundError(f"path: expected a checkpoint at {folder}; found {found}")
    content = path.read_bytes()
    sealed = _SEAL.fullmatch(content[-_SEAL_BYTES:])
    summer = BlockSummer()
    summer.add(memoryview(content)[:-_SEAL_BYTES])
    if sealed and int(sealed[1], 16) != summer.whole():
        raise DamagedError(f"{path}: expected it as it was written; found it damaged")
    try:
        metadata = unpickle_metadata(content, trust)
    except RefusedError as error:
        raise RefusedError(
            f"{path}: expected DCP's metadata; found a pickle that needs {error}, which could run "
            "code. If you know who wrote it, and trust them, load it with trust=True (--trust)"
        ) from None
    except ValueError as error:
        raise DamagedError(f"{path}: expected DCP's metadata; found it damaged: {error}") from error
    if not sealed and SUMS in vars(metadata):
        raise DamagedError(f"{path}: expected its own checksum at its end; found it damaged")
    return metadata


def add_sums(metadata: Metadata, sums: Mapping[str, FileSums]) -> None:
    """Add checksums of files, by name, to metadata before it is written."""
    files = {name: (each.num_bytes, each.sums) for name, each in sums.items()}
    setattr(metadata, SUMS, {"block_bytes": BLOCK_BYTES, "files": files})


def seal_of(crc: int) -> bytes:
    """Returns the seal for a pickle with checksum ``crc``."""
    return b"\nfsdp_engine: CRC-32C %08x\n" % crc


def file_sums(metadata: Metadata) -> dict[str, FileSums]:
    """Returns checksums of a checkpoint's files, by name; empty if it has no checksums."""
    found = getattr(metadata, SUMS, None)
    if found is None:
        return {}
    return {
        name: FileSums(num_bytes, sums, found["block_bytes"])
        for name, (num_bytes, sums) in found["files"].items()
    }


def check_files(folder: Path, metadata: Metadata, rank: int, num_ranks: int) -> None:
    """Check that files exist, and contain all their entries. The ranks share the work.

    Raises:
        FileNotFoundError: one is missing.
        DamagedError: one is too short, or has another size than was written.
    """
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    sums = file_sums(metadata)
    for name in sorted(ends)[rank::num_ranks]:
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected a file of the checkpoint; found none")
        size = path.stat().st_size
        if name in sums and size != sums[name].num_bytes:
            raise DamagedError(f"{path}: expected {sums[name].num_bytes} bytes; found {size}")
        if size < ends[name]:
            raise DamagedError(f"{path}: expected at least {ends[name]} bytes; found {size}")
