"""One file in the safetensors format: its header, and reads and writes of elements.

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
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fsdp_engine.checkpoint.reader import ReadBuffer, read_box

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
# The library refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInFile:
    """A tensor and its location.

    Attributes:
        name: within the file.
        dtype: of its elements.
        shape: of the tensor.
        path: the file.
        start: offset of its row-major elements in the file, in bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int


@dataclass(frozen=True)
class PlannedFile:
    """Plan of a file to write.

    Attributes:
        head: its first bytes: the length of the header, and the header.
        starts: offset of each tensor in bytes, by name.
        num_bytes: of the whole file.
    """

    head: bytes
    starts: dict[str, int]
    num_bytes: int


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Name of a dtype in the format.

    Raises:
        ValueError: the format does not support the dtype of tensor ``name``.
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
        tensors: name, dtype and shape of each.
        metadata: additional texts in the header.

    Raises:
        ValueError: the format does not support a dtype.
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
        OSError: the file cannot be read.
        ValueError: it is not in the format, or its size differs from that in its header.
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
        raise ValueError(f"{path}: expected a header with names; found {text[:40]!r}")
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
    """Start and end of a tensor in the data section, in bytes."""
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
        descriptor: of a file open for writing.
        start: offset of the first element in bytes.
        tensor: of any device, dtype and strides.
        dtype: of the written elements.
        buffer: memory for conversions.

    Raises:
        OSError: writing failed.
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


def read_elements(
    file: BinaryIO, start: int, dtype: torch.dtype, target: Tensor, buffer: ReadBuffer
) -> None:
    """Fill a tensor with consecutive row-major elements of a file.

    Args:
        file: opened for reading bytes.
        start: offset of the first element in bytes.
        dtype: of the elements in the file.
        target: of any device, dtype and strides.
        buffer: memory to read through, if ``target`` cannot be read into directly.

    Raises:
        EOFError: the file is too short.
    """
    shape = tuple(target.shape)
    read_box(file, start, shape, dtype, [0] * len(shape), shape, target, buffer)


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
    """Write a contiguous CPU tensor."""
    view = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while len(view):  # pwrite may write only a part
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written
