"""Writes DCP's metadata of a checkpoint, ``.metadata``, with checksums, and reads it without
running code.

The metadata is a pickle, which can call any function. Therefore it is read as data
(``inert_pickle.py``), and names outside a short list are refused. Every value is validated, because
the classes of ``torch.distributed.checkpoint`` validate nothing and code that reads a checkpoint
relies on the values. Wrong types, negative sizes, files outside the checkpoint's folder, chunks
without a location in a file, and chunks that do not cover their tensor exactly raise errors.

There are two additions to DCP's content, which other readers ignore:

- An attribute contains the checksums of all files (``checksums.py``).
- A seal follows the end of the pickle: the checksum of all preceding bytes.

A checkpoint of plain DCP contains neither, and is read without verifying checksums.
"""

from __future__ import annotations

import collections
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fsdp_engine.checkpoint import inert_pickle
from fsdp_engine.checkpoint.checksums import BLOCK_BYTES, BlockSummer, DamagedError, FileSums
from fsdp_engine.checkpoint.inert_pickle import Record, RefusedError
from fsdp_engine.checkpoint.manifest import check_file_name

# The attribute of Metadata with the checksums of all files.
SUMS = "fsdp_engine_sums"

_DCP = "torch.distributed.checkpoint"
_KINDS = {
    **{
        (f"{_DCP}.metadata", name): name
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_DCP}.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "layout",
    # Classes of the path of the checkpoint, for any operating system and version of Python.
    **{
        (module, name): "path"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
# Objects that a pickle may name, because it cannot modify them.
_CONSTANTS: dict[tuple[str, str], Any] = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_CONSTANTS["collections", "OrderedDict"] = collections.OrderedDict
_MAX_SIZE = 2**63 - 1
# Checking a chunk takes 2**dims steps. Real checkpoints shard tensors along fewer dims.
_MAX_SHARDED_DIMS = 8


def unpickle_metadata(content: bytes, trust: bool) -> Metadata:
    """Unpickle DCP's metadata.

    The result contains ``state_dict_metadata``, ``planner_data``, ``storage_data`` and the
    checksums. Other attributes of ``Metadata`` are dropped, because this package does not read
    them.

    Args:
        content: The pickle; bytes after its end are ignored.
        trust: Allow other classes and functions, which unpickling then calls.

    Raises:
        RefusedError: The pickle names a class or function that DCP's metadata does not contain.
        ValueError: The pickle is damaged. The message contains the expected and the found value.
    """
    try:
        found = inert_pickle.load(content, _KINDS, _CONSTANTS, trust)
    except inert_pickle.RefusedError:
        raise
    except Exception as error:  # unpickling damaged bytes raises errors of any type
        raise ValueError(f"expected a pickle of DCP's metadata; found {error!r}") from error
    state = _state(found, "Metadata", "the object")
    entries = {
        _typed(key, "a key", str): _entry(key, entry)
        for key, entry in _mapping(state.get("state_dict_metadata"), "state_dict_metadata").items()
    }
    made = Metadata(
        entries,
        planner_data=_paths(state.get("planner_data")),
        storage_data=_places(state.get("storage_data"), entries),
    )
    if SUMS in state:
        _check_sums(state[SUMS])
        setattr(made, SUMS, state[SUMS])
    return made


def _entry(key: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(entry, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    state = _state(entry, "TensorStorageMetadata", key)
    size = _size(state.get("size"), f"size of {key}")
    chunks = []
    for each in _typed(state.get("chunks"), f"chunks of {key}", list):
        chunk = _state(each, "ChunkStorageMetadata", f"a chunk of {key}")
        chunks.append(
            ChunkStorageMetadata(
                _size(chunk.get("offsets"), f"offsets of a chunk of {key}"),
                _size(chunk.get("sizes"), f"sizes of a chunk of {key}"),
            )
        )
    _check_cover(key, size, chunks)
    return TensorStorageMetadata(_properties(key, state.get("properties")), size, chunks)


def _properties(key: str, record: Any) -> TensorProperties:
    """Returns the properties of a tensor. Only the dtype is read; the others are deprecated."""
    where = f"properties of {key}"
    if not _is(record, "TensorProperties"):
        raise _unexpected(where, "TensorProperties", record)
    state = record.state
    is_right = isinstance(state, tuple) and len(state) == 5
    dtype = state[0] if is_right else None
    return TensorProperties(dtype=_typed(dtype, f"dtype of {key}", torch.dtype))


def _check_cover(key: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that every element of a tensor is in exactly one chunk.

    The ``2**d`` corners of a box of ``d`` dims, with alternating signs, determine the box: they are
    the mixed difference of its indicator function. Therefore the chunks partition the tensor if and
    only if the sum of their signed corners equals the sum of the tensor's signed corners.
    """
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    for offsets, sizes in boxes:
        if len(offsets) != len(size) or len(sizes) != len(size):
            raise ValueError(
                f"chunks of {key}: expected {len(size)} dims; found a chunk with offsets {offsets} "
                f"and sizes {sizes}"
            )
    whole = (0,) * len(size), tuple(size)
    if boxes == [whole]:
        return
    dims = [
        dim
        for dim in range(len(size))
        if any(box[0][dim] != 0 or box[1][dim] != size[dim] for box in boxes)
    ]
    if len(dims) > _MAX_SHARDED_DIMS:
        raise ValueError(
            f"chunks of {key}: expected a tensor that is sharded along at most "
            f"{_MAX_SHARDED_DIMS} dims; found {len(dims)}"
        )
    corners: Counter[tuple[int, ...]] = Counter()
    is_empty = 0 in size
    for weight, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if is_empty and 0 in sizes:
            continue
        ends = [((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in dims]
        for corner in product(*ends):
            sign = weight
            for _, factor in corner:
                sign *= factor
            corners[tuple(at for at, _ in corner)] += sign
    if any(corners.values()):
        raise ValueError(
            f"chunks of {key}: expected each element of shape {tuple(size)} in one chunk; found "
            f"chunks {_shortened([f'{sizes} at {offsets}' for offsets, sizes in boxes])}"
        )


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Returns the path of each key in the nested state dict; None for a flat state dict."""
    if planner_data is None:
        return None
    found = {}
    for key, path in _mapping(planner_data, "planner_data").items():
        _typed(key, "a key of planner_data", str)
        for part in _typed(path, f"planner_data of {key}", tuple, list):
            _typed(part, f"planner_data of {key}", str, int)
        if ".".join(map(str, path)) != key:
            raise ValueError(f"planner_data of {key}: expected its path; found {path!r:.80}")
        found[key] = tuple(path)
    return found


def _places(
    storage_data: Any, entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
) -> dict[MetadataIndex, _StorageInfo]:
    """Returns the location of each chunk and each object in the files."""
    found: dict[MetadataIndex, _StorageInfo] = {}
    for index, place in _mapping(storage_data, "storage_data").items():
        at = _state(index, "MetadataIndex", "a key of storage_data")
        key = _typed(at.get("fqn"), "fqn of a MetadataIndex", str)
        offset = at.get("offset")
        number = at.get("index")
        made = MetadataIndex(
            key,
            None if offset is None else _size(offset, f"offset of a chunk of {key}"),
            None if number is None else _number(number, f"index of a chunk of {key}"),
        )
        if made in found:
            raise ValueError(
                f"storage_data: expected one location of each chunk of {key}; found two of the "
                f"chunk at {offset}"
            )
        found[made] = _place(key, place)
    for key, entry in entries.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        for chunk in chunks:
            offset = None if chunk is None else chunk.offsets
            if MetadataIndex(key, offset) not in found:
                raise ValueError(
                    f"storage_data: expected a location of {key}"
                    + (f" at {tuple(offset)}; found none" if offset is not None else "; found none")
                )
    return found


def _place(key: str, record: Any) -> _StorageInfo:
    state = _state(record, "_StorageInfo", f"the location of {key}")
    transforms = state.get("transform_descriptors")
    if transforms is not None:
        where = f"transform_descriptors of {key}"
        transforms = [_typed(each, where, str) for each in _typed(transforms, where, list, tuple)]
    return _StorageInfo(
        check_file_name(
            _typed(state.get("relative_path"), f"relative_path of {key}", str),
            f"relative_path of {key}",
        ),
        _number(state.get("offset"), f"offset of {key} in its file"),
        _number(state.get("length"), f"length of {key} in its file"),
        transforms,
    )


def _check_sums(found: Any) -> None:
    """Check that the checksums have the format that ``dcp_metadata.file_sums`` reads."""
    content = _mapping(found, SUMS)
    block_bytes = _number(content.get("block_bytes"), f"block_bytes of {SUMS}")
    if block_bytes == 0:
        raise ValueError(f"block_bytes of {SUMS}: expected a number above 0; found 0")
    for name, each in _mapping(content.get("files"), f"files of {SUMS}").items():
        check_file_name(_typed(name, f"a file of {SUMS}", str), f"a file of {SUMS}")
        if len(_typed(each, f"sums of {name}", tuple)) != 2:
            raise ValueError(
                f"sums of {name}: expected a size and checksums; found {len(each)} values"
            )
        num_bytes, sums = each
        _typed(sums, f"sums of {name}", bytes)
        FileSums(_number(num_bytes, f"bytes of {name}"), sums, block_bytes)


# --- Values ---


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, Record) and value.kind == kind


def _state(value: Any, kind: str, where: str) -> Mapping[str, Any]:
    """Returns the attributes of an object of this kind."""
    if not _is(value, kind):
        raise _unexpected(where, kind, value)
    return {} if value.state is None else _typed(value.state, f"attributes of {where}", dict)


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    mapping: Mapping[Any, Any] = _typed(value, where, dict, collections.OrderedDict)
    return mapping


def _size(value: Any, where: str) -> torch.Size:
    if _is(value, "Size"):
        value = value.args[0] if len(value.args) == 1 else None
    return torch.Size([_number(each, where) for each in _typed(value, where, tuple, list)])


def _number(value: Any, where: str) -> int:
    if not 0 <= _typed(value, where, int) <= _MAX_SIZE:
        bits = value.bit_length()  # Python does not print numbers with thousands of digits
        found = value if bits <= 64 else f"a number of {bits} bits"
        raise ValueError(f"{where}: expected a number from 0 to 2**63 - 1; found {found}")
    return int(value)


def _typed(value: Any, where: str, *kinds: type) -> Any:
    """Returns ``value`` if it is of one of these types. Subclasses are not allowed."""
    if type(value) not in kinds:
        raise _unexpected(where, " or ".join(kind.__name__ for kind in kinds), value)
    return value


def _unexpected(where: str, expected: str, value: Any) -> ValueError:
    found = value.kind if isinstance(value, Record) else type(value).__name__
    return ValueError(f"{where}: expected {expected}; found an object of type {found}")


def _shortened(texts: Iterable[str]) -> str:
    texts = list(texts)
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more if texts else "none"


METADATA = ".metadata"

_SEAL = re.compile(rb"\nfsdp_engine: CRC-32C ([0-9a-f]{8})\n")
_SEAL_BYTES = len(b"\nfsdp_engine: CRC-32C 00000000\n")


def read_metadata(folder: Path, trust: bool = False) -> Metadata:
    """Read DCP's metadata of the checkpoint in ``folder``.

    Args:
        folder: The folder of the checkpoint.
        trust: Allow any class and function in the pickle, which may run arbitrary code.

    Raises:
        FileNotFoundError, NotADirectoryError: There is no checkpoint.
        ValueError: The metadata is damaged, or names a class that DCP's metadata does not contain.
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
        raise DamagedError(
            f"{path}: expected metadata with CRC-32C {sealed[1].decode()}; found "
            f"{summer.whole():08x}. The file is damaged"
        )
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
        raise DamagedError(
            f"{path}: expected a checksum at the end of the file; found none. The file is damaged"
        )
    return metadata


def add_sums(metadata: Metadata, sums: Mapping[str, FileSums]) -> None:
    """Add checksums of files, by name, to metadata before it is written."""
    files = {name: (each.num_bytes, each.sums) for name, each in sums.items()}
    setattr(metadata, SUMS, {"block_bytes": BLOCK_BYTES, "files": files})


def seal_of(crc: int) -> bytes:
    """Returns the seal for a pickle with checksum ``crc``."""
    return b"\nfsdp_engine: CRC-32C %08x\n" % crc


def file_sums(metadata: Metadata) -> dict[str, FileSums]:
    """Returns the checksums of a checkpoint's files, by name; empty if it has no checksums."""
    found = getattr(metadata, SUMS, None)
    if found is None:
        return {}
    return {
        name: FileSums(num_bytes, sums, found["block_bytes"])
        for name, (num_bytes, sums) in found["files"].items()
    }


def check_files(
    folder: Path, metadata: Metadata, to_check: Callable[[Iterable[str]], Iterable[str]]
) -> None:
    """Check that files exist and contain all of their entries.

    Args:
        folder: The folder of the checkpoint.
        metadata: The metadata of the checkpoint.
        to_check: Function that selects the files that this rank checks from all files.

    Raises:
        FileNotFoundError: A file is missing.
        DamagedError: A file is too short, or its size differs from the written one.
    """
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(
            ends.get(place.relative_path, 0), place.offset + place.length
        )
    sums = file_sums(metadata)
    for name in to_check(ends):
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: expected a file of the checkpoint; found none")
        size = path.stat().st_size
        if name in sums and size != sums[name].num_bytes:
            raise DamagedError(f"{path}: expected {sums[name].num_bytes} bytes; found {size}")
        if size < ends[name]:
            raise DamagedError(f"{path}: expected at least {ends[name]} bytes; found {size}")
