"""Describes a checkpoint, and compares two checkpoints. Prints nothing.

The two checkpoints may have been saved with different numbers of ranks and different levels. A
comparison needs bounded memory: both tensors are read in the same flat ranges, independent of their
chunks, and no full tensor is in memory. The length of a range is chosen so that the ranges of both
tensors and the temporary tensors of their comparison fit into ``buffer_bytes``. Other entries
(hyperparameters, ``extra``) are read one at a time.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.checkpoint.export_source import saved_parts
from fsdp_engine.checkpoint.extra_tensors import Reference
from fsdp_engine.checkpoint.manifest import TensorRow
from fsdp_engine.checkpoint.model_state import (
    EXTRA,
    OPTIMIZER,
    RANKS,
    STAGE,
    TRAINABLE_ONLY,
)
from fsdp_engine.checkpoint.offline import OTHER, StoredCheckpoint, count_files, stray_files
from fsdp_engine.checkpoint.optimizer_state import GROUPS, KIND
from fsdp_engine.checkpoint.reader import READ_BUFFER_BYTES, ReadBuffer, Reader
from fsdp_engine.memory.allocator import as_bytes

# Maximum number of an optimizer's groups that are described.
MAX_GROUPS = 16
# Maximum bytes of an object that is read for a description.
MAX_OBJECT_BYTES = 16 << 20
# Maximum length of a sequence of numbers whose differences are listed one by one.
MAX_NUMBERS = 32

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component of a dotted name


@dataclasses.dataclass
class SectionRow:
    """The numbers of tensors, of their elements and bytes, and of other objects in a section."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0
    objects: int = 0


@dataclasses.dataclass(frozen=True)
class GroupRow:
    """A param group of an optimizer: its index, number of parameters, and hyperparameters."""

    number: str
    parameters: int
    hyperparameters: dict[str, Any]


class Summary(str):
    """A text in place of a value: its dtype and shape, its size, or why it cannot be read."""

    def __repr__(self) -> str:
        return str(self)


@dataclasses.dataclass(frozen=True)
class Description:
    """The contents of a checkpoint. Values that it does not contain are None.

    Attributes:
        path: The folder of the checkpoint.
        step: The step, by the manifest or by the name of a trainer's folder.
        world_size, mesh, strategy, libraries: The values in the manifest.
        saved_at: The time at which the checkpoint was completed, in ISO 8601.
        trainable_only: Whether the checkpoint was saved without frozen parameters.
        ties: The first name of a tied weight, by each of its further names.
        num_files, num_bytes: The number and the total bytes of existing files.
        missing_files, stray_files: Names of files that do not exist, and of files that do not
            belong to the checkpoint.
        sections: The counts of each section: model (with buffers, and a tied weight under each of
            its names), optimizer, extra, ranks, and "other".
        optimizer: The name of the optimizer's class.
        groups: The first ``MAX_GROUPS`` param groups of the optimizer.
        num_groups: The number of all param groups.
        extra: The values in ``extra`` of rank 0 by path. Values that JSON cannot represent, and a
            dict of tensors, are a :class:`Summary`.
        num_ranks: The number of ranks that have saved random states and ``extra``.
        tensors: A row for each tensor, by section and name.
    """

    path: str
    step: int | None
    saved_at: str
    world_size: int | None
    mesh: dict[str, int] | None
    strategy: dict[str, str] | None
    libraries: dict[str, str] | None
    trainable_only: bool
    ties: dict[str, str]
    num_files: int
    num_bytes: int
    missing_files: list[str]
    stray_files: list[str]
    sections: dict[str, SectionRow]
    optimizer: str | None
    groups: list[GroupRow]
    num_groups: int
    extra: dict[str, Any]
    num_ranks: int
    tensors: list[TensorRow]


def describe(checkpoint: StoredCheckpoint) -> Description:
    """Describe a checkpoint. Reads no tensors except those of one element in groups and extra."""
    manifest, saved = checkpoint.manifest, checkpoint.saved
    files = checkpoint.files()
    num_files, num_bytes = count_files(checkpoint.folder, files)
    sections: dict[str, SectionRow] = {}
    rows: dict[str, list[TensorRow]] = {}
    for key in saved.entries:
        if key in (TRAINABLE_ONLY, STAGE):
            continue
        name = checkpoint.section(key)
        section = sections.setdefault(name, SectionRow())
        row = checkpoint.tensors.get(key)
        if row is None:
            section.objects += 1
        else:
            section.tensors += 1
            section.elements += math.prod(row.shape)
            section.bytes += tensor_bytes(row)
            rows.setdefault(name, []).append(row)
    kinds = saved.below(OPTIMIZER, KIND)
    groups, num_groups = _groups(checkpoint)
    return Description(
        path=str(checkpoint.folder),
        step=checkpoint.step,
        saved_at=checkpoint.saved_at().isoformat(timespec="seconds"),
        world_size=None if manifest is None else manifest.world_size,
        mesh=None if manifest is None else manifest.mesh,
        strategy=None if manifest is None else manifest.strategy,
        libraries=None if manifest is None else manifest.libraries,
        trainable_only=saved.is_trainable_only,
        ties={} if manifest is None else manifest.ties,
        num_files=num_files,
        num_bytes=num_bytes,
        missing_files=sorted(name for name in files if not (checkpoint.folder / name).is_file()),
        stray_files=stray_files(checkpoint.folder, files),
        sections=sections,
        optimizer=str(_value(checkpoint, kinds[0])) if kinds else None,
        groups=groups,
        num_groups=num_groups,
        extra=_extra(checkpoint),
        num_ranks=len(saved.below(RANKS)),
        tensors=[row for name in sections for row in sorted(rows.get(name, ()), key=_place)],
    )


def _place(row: TensorRow) -> list[tuple[bool, int, str]]:
    """Returns a key that sorts names by their components, and numbers by their values."""
    parts = row.name.split(".")
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def tensor_bytes(row: TensorRow) -> int:
    """Returns the size of a tensor in bytes."""
    dtype: torch.dtype = getattr(torch, row.dtype)
    return math.prod(row.shape) * dtype.itemsize


def shorten(value: Any, length: int = 100) -> str:
    """Format a value in one line of at most ``length`` characters. A summary is unchanged."""
    if isinstance(value, Summary):
        return value
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = f"{value.item()!r} ({dtype})" if value.numel() == 1 else f"{dtype} {[*value.shape]}"
        return str(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _groups(checkpoint: StoredCheckpoint) -> tuple[list[GroupRow], int]:
    """Returns the first groups of the optimizer, and the number of groups."""
    saved = checkpoint.saved
    keys: dict[Any, list[str]] = {}
    for key in saved.below(OPTIMIZER, GROUPS):
        if len(saved.paths[key]) > 3:
            keys.setdefault(saved.paths[key][2], []).append(key)
    rows = []
    for number in list(keys)[:MAX_GROUPS]:
        hyperparameters: dict[str, Any] = {}
        parameters = 0
        for key in keys[number]:
            name = str(saved.paths[key][3])
            if name != "params":
                hyperparameters[name] = _value(checkpoint, key)
            elif len(saved.paths[key]) > 4:  # an entry for each parameter name
                parameters += 1
            else:
                parameters += len(_names(checkpoint, key))
        rows.append(GroupRow(str(number), parameters, hyperparameters))
    return rows, len(keys)


def _names(checkpoint: StoredCheckpoint, key: str) -> list[Any]:
    try:
        value = checkpoint.read_value(key)
    except (OSError, ValueError, EOFError):
        return []
    return value if isinstance(value, list) else []


def _extra(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Returns the values of the user's ``extra`` by name."""
    values: dict[str, Any] = {}
    for key in checkpoint.saved.below(EXTRA):
        name = ".".join(map(str, checkpoint.saved.paths[key][1:]))
        if name:
            values[name] = _value(checkpoint, key)
            continue
        size = checkpoint.object_bytes(key)
        try:
            value = checkpoint.read_value(key) if size <= MAX_OBJECT_BYTES else None
        except (OSError, ValueError, EOFError) as error:
            values[key] = Summary(f"unreadable: {error}")
            continue
        if isinstance(value, Mapping):
            values |= _by_path(value)
        else:
            values[key] = Summary(f"{size:,} bytes")
    return values


def _by_path(values: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by path."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{above}{name}"
        if not isinstance(value, Mapping) or not value:
            found[path] = _as_json(value)
            continue
        shapes = [each.shape for each in value.values() if isinstance(each, Reference | Tensor)]
        if len(shapes) == len(value) > 1:
            elements = sum(map(math.prod, shapes))
            found[path] = Summary(f"{len(shapes):,} tensors, {elements:,} elements")
        else:
            found |= _by_path(value, f"{path}.")
    return found


def _value(checkpoint: StoredCheckpoint, key: str) -> Any:
    """Returns a value of the checkpoint, or a summary if it is large or cannot be read."""
    row = checkpoint.tensors.get(key)
    if row is not None and math.prod(row.shape) != 1:
        return Summary(f"{row.dtype} {[*row.shape]}")
    if row is None and (size := checkpoint.object_bytes(key)) > MAX_OBJECT_BYTES:
        return Summary(f"{size:,} bytes")
    try:
        return _as_json(checkpoint.read_value(key))
    except (OSError, ValueError, EOFError) as error:
        return Summary(f"unreadable: {error}")


def _as_json(value: Any) -> Any:
    """Returns ``value`` with a summary in place of each value that JSON cannot represent."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else Summary(value)
    if type(value) in (list, tuple):
        return type(value)(map(_as_json, value))
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    return Summary(shorten(value))


@dataclasses.dataclass
class TensorGroup:
    """Tensors of one shape and dtype whose names differ only in numbers.

    Attributes:
        name: The common name, with a star for each number that differs.
        count: Number of tensors.
        shape: The shape of each tensor.
        dtype: The dtype of each tensor.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str

    def add(self, name: str) -> None:
        """Add a tensor whose name differs from the others only in numbers."""
        pairs = zip(self.name.split("."), name.split("."), strict=True)
        self.name = ".".join(mine if mine == other else "*" for mine, other in pairs)
        self.count += 1


def group_tensors(rows: Iterable[TensorRow]) -> list[TensorGroup]:
    """Group rows such as ``blocks.0.weight`` and ``blocks.1.weight``, ordered by the first
    member."""
    groups: dict[Any, TensorGroup] = {}
    for row in rows:
        key = (_NUMBER.sub("*", row.name), row.shape, row.dtype)
        if key in groups:
            groups[key].add(row.name)
        else:
            groups[key] = TensorGroup(row.name, 1, row.shape, row.dtype)
    return list(groups.values())


def matches(key: str, pattern: str | None) -> bool:
    """Returns whether a key, with or without section, matches a pattern such as ``*.weight``."""
    if pattern is None:
        return True
    return fnmatchcase(key, pattern) or fnmatchcase(key.partition(".")[2], pattern)


# Additional bytes to compare two elements: copies (complex128, or halves of integers), magnitudes
# and flags.
_WORK_BYTES = 2 * 16 + 3 * 8 + 8
_HALF = 2**32


@dataclass
class TensorDifference:
    """The difference of a tensor in two checkpoints.

    Attributes:
        name: The key of the tensor.
        section: The section of the checkpoint: model, optimizer, ...
        shape: The shape of the tensor in both checkpoints.
        num_elements: The number of elements of the tensor.
        num_different: The number of elements that differ by more than the tolerance.
        num_nan: The number of these elements that are NaN in only one checkpoint.
        max_abs: The largest absolute difference, without such NaNs.
        square_sum: The sum of the squares of all differences, without such NaNs.
        is_integer: Whether the tensor has integers (or booleans) in both checkpoints.
    """

    name: str
    section: str
    shape: tuple[int, ...]
    num_elements: int
    num_different: int = 0
    num_nan: int = 0
    max_abs: float = 0.0
    square_sum: float = 0.0
    is_integer: bool = False

    @property
    def norm(self) -> float:
        """Euclidean norm of the difference."""
        return math.sqrt(self.square_sum)


@dataclass
class Difference:
    """The differences of two checkpoints.

    Attributes:
        only_in_a, only_in_b: Keys of only one checkpoint.
        other: A line for each entry whose shape, dtype or type differs.
        values: A line for each object or number that differs by more than the tolerance.
        tensors: Tensors with elements that differ, including those within the tolerance and those
            within objects.
        num_compared: The number of compared tensors, which have the same shape in both. Tensors
            within objects are not counted.
        left_out: Keys that were not compared.
    """

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    num_compared: int = 0
    left_out: list[str] = field(default_factory=list)

    @property
    def norm(self) -> float:
        """Euclidean norm of the difference of all tensors but those of integers, such as the
        number of batches of a BatchNorm."""
        return math.sqrt(sum(value**2 for value in self.norms.values()))

    @property
    def norms(self) -> dict[str, float]:
        """Euclidean norm of the difference of each section that differs, without tensors of
        integers."""
        sums: dict[str, float] = {}
        for each in self.tensors:
            if not each.is_integer:
                sums[each.section] = sums.get(each.section, 0.0) + each.square_sum
        return {section: math.sqrt(value) for section, value in sums.items()}

    def add(self, tensor: TensorDifference) -> None:
        """Add the difference of a tensor, unless all elements are equal."""
        if tensor.num_different or tensor.max_abs:
            self.tensors.append(tensor)

    @property
    def is_empty(self) -> bool:
        """Whether everything is equal, within the tolerance."""
        lines = self.only_in_a or self.only_in_b or self.other or self.values
        return not lines and not any(each.num_different for each in self.tensors)


def shared_bytes(a: StoredCheckpoint, b: StoredCheckpoint, match: str | None = None) -> int:
    """Returns the number of bytes of tensors that :func:`compare` reads, for a progress bar."""
    return sum(
        tensor_bytes(a.tensors[key]) + tensor_bytes(b.tensors[key])
        for key in a.tensors.keys() & b.tensors.keys()
        if matches(key, match) and a.tensors[key].shape == b.tensors[key].shape
    )


def compare(
    a: StoredCheckpoint,
    b: StoredCheckpoint,
    *,
    match: str | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    ranks: bool = False,
    buffer_bytes: int = READ_BUFFER_BYTES,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Difference:
    """Compare steps, tensors, hyperparameters and ``extra`` of two checkpoints.

    World sizes, meshes, levels and files are not compared. Two NaNs are equal.

    Args:
        a, b: The checkpoints.
        match: Shell pattern of keys, with or without the section. Only matching entries are
            compared, and steps are not.
        rtol, atol: Elements are equal if ``|a - b| <= atol + rtol * |b|``.
        ranks: Also compare the entries of single ranks (random states).
        buffer_bytes: Maximum number of bytes of memory.
        progress: Function that is called with the number of compared bytes of both checkpoints.

    Raises:
        ValueError: ``match`` matches nothing, or an entry cannot be read.
        OSError, EOFError: A file is missing or too short.
    """
    keys_a = [key for key in a.saved.entries if matches(key, match)]
    keys_b = [key for key in b.saved.entries if matches(key, match)]
    if match is not None and not keys_a and not keys_b:
        raise ValueError(f"match: expected a pattern of entries; found none like {match!r}")
    found = Difference()
    if not ranks:
        found.left_out = [key for key in keys_a if a.section(key) == RANKS]
        found.left_out += [
            key for key in keys_b if b.section(key) == RANKS and key not in a.saved.entries
        ]
        left_out = set(found.left_out)
        keys_a = [key for key in keys_a if key not in left_out]
        keys_b = [key for key in keys_b if key not in left_out]
    in_a, in_b = set(keys_a), set(keys_b)
    found.only_in_a = [key for key in keys_a if key not in in_b]
    found.only_in_b = [key for key in keys_b if key not in in_a]
    objects = _Objects(found, rtol, atol)
    if match is None and a.step is not None and b.step is not None:
        objects.compare("step", OTHER, a.step, b.step)
    pairs = _Pairs(a, b, buffer_bytes)
    for key in keys_a:
        if key not in in_b:
            continue
        row_a, row_b = a.tensors.get(key), b.tensors.get(key)
        if row_a is None and row_b is None:
            if a.read_object(key) != b.read_object(key):
                objects.compare(key, a.section(key), a.read_value(key), b.read_value(key))
        elif row_a is None or row_b is None:
            found.other.append(f"{key}: {a.saved.describe(key)}; {b.saved.describe(key)}")
        else:
            if (row_a.shape, row_a.dtype) != (row_b.shape, row_b.dtype):
                found.other.append(f"{key}: {a.saved.describe(key)}; {b.saved.describe(key)}")
            if row_a.shape == row_b.shape:
                found.num_compared += 1
                different = TensorDifference(
                    key, a.section(key), row_a.shape, math.prod(row_a.shape)
                )
                for part_a, part_b in pairs.parts(key):
                    _add(different, part_a, part_b, rtol, atol)
                    progress(part_a.nbytes + part_b.nbytes)
                found.add(different)
    return found


@dataclass
class _Objects:
    """Adds the differences of objects to ``found``."""

    found: Difference
    rtol: float
    atol: float

    def compare(self, name: str, section: str, a: Any, b: Any) -> None:
        """Add a line for each value that differs, with its path, and each tensor that differs."""
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in [*a, *(key for key in b if key not in a)]:
                if key not in a or key not in b:
                    side, value = ("first", a[key]) if key in a else ("second", b[key])
                    self.found.values.append(f"{name}.{key}: only in the {side}: {shorten(value)}")
                else:
                    self.compare(f"{name}.{key}", section, a[key], b[key])
        elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            if len(a) > MAX_NUMBERS and all(isinstance(each, int | float) for each in (*a, *b)):
                self._compare_numbers(name, a, b)
                return
            for number, (one, other) in enumerate(zip(a, b, strict=True)):
                self.compare(f"{name}.{number}", section, one, other)
        elif _is_strided(a) and _is_strided(b) and (a.shape, a.dtype) == (b.shape, b.dtype):
            different = TensorDifference(name, section, tuple(a.shape), a.numel())
            _add(different, a, b, self.rtol, self.atol)
            self.found.add(different)
        elif not (_equal(a, b) or self._is_within_tolerance(a, b)):
            self.found.values.append(f"{name}: {shorten(a)}; {shorten(b)}")

    def _compare_numbers(self, name: str, a: Sequence[float], b: Sequence[float]) -> None:
        """Add one line for two long sequences of numbers, such as random states."""
        pairs = zip(a, b, strict=True)
        count = sum(not (_equal(*pair) or self._is_within_tolerance(*pair)) for pair in pairs)
        if count:
            self.found.values.append(f"{name}: {count:,} of {len(a):,} numbers differ")

    def _is_within_tolerance(self, a: Any, b: Any) -> bool:
        """Returns whether two floats, or a float and an int, are equal within the tolerance."""
        if not (isinstance(a, float) or isinstance(b, float)):
            return False
        if not (isinstance(a, float | int) and isinstance(b, float | int)):
            return False
        try:
            gap, size = abs(a - b), abs(float(b))
        except OverflowError:  # an int that no float can hold
            return False
        return math.isfinite(gap) and gap <= self.atol + self.rtol * size


class _Pairs:
    """Reads the same ranges of a tensor from two checkpoints."""

    def __init__(self, a: StoredCheckpoint, b: StoredCheckpoint, buffer_bytes: int) -> None:
        self._sides = (a, b)
        self._work_bytes = buffer_bytes * 3 // 4
        self._readers = []
        for side in self._sides:
            # The reader has a buffer for elements that cannot be read in place.
            self._readers.append(Reader(side.folder, side.metadata, buffer_bytes // 8))

    def parts(self, key: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield consecutive flat ranges of both tensors. Each range overwrites the previous one."""
        entries: list[Any] = [side.saved.entries[key] for side in self._sides]
        sizes = [entry.properties.dtype.itemsize for entry in entries]
        length = max(self._work_bytes // (sum(sizes) + _WORK_BYTES), 1)
        first, second = (
            saved_parts(reader, key, entry, ReadBuffer(length * size))
            for reader, entry, size in zip(self._readers, entries, sizes, strict=True)
        )
        for (_, part_a), (_, part_b) in zip(first, second, strict=True):
            yield part_a, part_b


def _add(found: TensorDifference, a: Tensor, b: Tensor, rtol: float, atol: float) -> None:
    """Add the difference of two tensors, or of the same range of both, to ``found``."""
    if not a.numel() or (a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))):
        return
    found.is_integer = _is_integer(a.dtype) and _is_integer(b.dtype)
    gap, size, same = _gaps(a, b)
    is_nan = gap.isnan()
    beyond = is_nan | gap.isinf()  # infinity is within no tolerance
    beyond |= gap > size.mul_(rtol).add_(atol)
    beyond &= ~same
    is_nan &= ~same
    gap.masked_fill_(same | is_nan, 0.0)
    found.num_different += int(beyond.sum())
    found.num_nan += int(is_nan.sum())
    found.max_abs = max(found.max_abs, float(gap.max()))
    found.square_sum += float(gap.square_().sum())


def _gaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``|a - b|`` and ``|b|`` in float64, and a mask of equal elements."""
    if _is_integer(a.dtype) and _is_integer(b.dtype):
        # Each half of an integer fits exactly into float64, so a difference is rounded only once.
        # int64 could not hold all differences, and float64 not all integers above 2**53.
        (high_x, low_x), (high_y, low_y) = _halves(a), _halves(b)
        gap = (high_x - high_y).to(torch.float64).mul_(_HALF).add_(low_x - low_y).abs_()
        size = high_y.to(torch.float64).mul_(_HALF).add_(low_y).abs_()
        return gap, size, (high_x == high_y) & (low_x == low_y)
    is_complex = a.dtype.is_complex or b.dtype.is_complex
    dtype = torch.complex128 if is_complex else torch.float64
    x, y = a.to(dtype), b.to(dtype)
    same = (x == y) | (x.isnan() & y.isnan())
    return x.sub_(y).abs(), y.abs(), same


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split integers into int64 tensors ``high`` and ``low``: ``values = high * 2**32 + low``."""
    bits = values.to(torch.int64)
    high, low = bits >> 32, bits & (_HALF - 1)
    # An unsigned integer from 2**63 on has become negative.
    return (high & (_HALF - 1) if values.dtype == torch.uint64 else high), low


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    try:
        same = a == b or (a != a and b != b)
        return bool(same)
    except Exception:  # NumPy arrays have no single truth value
        return pickle.dumps(a) == pickle.dumps(b)
