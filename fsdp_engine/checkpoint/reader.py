"""Reads a rank's ranges of the tensors in a checkpoint, through a small buffer.

The reader does not use ``torch.load`` for large chunks, because that would load the full chunk.

[Note: Tensors within files]
DCP stores a chunk as ``torch.save`` writes a tensor: an uncompressed zip archive whose entry
``data/0`` is the storage. A chunk that is contiguous from the start of its storage is a row-major
box of the tensor, at a known offset of the file. All chunks that DCP writes are such chunks,
because it clones views. ``torch.load`` reads other chunks and small chunks.

[Note: Verification]
The manifest contains a checksum of each file. If one differs, the damaged entries are found by the
checksums that ``torch.save`` stores with each tensor (its archives are zip files).
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_engine.checkpoint.checksums import CheckedFile, DamagedError, FileSums
from fsdp_engine.checkpoint.dcp_metadata import METADATA, file_sums, read_metadata
from fsdp_engine.checkpoint.inert_pickle import RefusedError
from fsdp_engine.checkpoint.manifest import Manifest, file_row
from fsdp_engine.memory import allocator

# Bytes of memory that a rank uses in addition to its shards while it reads.
READ_BUFFER_BYTES = 16 << 20

# Chunks up to this number of bytes are read at once, because locating their elements would take
# longer.
_SMALL_BYTES = 1 << 18
_ZIP_HEADER_BYTES = 30  # header of an entry; a name and an extra field follow it


class Reader(dcp.FileSystemReader):
    """Reads a rank's ranges through a buffer, and verifies checksums if the checkpoint has them.

    Args:
        folder: The folder of a checkpoint.
        metadata: The metadata of the checkpoint, with the checksums.
        buffer_bytes: Number of bytes of the buffer.
    """

    def __init__(
        self, folder: Path, metadata: Metadata, buffer_bytes: int = READ_BUFFER_BYTES
    ) -> None:
        super().__init__(folder)
        self._metadata = metadata
        self._sums = file_sums(metadata)
        self._buffer = ReadBuffer(buffer_bytes)
        self.set_up_storage_reader(metadata, True)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the metadata that the constructor was given. DCP's method would unpickle the file
        without restrictions."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of this rank's plan."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            per_file.setdefault(place.relative_path, []).append(item)
        for relative_path, items in per_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, relative_path), "rb") as file:
                source = self._checked(file, relative_path)
                # The previous chunk and its offset, because consecutive items may be in one chunk.
                chunk: tuple[int, StoredChunk] | None = None
                for item in sorted(items, key=self._offset):
                    try:
                        chunk = self._read_item(source, item, planner, chunk)
                    except RefusedError:
                        raise
                    except Exception as error:  # damaged archives raise errors of any type
                        kind = OSError if isinstance(error, OSError) else DamagedError
                        raise kind(
                            f"{self.path}/{relative_path}: expected {item.storage_index.fqn} as "
                            f"it was saved; found {type(error).__name__}: {error}"
                        ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_object(self, key: str) -> bytes:
        """Returns the stored bytes of an object, in the format of ``torch.load``.

        Raises:
            FileNotFoundError: The file of the object is missing.
            ValueError: The file is too short or damaged.
        """
        place = self.storage_data[MetadataIndex(key)]
        path = Path(self.path) / place.relative_path
        with open(path, "rb") as file:
            try:
                source = self._checked(file, place.relative_path)
                content = FileView(source, place.offset, place.length).read(-1)
            except DamagedError as error:
                raise DamagedError(
                    f"{path}: expected {key} as it was saved; found {error}. Load an older step"
                ) from error
        if len(content) != place.length:
            raise DamagedError(
                f"{path}: expected {place.length} bytes of {key}; found {len(content)}"
            )
        return content

    def _checked(self, file: Any, name: str) -> Any:
        sums = self._sums.get(name)
        return file if sums is None else CheckedFile(file, name, sums)

    def _offset(self, item: ReadItem) -> int:
        return int(self.storage_data[item.storage_index].offset)

    def _read_item(
        self,
        file: Any,
        item: ReadItem,
        planner: LoadPlanner,
        last: tuple[int, StoredChunk] | None,
    ) -> tuple[int, StoredChunk] | None:
        place = self.storage_data[item.storage_index]
        if place.transform_descriptors:
            raise ValueError(
                f"{place.relative_path}: expected entries without transforms; found the transforms "
                f"{', '.join(place.transform_descriptors)}. Save without extensions of DCP"
            )
        if item.type == LoadItemType.BYTE_IO:
            content = FileView(file, place.offset, place.length).read(-1)
            planner.load_bytes(item, io.BytesIO(content))
            return None
        target = planner.resolve_tensor(item).detach()
        if last is None or last[0] != place.offset:
            last = place.offset, StoredChunk.find(file, place.offset, place.length)
        last[1].read_into(target, item.storage_offsets, item.lengths, file, self._buffer)
        planner.commit_tensor(item, target)
        return last


class FileView(io.RawIOBase):
    """A range of a file with the interface of a file. Closing it does not close the file."""

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes = file, start, num_bytes
        self._place = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"seek: expected a position of at least 0; found {base + offset}")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """Returns the position."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer``, up to the end of the range. Returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._place)
        count: int = self._file.readinto(view[: max(self._num_bytes - self._place, 0)])  # type: ignore[attr-defined]
        self._place += count
        return count


class ReadBuffer:
    """Memory for reads into tensors of other dtypes, devices or strides."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory: Tensor | None = None

    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor over the buffer's first bytes. The next call reuses the memory."""
        needed = numel * dtype.itemsize
        if self._memory is None or self._memory.numel() < needed:
            self._memory = allocator.empty(max(self.num_bytes, needed), torch.uint8, "cpu")
        return self._memory[:needed].view(dtype)


@dataclasses.dataclass(frozen=True)
class StoredChunk:
    """The location of a saved chunk's elements. See [Note: Tensors within files].

    Attributes:
        shape: The shape of the chunk.
        dtype: The dtype of its elements.
        start: The offset of its row-major elements in the file, in bytes. None: ``values`` contains
            them.
        values: The chunk, if it is small or only ``torch.load`` can read it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int | None
    values: Tensor | None = None

    @classmethod
    def find(cls, file: BinaryIO, offset: int, num_bytes: int) -> StoredChunk:
        """Locate the elements of the chunk that is stored in ``num_bytes`` bytes of a file, from
        ``offset`` on. Small chunks are read."""
        view = FileView(file, offset, num_bytes)
        if num_bytes <= _SMALL_BYTES:
            return cls._read(io.BytesIO(view.read(-1)))
        # The file is buffered, because zipfile reads an archive's directory in small pieces.
        archive: Any = io.BufferedReader(view, 1 << 14)
        outline = torch.load(archive, map_location="meta", weights_only=True)
        shape, dtype = tuple(outline.shape), outline.dtype
        start = None
        if outline.is_contiguous() and outline.storage_offset() == 0:
            start = data_offset(archive, outline.numel() * dtype.itemsize)
        if start is None:
            archive.seek(0)
            return cls._read(archive)
        return cls(shape, dtype, offset + start)

    @classmethod
    def _read(cls, archive: Any) -> StoredChunk:
        values = torch.load(archive, map_location="cpu", weights_only=True)
        return cls(tuple(values.shape), values.dtype, None, values)

    def read_into(
        self,
        target: Tensor,
        offsets: Sequence[int],
        lengths: Sequence[int],
        file: BinaryIO,
        buffer: ReadBuffer,
    ) -> None:
        """Read a box of the chunk into a tensor of the box's shape."""
        if self.start is not None:
            read_box(file, self.start, self.shape, self.dtype, offsets, lengths, target, buffer)
            return
        part = self.values
        assert part is not None
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(dim, offset, length)
        target.copy_(part)


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
    """Read a box of a row-major tensor in a file.

    Args:
        file: A file that is open for reading bytes.
        start: The offset of the tensor in the file, in bytes.
        shape: The shape of the tensor in the file.
        dtype: The dtype of its elements.
        offsets: The offsets of the box, in each dim.
        lengths: The lengths of the box, in each dim.
        target: A tensor of shape ``lengths``, of any dtype, device and strides.
        buffer: Memory for the elements if they cannot be read directly into ``target``.

    Raises:
        EOFError: The file is too short.
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
        # For narrow columns, reading full rows is faster than one small read for each row.
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
    """Fill ``target`` with consecutive elements of a file."""
    if target.is_contiguous():
        # The stride of a tensor of one element is arbitrary, and `view` would keep it.
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
    # The target is not contiguous: read as many rows at a time as fit into the buffer.
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
            raise EOFError(f"{name}: expected {len(view)} bytes more; found the end")
        view = view[count:]


def data_offset(whole: BinaryIO, num_bytes: int) -> int | None:
    """Returns the offset of the only storage in an archive of ``torch.save``. None: there are
    several storages, or the storage is compressed or has less than ``num_bytes`` bytes."""
    with zipfile.ZipFile(whole) as archive:
        found = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        return None
    if found[0].file_size < num_bytes:
        return None
    whole.seek(found[0].header_offset)
    header = whole.read(_ZIP_HEADER_BYTES)
    # The lengths of a local header's name and extra field are its last two numbers.
    num_following: int = sum(struct.unpack("<HH", header[-4:]))
    return int(found[0].header_offset) + len(header) + num_following


def check_sizes(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check that files exist and have the sizes in the manifest.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file has another size.
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
        folder: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        names: The names of the files. None: all files.
        progress: Function that is called with the number of bytes of each read.

    Raises:
        ValueError: Files are missing or damaged. The message lists them, with the damaged tensors.
    """
    damages = find_damages(folder, manifest, names, progress)
    if damages:
        raise ValueError(
            f"checkpoint {folder}: expected files as they were written; found {len(damages)} that "
            "differ\n  " + "\n  ".join(damages)
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


def find_damages_without_manifest(
    folder: Path,
    metadata: Metadata,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> list[str]:
    """Returns a line for each file that is missing or damaged, for a checkpoint without a manifest.

    Files are compared with the checksums in the metadata. Without these, only the bytes within
    entries are compared with the checksums that are stored with the entries: damaged bytes between
    entries, or entries that were completely replaced, are not detected.

    Args:
        folder: The folder of a checkpoint in DCP format.
        metadata: The metadata of the checkpoint.
        progress: Function that is called with the number of bytes of each read.
    """
    sums = file_sums(metadata)
    damages: list[str] = []
    for name, entries in _places(metadata).items():
        path = folder / name
        if not path.is_file():
            damages.append(f"{name}: expected a file; found none")
        elif name not in sums:
            if damaged := _find_damaged(path, entries, progress):
                damages.append(f"{name}: {_listed(damaged)}")
        elif difference := _difference(path, sums[name], progress):
            damages.append(f"{difference}: {_damaged_among(path, entries)}")
    return damages


def _difference(path: Path, sums: FileSums, progress: Callable[[int], None]) -> str:
    """Returns how a file differs from its checksums; empty if it does not."""
    if (size := path.stat().st_size) != sums.num_bytes:
        return f"{path.name}: expected {sums.num_bytes} bytes; found {size}"
    part = bytearray(READ_BUFFER_BYTES)
    with open(path, "rb") as file:
        checked = CheckedFile(file, path.name, sums)
        try:
            while count := checked.readinto(part):
                progress(count)
        except DamagedError as error:
            return str(error)
    return ""


# The key of an entry, and its location in a file.
_Entry = tuple[str, Any]


def _places(metadata: Metadata) -> dict[str, list[_Entry]]:
    """Returns the entries of a checkpoint by file."""
    found: dict[str, list[_Entry]] = {}
    for index, place in metadata.storage_data.items():
        found.setdefault(place.relative_path, []).append((index.fqn, place))
    return found


def _damaged_entries(folder: Path, name: str) -> str:
    """Describe the damaged entries of a file."""
    if name == METADATA:
        return "this file lists all entries"
    try:
        entries = _places(read_metadata(folder)).get(name, [])
    except (OSError, ValueError) as error:
        return f"entries unknown, because {METADATA} cannot be read ({type(error).__name__})"
    return _damaged_among(folder / name, entries)


def _damaged_among(path: Path, entries: Iterable[_Entry]) -> str:
    damaged = _find_damaged(path, entries)
    if damaged:
        return _listed(damaged)
    return "the data of all entries is intact, but entries in this block cannot be read"


def _find_damaged(
    path: Path, entries: Iterable[_Entry], progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """Returns the keys of the entries of a file whose checksums differ."""
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
    return f"damaged entries are {', '.join(names[:8])}{more}"
