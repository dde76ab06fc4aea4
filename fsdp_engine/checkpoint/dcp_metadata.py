"""DCP's metadata of a checkpoint, ``.metadata``: written with sums, read without running code.

It is a pickle. What it may contain is a short list of classes, and anything else is refused by its
name, because a pickle can call whatever it names.

Two things are added to what DCP writes, and other readers notice neither:

- an attribute with the checksums of all files (``checksums.py``)
- behind the end of the pickle, where no reader looks, a seal: the checksum of all before it

A checkpoint that plain DCP has written has neither, and is read without checks.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_engine.checkpoint.checksums import BLOCK_BYTES, BlockSummer, DamagedError, FileSums

METADATA = ".metadata"

_SUMS = "fsdp_engine_sums"
_SEAL = re.compile(rb"\nfsdp_engine: CRC-32C ([0-9a-f]{8})\n")
_SEAL_BYTES = len(b"\nfsdp_engine: CRC-32C 00000000\n")

# What a pickle of DCP's metadata may name, besides dtypes and paths.
_CLASSES = (
    dcp_metadata.BytesStorageMetadata,
    dcp_metadata.ChunkStorageMetadata,
    dcp_metadata.Metadata,
    dcp_metadata.MetadataIndex,
    dcp_metadata.StorageMeta,
    dcp_metadata.TensorProperties,
    dcp_metadata.TensorStorageMetadata,
    dcp_metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    collections.OrderedDict,
    torch.Size,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(each.__module__, each.__qualname__): each for each in _CLASSES},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
_ALLOWED |= {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
# Where a checkpoint was saved, as a path of any system and any version of Python.
_ALLOWED |= {
    (module, name): pathlib.PurePosixPath if "Posix" in name else pathlib.PureWindowsPath
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}


class RefusedError(ValueError):
    """A pickle names something that could run code."""


class _Unpickler(pickle.Unpickler):
    """Knows what a pickle of DCP's metadata may name."""

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for, if it is harmless."""
        if (module, name) not in _ALLOWED:
            raise RefusedError(f"{module}.{name}")
        return _ALLOWED[module, name]


def read_metadata(folder: Path, trust: bool = False) -> Metadata:
    """DCP's metadata of the checkpoint in ``folder``.

    Args:
        folder: that of the checkpoint.
        trust: whoever wrote it may run code here: the pickle may name anything.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        ValueError: it is damaged, or names what DCP's metadata does not contain.
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
        found = _unpickle(content, trust)
    except RefusedError as error:
        raise RefusedError(
            f"{path}: expected DCP's metadata; found a pickle that needs {error}, which could run "
            "code. If you know who wrote it, and trust them, load it with trust=True (--trust)"
        ) from None
    except Exception as error:  # unpickling raises whatever the bytes make it do
        raise DamagedError(
            f"{path}: expected DCP's metadata; found it damaged ({error!r})"
        ) from error
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise DamagedError(f"{path}: expected DCP's metadata; found a {type(found).__name__}")
    if not sealed and _SUMS in vars(found):
        raise DamagedError(f"{path}: expected its own checksum at its end; found it damaged")
    return found


def _unpickle(content: bytes, trust: bool) -> Any:
    if trust:
        return pickle.loads(content)
    # A pickle may also set attributes, even those of a class that it names.
    before = [dict(vars(each)) for each in _CLASSES]
    found = _Unpickler(io.BytesIO(content)).load()
    for each, attributes in zip(_CLASSES, before, strict=True):
        if dict(vars(each)) != attributes:
            for name in vars(each).keys() - attributes.keys():
                delattr(each, name)
            for name, value in attributes.items():
                if vars(each).get(name) is not value:
                    setattr(each, name, value)
            raise RefusedError(f"to change {each.__module__}.{each.__qualname__}")
    return found


def add_sums(metadata: Metadata, sums: Mapping[str, FileSums]) -> None:
    """Put checksums of files, by name, into metadata that is to be written."""
    files = {name: (each.num_bytes, each.sums) for name, each in sums.items()}
    setattr(metadata, _SUMS, {"block_bytes": BLOCK_BYTES, "files": files})


def seal_of(crc: int) -> bytes:
    """What goes behind the pickle, of whose sums ``crc`` is the sum."""
    return b"\nfsdp_engine: CRC-32C %08x\n" % crc


def file_sums(metadata: Metadata) -> dict[str, FileSums]:
    """Checksums of a checkpoint's files, by name; of none where it has no sums."""
    found = getattr(metadata, _SUMS, None)
    if found is None:
        return {}
    block_bytes = found["block_bytes"]
    return {
        name: FileSums(num_bytes, sums, block_bytes)
        for name, (num_bytes, sums) in found["files"].items()
    }


def check_files(folder: Path, metadata: Metadata, rank: int, num_ranks: int) -> None:
    """Whether files are there, and long enough for what shall be in them. Ranks share the work.

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
