"""Reads and writes files in the safetensors format, and folders in Hugging Face's layout.

A file consists of a header and of elements, which are read and written by ranges:

    bytes             content
    ----------------  ------------------------------------------------------------------------------
    0 to 7            n, the length of the header, little-endian
    8 to 7 + n        JSON, padded with spaces:
                      {"__metadata__": {"format": "pt"},
                       "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
                       "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}
    from 8 + n        the tensors' row-major elements, one tensor after the other without gaps

The offset of a tensor depends only on names, shapes and dtypes. Therefore each rank computes the
offsets of its elements without communication, and a flat range of a tensor is one range of bytes.
Headers written here are padded to a multiple of 8 bytes, and tensors are sorted by descending
element size, so that every tensor is aligned.

The tensors of a model are assigned to files:

    model.safetensors                       all tensors, if they fit into one file; otherwise
    model-00001-of-00003.safetensors        files with a maximum number of bytes, and
    model.safetensors.index.json            {"metadata": {"total_size": bytes of all tensors},
                                             "weight_map": {name: file, ...}}

Files of a model of ``diffusers`` have the stem ``diffusion_pytorch_model``.

An export is written into a temporary folder inside the model's folder, and its files are renamed
into place when all of them are complete.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fsdp_engine.checkpoint.directory import sync_folder
from fsdp_engine.checkpoint.reader import ReadBuffer
from fsdp_engine.memory.allocator import as_bytes

# Some of these dtypes do not exist in all supported versions of torch.
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in _NAMES.items()
    if hasattr(torch, attribute)
}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_ALIGNMENT = 8
# The safetensors library refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInFile:
    """A tensor and its location in a file.

    Attributes:
        name: The name of the tensor in the file.
        dtype: The dtype of its elements.
        shape: The shape of the tensor.
        path: The path of the file.
        start: The offset of its row-major elements in the file, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int


@dataclass(frozen=True)
class PlannedFile:
    """The plan of a file to write.

    Attributes:
        head: The first bytes of the file: the length of the header, and the header.
        starts: The offset of each tensor in the file in bytes, by name.
        num_bytes: The number of bytes of the file.
    """

    head: bytes
    starts: dict[str, int]
    num_bytes: int


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Returns the name of a dtype in the safetensors format.

    Raises:
        ValueError: The format does not support the dtype of tensor ``name``.
    """
    if dtype not in _NAME_OF:
        raise ValueError(
            f"{name}: expected a dtype of the safetensors format ({', '.join(DTYPES)}); "
            f"found {dtype}"
        )
    return _NAME_OF[dtype]


def plan_file(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> PlannedFile:
    """Plan one file.

    Args:
        tensors: The name, dtype and shape of each tensor.
        metadata: Additional strings in the header.

    Raises:
        ValueError: The format does not support a dtype.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    offsets: dict[str, int] = {}
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):
        offsets[name] = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": dtype_name(name, dtype),
            "shape": list(shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return PlannedFile(
        head, {name: len(head) + offset for name, offset in offsets.items()}, len(head) + end
    )


def read_header(path: Path) -> list[TensorInFile]:
    """Returns the tensors of a file, in the order of their offsets. Reads only the header.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not in the format, or its size differs from the size in its header.
    """
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if num_bytes < _LENGTH_BYTES or length > min(num_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: expected a safetensors file, which begins with the length of its header "
                f"in {_LENGTH_BYTES} bytes; found {length} in a file of {num_bytes} bytes"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a header in JSON of {length} bytes; found {text[:40]!r} ({error})"
        ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: expected a JSON object as header; found {text[:40]!r}")
    first = _LENGTH_BYTES + length
    spans = [
        (_span(path, name, entry), name, entry)
        for name, entry in header.items()
        if name != _METADATA
    ]
    spans.sort(key=lambda span: span[0])
    found = []
    end = 0
    for (start, stop), name, entry in spans:
        if start != end:
            raise ValueError(f"{path}: expected {name} at byte {end} of the data; found {start}")
        end = stop
        dtype = DTYPES[entry["dtype"]]
        found.append(TensorInFile(name, dtype, tuple(entry["shape"]), path, first + start))
    if num_bytes != first + end:
        raise ValueError(
            f"{path}: expected {first + end} bytes, as its header says; found {num_bytes}"
        )
    return found


def _span(path: Path, name: str, entry: Any) -> tuple[int, int]:
    """Returns the start and end of a tensor in the data section, in bytes."""
    try:
        kind, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected dtype, shape and two data_offsets of {name}; found {entry!r}"
        ) from error
    if not isinstance(kind, str) or kind not in DTYPES:
        raise ValueError(
            f"{path}: expected {name} to have one of the dtypes {', '.join(DTYPES)}; found {kind!r}"
        )
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{path}: expected sizes and offsets of {name}; found {entry!r}")
    if stop - start != (expected := math.prod(shape) * DTYPES[kind].itemsize):
        raise ValueError(
            f"{path}: expected {expected} bytes of {name}, {kind} of shape {shape}; found "
            f"{stop - start}"
        )
    return start, stop


def write_elements(
    descriptor: int, start: int, tensor: Tensor, dtype: torch.dtype, buffer: ReadBuffer
) -> None:
    """Write a tensor's row-major elements at an offset of a file.

    Args:
        descriptor: The descriptor of a file open for writing.
        start: The offset of the first element in the file, in bytes.
        tensor: A tensor of any device, dtype and strides.
        dtype: The dtype of the written elements.
        buffer: Memory for conversions.

    Raises:
        OSError: Writing failed.
    """
    is_plain = tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous()
    if is_plain:
        _write_all(descriptor, start, tensor.view(-1))
        return
    for part in _parts(tensor, max(buffer.num_bytes // dtype.itemsize, 1)):
        converted = buffer.tensor(part.numel(), dtype)
        converted.view(part.shape).copy_(part)
        _write_all(descriptor, start, converted)
        start += part.numel() * dtype.itemsize


def _parts(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Split a tensor into consecutive row-major parts of at most ``limit`` elements."""
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    if tensor.numel() <= limit:
        yield tensor
    elif (row := math.prod(tensor.shape[1:])) > limit:
        for part in tensor:
            yield from _parts(part, limit)
    else:
        yield from tensor.split(limit // row)


def _write_all(descriptor: int, start: int, flat: Tensor) -> None:
    """Write all bytes of a contiguous CPU tensor."""
    view = memoryview(as_bytes(flat).numpy())  # type: ignore[arg-type]
    while len(view):  # pwrite may write only a part
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


STEM = "model"
DIFFUSERS_STEM = "diffusion_pytorch_model"


def _names_of(stem: str) -> tuple[str, str]:
    """Returns the name of a single file, and the name of the index of several files."""
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json"


SINGLE, INDEX = _names_of(STEM)
_IN_FOLDERS = (*_names_of(STEM), *_names_of(DIFFUSERS_STEM))
_STAGING = ".exporting-"

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]B)\s*", re.IGNORECASE)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Sized(Protocol):
    """A tensor to write, of which only dtype and shape are known."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the written elements."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


@dataclass(frozen=True)
class NamedFile:
    """A file of an export: its name in the folder, its plan, and the names of its tensors."""

    name: str
    plan: PlannedFile
    tensors: tuple[str, ...]


def parse_size(size: int | str) -> int:
    """Parse a number of bytes, or a string such as "5GB" (1 GB is 10**9 bytes, as on the Hub).

    Raises:
        ValueError: ``size`` is neither of them, or less than a byte.
    """
    found = 0
    if isinstance(size, int) and not isinstance(size, bool):
        found = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        found = int(float(match[1]) * _UNITS[match[2].upper()])
    if found < 1:
        raise ValueError(
            "max_shard_size: expected a positive number of bytes, or a string such as '5GB' "
            f"({', '.join(_UNITS)}); found {size!r}"
        )
    return found


def split(tensors: Sequence[SizedT], max_bytes: int) -> list[list[SizedT]]:
    """Assign tensors to files as ``huggingface_hub`` does: greedily, in order.

    Args:
        tensors: The tensors, in the order of the model.
        max_bytes: The maximum number of bytes of tensors in one file. A larger tensor gets a
            separate file.
    """
    files: list[list[SizedT]] = []
    current: list[SizedT] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor_bytes(tensor)
        if num_bytes > max_bytes:
            files.append([tensor])
            continue
        if size + num_bytes > max_bytes:
            files.append(current)
            current, size = [], 0
        current.append(tensor)
        size += num_bytes
    if current or not files:
        files.append(current)
    return files


def tensor_bytes(tensor: Sized) -> int:
    """Returns the written size of a tensor in bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def file_name(number: int, count: int, stem: str) -> str:
    """Returns the name of file ``number`` (from 0) of ``count``."""
    part = "" if count == 1 else f"-{number + 1:05d}-of-{count:05d}"
    return f"{stem}{part}.safetensors"


class ExportFolder:
    """Creates and publishes the files of one export in a folder. Only one process uses it.

    Args:
        directory: The directory of the model.
        stem: The stem of the file names.
    """

    def __init__(self, directory: Path, stem: str = STEM) -> None:
        self._directory = directory.absolute()
        self._single, self._index = _names_of(stem)
        self._own = re.compile(rf"{stem}(-\d{{5,}}-of-\d{{5,}})?\.safetensors")
        self._staging: Path | None = None
        self._made: list[Path] = []

    def begin(self, files: Sequence[NamedFile]) -> Path:
        """Create a temporary folder, and in it the files with their headers and final sizes.

        Raises:
            OSError: The folder or a file cannot be created.
        """
        if self._directory.exists() and not self._directory.is_dir():
            raise NotADirectoryError(
                f"directory: expected a folder; found the file {self._directory}"
            )
        parents = (self._directory, *self._directory.parents)
        self._made = [folder for folder in parents if not folder.exists()]
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"{_STAGING}*"):  # folders of killed jobs
            shutil.rmtree(left, ignore_errors=True)
        self._staging = self._directory / f"{_STAGING}{uuid.uuid4().hex[:8]}"
        self._staging.mkdir()
        for file in files:
            with open(self._staging / file.name, "wb") as made:
                made.write(file.plan.head)
                made.truncate(file.plan.num_bytes)
                made.flush()
                os.fsync(made.fileno())
        return self._staging

    def publish(self, files: Sequence[NamedFile], total_bytes: int) -> None:
        """Replace the files of an earlier export. The index is renamed last.

        Args:
            files: The files of this export, which are complete and synced.
            total_bytes: The number of bytes of all tensors.

        Raises:
            OSError: The folder cannot be written.
        """
        assert self._staging is not None
        new = {file.name for file in files}
        index = self._staging / self._index
        if len(files) > 1:
            weight_map = {name: file.name for file in files for name in file.tensors}
            content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            with open(index, "w", encoding="utf-8") as made:
                made.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
                made.flush()
                os.fsync(made.fileno())
        # The folder must never contain a model that mixes older and newer files. So if files with
        # the new names exist, they and the index are removed first. (A rename replaces a single
        # file atomically.)
        taken = [self._directory / name for name in sorted(new - {self._single})]
        if any(path.exists() for path in taken):
            for path in (self._directory / self._index, *taken):
                path.unlink(missing_ok=True)
        for name in sorted(new):
            os.replace(self._staging / name, self._directory / name)
        if index.exists():
            os.replace(index, self._directory / self._index)
        else:
            (self._directory / self._index).unlink(missing_ok=True)
        # An older single file is removed last, because it takes precedence over an index.
        for path in list(self._directory.iterdir()):
            if self._own.fullmatch(path.name) and path.name not in new:
                path.unlink()
        self._made = []
        sync_folder(self._directory)

    def discard(self) -> None:
        """Remove unpublished files, and folders that were created for them."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        for folder in self._made:
            # Another program may have created files there in the meantime.
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def read_folder(directory: Path) -> list[TensorInFile]:
    """Returns all tensors of a model's folder: those of the single file, of the files in the index,
    or of all files.

    Raises:
        OSError: The folder or a file is missing, or cannot be read.
        ValueError: A file is not in the format or does not contain a tensor that the index assigns
            to it, or several files contain a tensor of one name.
    """
    if not directory.is_dir():
        kind = NotADirectoryError if directory.exists() else FileNotFoundError
        found = "a file" if directory.exists() else "nothing"
        raise kind(
            f"directory: expected a folder at {directory}; found {found}. The name of a model on "
            "the Hub is not a folder: download the model first"
        )
    weight_map: dict[str, str] = {}
    present = [name for name in _IN_FOLDERS if (directory / name).is_file()]
    index = directory / (present[0] if present else INDEX)
    if present and index.suffix == ".safetensors":
        names = [index.name]
    elif present:
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{index}: expected the {len(names)} files that it names in the same folder; "
                f"found no {', '.join(missing)}"
            )
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(
                f"directory: expected {SINGLE}, {INDEX} or other *.safetensors in {directory}; "
                "found none"
            )
    tensors: dict[str, TensorInFile] = {}
    for name in names:
        for tensor in read_header(directory / name):
            if weight_map.get(tensor.name, name) != name:
                continue  # the index assigns the tensor to another file
            if tensor.name in tensors:
                raise ValueError(
                    f"{directory}: expected one tensor {tensor.name}; found it in "
                    f"{tensors[tensor.name].path.name} and in {name}"
                )
            tensors[tensor.name] = tensor
    lost = [f"{name} in {file}" for name, file in weight_map.items() if name not in tensors]
    if lost:
        raise ValueError(
            f"{index}: expected each tensor in the file that the index assigns to it; found no "
            f"{', '.join(lost[:16])}"
        )
    return list(tensors.values())


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(path.read_bytes())["weight_map"]
        is_right = all(
            isinstance(name, str) and Path(name).name == name for name in weight_map.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected JSON with a weight_map; found none ({type(error).__name__}: {error})"
        ) from error
    if not is_right or not weight_map:
        raise ValueError(
            f"{path}: expected a weight_map from tensors to files in the same folder; found "
            f"{str(weight_map)[:80]}"
        )
    return dict(weight_map)
