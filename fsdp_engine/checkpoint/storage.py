"""Bytes of a checkpoint: DCP's files, with a checksum for each, read through a small buffer.

Files are those of ``torch.distributed.checkpoint``: anything that reads its format reads them. The
writer only looks at what passes by; the reader goes around ``torch.load``, which would bring in
every saved chunk whole, and reads the ranges that this rank holds.

[Note: Tensors within files]
DCP stores a chunk as ``torch.save`` writes a tensor: an uncompressed zip archive whose entry
``data/0`` is the storage. A chunk that is contiguous from the start of its storage (all that DCP
writes are, because it clones views) is a row-major box of the tensor, at a known place in the file.
Anything else is left to ``torch.load``.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp_engine import memory
from fsdp_engine.checkpoint.manifest import FileRow

# Before the first underscore after it stand eight digits of the save, then the rank.
PREFIX, SUFFIX = "__shards_", ".distcp"
METADATA = ".metadata"

# What a rank holds at once, beyond its own shards, while it reads.
READ_BUFFER_BYTES = 16 << 20

_WRITE_BUFFER_BYTES = 1 << 18
_ZIP_HEADER_BYTES = 30  # of an entry; its name and an extra field follow


class _ChecksummedFile(io.BufferedWriter):
    """A file that is written from start to end, and the checksum of what was written."""

    def __init__(self, path: Path) -> None:
        # Buffered, because torch.save writes a tensor's frame in a dozen small pieces. What is
        # larger than the buffer goes past it.
        super().__init__(io.FileIO(path, "wb"), _WRITE_BUFFER_BYTES)
        self.num_bytes = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        view = memoryview(data).cast("B")
        self.crc = zlib.crc32(view, self.crc)
        super().write(view)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Bytes written."""
        return self.num_bytes

    def fileno(self) -> int:
        """The descriptor, for fsync: so with everything handed to the system."""
        self.flush()
        return super().fileno()


class _ChecksummingFiles(FileSystem):
    """The file system as DCP's writer sees it; keeps a row for each file written."""

    def __init__(self) -> None:
        self.rows: dict[str, FileRow] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """See ``FileSystem``."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _ChecksummedFile(Path(path)) as file:
            yield file
        self.rows[Path(path).name] = FileRow(file.num_bytes, f"{file.crc:08x}")


@dataclasses.dataclass(frozen=True)
class _Written(WriteResult):
    """A rank's first result carries the rows of its files."""

    rows: dict[str, FileRow] = dataclasses.field(default_factory=dict)


class SavePlanner(dcp.DefaultSavePlanner):
    """Hands tensors to the writer in such a form that it does not copy them.

    DCP writes whole storages: a slice of a flat buffer, whose storage is the buffer, it would
    clone. Here the slice gets a storage of its own over the same memory.
    """

    def resolve_data(self, write_item: WriteItem) -> Any:
        """What to write for an item of the plan."""
        value = super().resolve_data(write_item)
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.is_contiguous():
            return memory.with_own_storage(value)
        return value


class Writer(dcp.FileSystemWriter):
    """Writes a checkpoint's files, each on the disk when it is done.

    Args:
        folder: where to.
        finished: called on the coordinator when everything is written, with the metadata and a row
            for each file. What it raises is raised on every rank.
    """

    def __init__(
        self, folder: Path, finished: Callable[[Metadata, dict[str, FileRow]], None]
    ) -> None:
        super().__init__(folder)
        self.fs = self._files = _ChecksummingFiles()
        self._finished = finished

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Without the warning that a checkpoint is there."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: names for all ranks' files, which no other save has.

        Torch's own would write over the files that an older metadata still points to.
        """
        save = uuid.uuid4().hex[:8]
        return [
            dataclasses.replace(
                plan,
                storage_data=dataclasses.replace(
                    plan.storage_data, prefix=f"{PREFIX}{save}_{rank}_"
                ),
            )
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part."""
        results = super().write_data(plan, planner).wait()
        if results:
            first = results[0]
            results[0] = _Written(
                first.index, first.size_in_bytes, first.storage_data, self._files.rows
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written."""
        super().finish(metadata, results)
        rows = {
            name: row
            for written in results
            for result in written
            if isinstance(result, _Written)
            for name, row in result.rows.items()
        }
        rows[METADATA] = next(
            row for name, row in self._files.rows.items() if name.startswith(METADATA)
        )
        self._finished(metadata, rows)


class Reader(dcp.FileSystemReader):
    """Reads what a rank needs, through a buffer of ``buffer_bytes``."""

    def __init__(self, folder: Path, buffer_bytes: int = READ_BUFFER_BYTES) -> None:
        super().__init__(folder)
        self._buffer_bytes = buffer_bytes

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's part."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            per_file.setdefault(place.relative_path, []).append(item)
        buffer = ReadBuffer(self._buffer_bytes)
        for relative_path, items in per_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, relative_path), "rb") as file:
                chunks: dict[int, StoredChunk] = {}
                for item in sorted(items, key=self._offset):
                    self._read_item(file, item, planner, buffer, chunks)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _offset(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].offset)

    def _read_item(
        self,
        file: Any,
        item: ReadItem,
        planner: LoadPlanner,
        buffer: ReadBuffer,
        chunks: dict[int, StoredChunk],
    ) -> None:
        place = self.storage_data[item.storage_index]
        whole = FileView(file, place.offset, place.length)
        if place.transform_descriptors:
            raise ValueError(
                f"{place.relative_path}: expected plain entries; found transformed ones "
                f"({', '.join(place.transform_descriptors)})"
            )
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(whole.read(-1)))
            return
        target = planner.resolve_tensor(item).detach()
        if place.offset not in chunks:
            chunks[place.offset] = StoredChunk.find(whole, place.offset)
        region = tuple(item.storage_offsets), tuple(item.lengths)
        chunks[place.offset].read_into(target, *region, file, whole, buffer)
        planner.commit_tensor(item, target)


class FileView(io.RawIOBase):
    """Some bytes of a file, as a file of their own. Closing it leaves the file open."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes = file, start, num_bytes
        self._place = 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek: expected a place in the file; found {base + offset}")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """The place."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read what is left, or as much as the buffer takes."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(view[: max(self._num_bytes - self._place, 0)])  # type: ignore[attr-defined]
        self._place += count
        return count


class ReadBuffer:
    """Memory that bytes pass through on their way into tensors that they cannot be read into."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory: Tensor | None = None

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor over the buffer's first bytes, which the next call takes again."""
        needed = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < needed:
            self._memory = memory.empty(max(self.num_bytes, needed), torch.uint8, "cpu")
        return self._memory[:needed].view(dtype)


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """Where a saved chunk's elements are. See [Note: Tensors within files].

    Attributes:
        shape: of the chunk.
        dtype: of its elements.
        start: byte of the file at which its row-major elements begin; None: only ``torch.load``
            understands it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int | None

    @classmethod
    def find(cls, whole: FileView, offset: int) -> StoredChunk:
        """The chunk that ``whole``, a view of a file from ``offset``, holds."""
        outline = torch.load(whole, map_location="meta", weights_only=True)  # type: ignore[arg-type]
        shape, dtype = tuple(outline.shape), outline.dtype
        start = None
        if outline.is_contiguous() and outline.storage_offset() == 0:
            whole.seek(0)
            start = _data_offset(whole, outline.numel() * dtype.itemsize)
        return cls(shape, dtype, None if start is None else offset + start)

    def read_into(
        self,
        target: Tensor,
        offsets: Sequence[int],
        lengths: Sequence[int],
        file: BinaryIO,
        whole: FileView,
        buffer: ReadBuffer,
    ) -> None:
        """Read a box of the chunk into a tensor of the box's shape."""
        if self.start is None:
            whole.seek(0)
            tensor = torch.load(whole, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
            for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
            target.copy_(tensor)
        else:
            read_box(file, self.start, self.shape, self.dtype, offsets, lengths, target, buffer)


def read_box(
    file: BinaryIO,
    start: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: Tensor,
    buffer: ReadBuffer,
) -> None:
    """Read a box of a row-major tensor that lies in a file.

    Args:
        file: opened for reading bytes.
        start: byte at which the tensor begins.
        shape: of the tensor in the file.
        dtype: of its elements.
        offsets: where the box begins, in each dim.
        lengths: its size in each dim.
        target: of that size; of any dtype and device, and of any strides.
        buffer: memory to read through, where ``target`` cannot be read into.

    Raises:
        EOFError: the file is too short.
    """
    if not math.prod(lengths):
        return
    if list(lengths) == list(shape):
        _read_rows(file, start, dtype, target, buffer)
        return
    row_shape = shape[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    first = start + offsets[0] * row_bytes
    if list(lengths[1:]) == list(row_shape):
        _read_rows(file, first, dtype, target, buffer)
    elif lengths[0] == 1 or row_bytes > buffer.num_bytes:
        for row in range(lengths[0]):
            place = first + row * row_bytes
            read_box(file, place, row_shape, dtype, offsets[1:], lengths[1:], target[row], buffer)
    else:
        # Narrow columns: reading whole rows and keeping a part beats a read for each row.
        step = max(buffer.num_bytes // row_bytes, 1)
        for low in range(0, lengths[0], step):
            count = min(step, lengths[0] - low)
            rows = buffer.tensor(count * math.prod(row_shape), dtype)
            _read_exactly(file, first + low * row_bytes, rows)
            part = rows.view(count, *row_shape)
            for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), 1):
                part = part.narrow(dim, offset, length)
            target[low : low + count].copy_(part)


def _read_rows(
    file: BinaryIO, start: int, dtype: torch.dtype, target: Tensor, buffer: ReadBuffer
) -> None:
    """Fill ``target`` from as many elements, which lie one after the other."""
    if target.is_contiguous():
        # Of one element, whose stride may be anything, `view` would keep that stride.
        flat = target.as_strided((target.numel(),), (1,))
        if target.device.type == "cpu" and target.dtype == dtype:
            _read_exactly(file, start, flat)
            return
        step = max(buffer.num_bytes // dtype.itemsize, 1)
        for low in range(0, flat.numel(), step):
            part = buffer.tensor(min(step, flat.numel() - low), dtype)
            _read_exactly(file, start + low * dtype.itemsize, part)
            flat[low : low + part.numel()].copy_(part)
        return
    # Of strides of its own: as many rows at a time as the buffer takes.
    row_numel = math.prod(target.shape[1:])
    step = buffer.num_bytes // (row_numel * dtype.itemsize)
    for low in range(0, target.shape[0], max(step, 1)):
        place = start + low * row_numel * dtype.itemsize
        if step:
            part = target[low : low + step]
            rows = buffer.tensor(part.numel(), dtype)
            _read_exactly(file, place, rows)
            part.copy_(rows.view(part.shape))
        else:
            _read_rows(file, place, dtype, target[low], buffer)


def _read_exactly(file: BinaryIO, start: int, out: Tensor) -> None:
    """Fill a contiguous CPU tensor with bytes of a file."""
    file.seek(start)
    view = memoryview(out.view(torch.uint8).numpy())  # type: ignore[arg-type]
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            name = getattr(file, "name", "file")
            raise EOFError(f"{name}: expected {len(view)} bytes more at its end; found none")
        view = view[count:]


def _data_offset(whole: FileView, num_bytes: int) -> int | None:
    """Where in an archive of ``torch.save`` its only storage lies; None if it is not so simple."""
    with zipfile.ZipFile(whole) as archive:
        found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        return None
    if found[0].file_size < num_bytes:
        return None
    whole.seek(found[0].header_offset)
    header = whole.read(_ZIP_HEADER_BYTES)
    # The lengths of a local header's name and extra field are its last two numbers.
    name, extra = struct.unpack("<HH", header[-4:])
    return int(found[0].header_offset) + len(header) + name + extra
