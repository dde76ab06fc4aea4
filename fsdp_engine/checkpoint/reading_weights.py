"""Reads a rank's slices of stored tensors into a sharded model.

Each rank matches all names, shapes and dtypes, so that all ranks find the same errors and raise
them before anything is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from fsdp_engine.checkpoint.export_source import parts_of
from fsdp_engine.checkpoint.model_state import describe_tensor, holds_exactly, is_extra_state
from fsdp_engine.checkpoint.pieces import Box, Pieces, flat_parts
from fsdp_engine.checkpoint.reader import ReadBuffer, read_box
from fsdp_engine.checkpoint.safetensors_folder import TensorInFile
from fsdp_engine.checkpoint.sharded_model import ShardedModel
from fsdp_engine.comm.agreement import agree
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import as_bytes

# Number of reads in flight, and bytes of the buffer of each.
READERS = 4
BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class Target:
    """A flat range of ``pieces`` to read, from element ``first`` on, into ``local``."""

    pieces: Pieces
    first: int
    local: Tensor


@dataclass(frozen=True)
class TiedCopies:
    """Two stored tensors that are read into one tied weight, so that they must be equal.

    Attributes:
        names: The names of both tensors.
        pieces: Both tensors.
        dtype: The dtype of the weight.
        ranges: The flat ranges that this rank holds: first element, number of elements.
    """

    names: tuple[str, str]
    pieces: tuple[Pieces, Pieces]
    dtype: torch.dtype
    ranges: tuple[tuple[int, int], ...]

    def are_equal(self) -> bool:
        """Returns whether this rank's elements of both tensors are equal in the weight's dtype,
        or in the narrower dtype of both."""
        step = max(BUFFER_BYTES // self.dtype.itemsize, 1)
        # The same weight may be stored in two dtypes, one of which has rounded it.
        narrow = min((each.dtype for each in self.pieces), key=lambda each: each.itemsize)
        for first, numel in self.ranges:
            for start in range(first, first + numel, step):
                shape = 2, min(step, first + numel - start)
                a, b = allocator.empty(shape, self.dtype, "cpu")
                read([Target(self.pieces[0], start, a), Target(self.pieces[1], start, b)])
                if not are_same(a.to(narrow), b.to(narrow)):
                    return False
        return True


@dataclass
class Match:
    """The match of stored tensors with the tensors of a model.

    Attributes:
        targets: The ranges that this rank reads.
        copies: The tied weights that are stored under several names.
        missing: Descriptions of the expected tensors that are not stored, by name.
        unexpected: Descriptions of the stored tensors that are not in the model, by name.
        problems: A line for each tensor that has another shape or dtype or is stored twice.
    """

    targets: list[Target] = field(default_factory=list)
    copies: list[TiedCopies] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def raise_for(self, where: str, *, strict: bool) -> None:
        """Raise an error if there are problems.

        Args:
            where: The path that is read, for the message.
            strict: Treat missing and unexpected tensors as problems.

        Raises:
            ValueError: There are problems; the message lists all of them.
        """
        problems = list(self.problems)
        if strict:
            problems += [
                f"missing {name}: expected {what}; found nothing"
                for name, what in self.missing.items()
            ]
            problems += [
                f"unexpected {name}: expected nothing; found {what}"
                for name, what in self.unexpected.items()
            ]
        if problems:
            raise ValueError(
                f"{where}: expected the tensors of this model; found {len(problems)} that differ"
                f"{listed(problems)}"
            )

    def check_copies(self, where: str) -> None:
        """Check that the stored tensors of each tied weight are equal. Reads this rank's slices.

        Args:
            where: The path that is read, for the message.

        Raises:
            ValueError: Tensors differ; the message names them.
            OSError, EOFError: A file cannot be read.
        """
        found = [each.names for each in self.copies if not each.are_equal()]
        if found:
            raise ValueError(f"{where}: {untied_text(found)}")


def are_same(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors have equal elements, or the same bits (NaN)."""
    return torch.equal(a, b) or torch.equal(as_bytes(a), as_bytes(b))


def untied_text(pairs: Sequence[tuple[str, str]]) -> str:
    """Returns the error message for a tied weight that is stored under two names with two values.

    Args:
        pairs: The two names of each such weight.
    """
    names = "; ".join(f"{first} and {second}" for first, second in pairs)
    return (
        f"expected equal values for the names of each tied weight; found different ones for {names}"
        ". The model that was saved had separate weights: build this model with separate weights, "
        "too (in transformers: tie_word_embeddings=False)"
    )


def listed(problems: Sequence[str]) -> str:
    """Returns problems of a load as indented lines. If names of compiled models occur in them,
    advice precedes the lines."""
    lines = "".join(f"\n  {each}" for each in problems)
    if "_orig_mod." not in lines:
        return lines
    return (
        ". torch.compile(model) puts _orig_mod. before names: compile the model in both jobs, or "
        f"in neither. block.compile() keeps the names{lines}"
    )


def whole(stored: TensorInFile) -> Pieces:
    """Returns the pieces of a tensor that equals one stored tensor."""
    return Pieces.of(stored, stored.shape, stored.dtype)


def match(
    engine: ShardedModel,
    stored: Mapping[str, Sequence[Pieces]],
    wanted: Collection[str] | None = None,
) -> Match:
    """Match stored tensors with a model.

    Args:
        engine: The engine whose weights and persistent buffers are replaced.
        stored: The stored tensors by the model's names; several tensors for one name are a problem.
            A tied weight may be stored under any of its names.
        wanted: The names of the tensors to read. None: all.
    """
    found = Match()
    for name, all_of_it in stored.items():
        if len(all_of_it) > 1:
            places = " and ".join(map(_names_of, all_of_it))
            found.problems.append(
                f"{name}: expected one stored tensor for this parameter; found {places}"
            )
    owned: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            owned.setdefault(id(value), (value, []))[1].append(name)
    unexpected = dict(stored)
    for tensor, names in owned.values():
        if wanted is not None and not any(name in wanted for name in names):
            continue
        expected = describe_tensor(tuple(tensor.shape), tensor.dtype)
        stored_names = [name for name in names if name in stored]
        present = [unexpected.pop(name)[0] for name in stored_names]
        if not present:
            found.missing[names[0]] = expected
        for each in present:
            if each.shape != tensor.shape or not _is_readable(each.dtype, tensor.dtype):
                found.problems.append(f"{names[0]}: expected {expected}; found {_described(each)}")
        if present:
            parts = parts_of(tensor)
            found.targets += [Target(present[0], *part) for part in parts]
            ranges = tuple((first, local.numel()) for first, local in parts)
            found.copies += [
                TiedCopies((stored_names[0], other), (present[0], each), tensor.dtype, ranges)
                for other, each in zip(stored_names[1:], present[1:], strict=True)
            ]
    for name, all_of_it in unexpected.items():
        found.unexpected[name] = _described(all_of_it[0])
    return found


def _is_readable(stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Returns whether tensors of the dtype ``stored`` may be read into tensors of ``dtype``.

    Floating-point values may be rounded to a narrower floating-point dtype; integers may not.
    """
    if stored.is_floating_point or stored.is_complex:
        return torch.can_cast(stored, dtype)
    return holds_exactly(dtype, stored)


def read(
    targets: Sequence[Target], progress: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Read this rank's slices, in the order of the files, with several reads in flight.

    Args:
        targets: The ranges that :func:`match` found.
        progress: Function that is called with the number of stored bytes of each part.

    Raises:
        OSError, EOFError: A file cannot be read.
    """
    reads = sorted(
        (each for target in targets for each in _reads(target)),
        key=lambda each: (each.stored.path, each.stored.start, each.box.starts),
    )
    with _Files() as files, ThreadPoolExecutor(READERS) as pool:
        for num_bytes in pool.map(files.read, reads):
            progress(num_bytes)


def replace_weights(
    what: str,
    engine: ShardedModel,
    fill: Callable[[], None],
    finish: Callable[[], None] = lambda: None,
    *,
    names: Collection[str] | None = None,
) -> None:
    """Replace weights and persistent buffers by calling ``fill``. Collective.

    Args:
        what: The name of the operation in messages.
        engine: The engine of the model.
        fill: Function that replaces values. It must not communicate.
        finish: Function that is called when ``fill`` has returned on all ranks. It may communicate.
        names: The names of the entries that ``fill`` replaces; None: all.

    Raises:
        RuntimeError: ``fill`` failed on some rank. Forwards and saves raise until weights are
            loaded.
    """
    error: Exception | None = None
    names = engine.model.state_dict() if names is None else names
    with engine.missing_values.replacing(names):
        try:
            fill()
        except Exception as caught:
            error = RuntimeError(
                f"{what} failed while reading, and weights are partly replaced: "
                f"{type(caught).__name__}: {caught}"
            )
            error.__cause__ = caught
        finally:
            engine.weights_changed()
        agree(what, error, engine.ranks.control_group)
        finish()
        engine.weights_changed()


@dataclass(frozen=True)
class _Read:
    """A box of a stored tensor, and a tensor of its shape to read it into."""

    stored: TensorInFile
    box: Box
    target: Tensor


def _reads(target: Target) -> Iterator[_Read]:
    pieces, local, first = target.pieces, target.local, target.first
    if not local.is_contiguous():  # an unsharded tensor with other strides
        assert local.shape == pieces.shape, f"{local.shape} of {pieces.shape}"
        for box in pieces.boxes:
            yield _read(box, local, local.stride(), int(local.storage_offset()))
        return
    if len(pieces.boxes) == 1:
        pieces = pieces.reshape(-1)  # a range of one stored tensor can be read at once
    begin = int(local.storage_offset()) - first
    for box, steps in flat_parts(pieces, first, first + local.numel()):
        yield _read(box, local, steps, begin)


def _read(box: Box, local: Tensor, steps: Sequence[int], begin: int) -> _Read:
    """Returns the read of ``box`` into the memory of ``local``.

    Args:
        box: The box to read.
        local: This rank's elements of the unsharded tensor.
        steps: The strides of the unsharded tensor.
        begin: The offset in the storage of ``local`` at which the unsharded tensor would begin.
    """
    offset = begin + sum(at * step for at, step in zip(box.at, steps, strict=True))
    own_steps = dict(zip(box.dims, steps, strict=True))
    strides = [own_steps.get(dim, 1) for dim in range(len(box.shape))]
    return _Read(box.stored, box, local.as_strided(box.lengths, strides, offset))


class _Files:
    """The open files and buffers of each thread."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._open: list[BinaryIO] = []

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *args: object) -> None:
        for file in self._open:
            file.close()

    def read(self, each: _Read) -> int:
        """Read a box. Returns the number of stored bytes."""
        stored, box = each.stored, each.box
        own = self._own.__dict__
        buffer = own.setdefault("buffer", ReadBuffer(BUFFER_BYTES))
        files: dict[Path, BinaryIO] = own.setdefault("files", {})
        if stored.path not in files:
            # The file is unbuffered, because other ranks read the following bytes.
            files[stored.path] = open(stored.path, "rb", buffering=0)  # noqa: SIM115
            self._open.append(files[stored.path])
        with torch.no_grad():
            read_box(
                files[stored.path],
                stored.start,
                box.shape,
                stored.dtype,
                box.starts,
                box.lengths,
                each.target,
                buffer,
            )
        return each.target.numel() * stored.dtype.itemsize


def _described(pieces: Pieces) -> str:
    return f"{describe_tensor(tuple(pieces.shape), pieces.dtype)} ({_names_of(pieces)})"


def _names_of(pieces: Pieces) -> str:
    places = dict.fromkeys(f"{box.stored.name} in {box.stored.path.name}" for box in pieces.boxes)
    first, *others = places or ["nothing"]
    return f"{first} and {len(others)} more" if others else first
