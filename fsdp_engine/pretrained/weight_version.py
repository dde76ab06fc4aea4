"""``WeightVersion``: the weights that a receiver has, by which changed elements are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_engine.memory import allocator

# Number of elements that are compared at once. On a CPU they fit into its cache.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24
# Bytes of an index, which is int32 unless a tensor has more elements than int32 can represent.
INDEX_BYTES = 4

# If at least this fraction of groups of 8 bytes differs, all elements of the range are sent. In
# bf16 about one in three elements differs then, and sending all elements needs no more bytes than
# sending the changed ones with their indices.
MOST_GROUPS = 0.8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Changes:
    """The changed elements of a flat tensor.

    Attributes:
        runs: Ranges (start, stop) of which all elements are sent because many have changed, in
            order.
        elements: Indices of the other changed elements, int64, ascending. None: no such elements.
        values: The values of these elements.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    elements: Tensor | None = None
    values: Tensor | None = None


class WeightVersion:
    """This rank's part of the weights that a receiver has. Initially the receiver has none.

    ``weight_stream`` yields the changes since a version and updates the version. The object stores
    this rank's part of the model in the streamed dtype: (elements of the model) x (bytes of the
    dtype) / (number of ranks) bytes, at every level. One version represents one receiver, or
    several receivers that get the same items.

    Args:
        device: The device of the stored weights. None: the device of the model. "cpu" saves memory
            of a GPU; the stored weights are then copied to the GPU for the comparison, 16 million
            elements at a time.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else None
        self._tensors: dict[str, Tensor] = {}
        self._known: set[str] = set()
        self._is_used = False

    @property
    def nbytes(self) -> int:
        """The number of stored bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def clear(self) -> None:
        """Forget the stored weights, for example because the receiver was restarted. The next
        stream yields all weights."""
        self._tensors.clear()
        self._known.clear()

    def check(self, sent: Mapping[str, tuple[torch.dtype, int]]) -> None:
        """Check that this version contains no tensors but those in ``sent``, of the same dtypes and
        sizes.

        Args:
            sent: The dtype and the number of elements that this rank streams, by name.

        Raises:
            ValueError: The version contains other tensors.
            RuntimeError: Another iteration is updating the version.
        """
        if self._is_used:
            raise RuntimeError(
                "changed_since: expected a version that no other iteration uses; found one whose "
                "last iteration has not ended"
            )
        for name, tensor in self._tensors.items():
            dtype, count = sent.get(name, (None, 0))
            if tensor.dtype != dtype or tensor.numel() != count:
                expected = f"{count} elements of {dtype}" if dtype else "nothing"
                raise ValueError(
                    f"changed_since: expected a version of these weights, which has {expected} for "
                    f"{name}; found {tensor.numel()} elements of {tensor.dtype}. Pass a new "
                    "WeightVersion"
                )

    def begin(self) -> None:
        """Mark the start of an iteration."""
        self._is_used = True

    def end(self) -> None:
        """Mark the end of an iteration."""
        self._is_used = False

    def update(self, name: str, new: Tensor, dtype: torch.dtype) -> tuple[Changes, Tensor]:
        """Store new values. Returns the changes, and all values in the streamed dtype.

        Until :meth:`confirm` is called, the receiver is considered to have no values of the tensor.

        Args:
            name: The name of the tensor.
            new: The new values, 1-D.
            dtype: The streamed dtype.
        """
        old = self._tensors.get(name)
        is_known = name in self._known
        self._known.discard(name)
        if old is None:
            old = allocator.empty(new.numel(), dtype, self._device or new.device)
            self._tensors[name] = old
        if is_known:
            return take_changes(new, old), old
        old.copy_(new)
        return Changes(runs=[(0, new.numel())]), old

    def confirm(self, name: str) -> None:
        """Mark the changes of a tensor as received."""
        self._known.add(name)


def take_changes(new: Tensor, old: Tensor) -> Changes:
    """Copy ``new`` to ``old``. Returns the elements whose bits have changed.

    Args:
        new: The new values, 1-D.
        old: The earlier values, of the same length, in the streamed dtype, on any device.
    """
    found = Changes()
    elements: list[Tensor] = []
    values: list[Tensor] = []
    size = CHUNK if new.device.type == "cpu" else DEVICE_CHUNK
    scratch = allocator.empty(min(size, new.numel()), old.dtype, new.device)
    for start in range(0, new.numel(), size):
        stop = min(start + size, new.numel())
        known = old[start:stop]
        part = new[start:stop]
        if part.dtype != old.dtype:
            part = scratch[: stop - start].copy_(part)
        where = _differing(part, known.to(new.device))
        if where is None:
            known.copy_(part)
            if found.runs and found.runs[-1][1] == start:
                found.runs[-1] = (found.runs[-1][0], stop)
            else:
                found.runs.append((start, stop))
        elif where.numel():
            # The values are copied as integers, because torch cannot index all dtypes.
            changed = _bits(part).index_select(0, where).to(old.device)
            where = where.to(old.device)
            _bits(known).index_copy_(0, where, changed)
            elements.append(where.add_(start))
            values.append(changed.view(old.dtype))
    if elements:
        found.elements = torch.cat(elements)
        found.values = torch.cat(values)
    return found


def _differing(new: Tensor, old: Tensor) -> Tensor | None:
    """Returns the indices of the elements that differ, int64, ascending. None: so many elements
    differ that sending all of them needs no more bytes.

    Groups of elements are first compared as integers of 8 bytes, which takes a third of the time if
    they are equal.
    """
    count, width = new.numel(), 1
    lanes = max(8 // new.itemsize, 1)
    aligned = all(each.storage_offset() % lanes == 0 for each in (new, old))
    if lanes > 1 and aligned and count % lanes == 0:
        width = lanes
        differs = new.view(torch.int64) != old.view(torch.int64)
    else:
        differs = _bits_differ(new, old)
    num_groups = int(torch.count_nonzero(differs))
    if num_groups >= MOST_GROUPS * (count // width):
        return None
    (groups,) = differs.nonzero(as_tuple=True)
    if width > 1:
        rows = [_bits(each).view(-1, width).index_select(0, groups) for each in (new, old)]
        group, lane = _bits_differ(*rows).nonzero(as_tuple=True)
        groups = groups.index_select(0, group).mul_(width).add_(lane)
    if groups.numel() * (INDEX_BYTES + new.itemsize) >= count * new.itemsize:
        return None
    return groups


def _bits_differ(new: Tensor, old: Tensor) -> Tensor:
    if new.itemsize > 8:  # the two parts of a complex number
        wide = [torch.view_as_real(each).view(torch.int64) for each in (new, old)]
        return (wide[0] != wide[1]).any(-1)
    return _bits(new) != _bits(old)


def _bits(tensor: Tensor) -> Tensor:
    """Returns a view as integers of the same size, if these exist. NaNs of the same bits compare
    equal then, and 0.0 and -0.0 differ."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.itemsize <= 8 else tensor
