"""What a receiver has of a rank's weights, and what has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp_engine.devices import memory

# Elements that are compared at a time: on a CPU they stay in its cache meanwhile.
CHUNK = 1 << 18
DEVICE_CHUNK = 1 << 24
# Of an index: int32, unless a tensor has more elements than that can count.
INDEX_BYTES = 4

# With this share of groups of elements that differ, a range is sent without looking further: there
# are then about as many that differ as make it worth it (one in three, in bf16).
MOST_GROUPS = 0.8

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Changes:
    """What has changed of a flat tensor.

    Attributes:
        runs: ranges of which so much has changed that they are sent whole, in order.
        elements: numbers of the others that have changed, int64, ascending; None: none.
        values: theirs.
    """

    runs: list[tuple[int, int]] = field(default_factory=list)
    elements: Tensor | None = None
    values: Tensor | None = None


class WeightVersion:
    """What a receiver has of the weights that this rank sends: nothing, at first.

    Given to :func:`weight_stream`, which sends what has changed since and brings the version up to
    date. It holds this rank's part of the model, in the dtype that is sent: (elements of the model)
    x (bytes of the dtype) / (number of ranks) bytes, whatever the level. One version stands for one
    receiver, or for several that get the same.

    Args:
        device: where it lies. None: where the weights are. "cpu" keeps it off a GPU; it is then
            copied there for the comparison, some 16 million elements at a time.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else None
        self._tensors: dict[str, Tensor] = {}
        self._known: set[str] = set()
        self._is_used = False

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def clear(self) -> None:
        """The receiver has nothing (it was started again): the next stream sends everything."""
        self._tensors.clear()
        self._known.clear()

    def check(self, sent: Mapping[str, tuple[torch.dtype, int]]) -> None:
        """Whether this is a version of these tensors, or of none yet.

        Args:
            sent: dtype and number of elements that this rank sends, by name.

        Raises:
            ValueError: it is not.
            RuntimeError: another stream is bringing it up to date.
        """
        if self._is_used:
            raise RuntimeError(
                "changed_since: expected a version that no other iteration uses; found one that is "
                "not at its end"
            )
        for name, tensor in self._tensors.items():
            dtype, count = sent.get(name, (None, 0))
            if tensor.dtype != dtype or tensor.numel() != count:
                raise ValueError(
                    f"changed_since: expected a version of these weights, with {count} elements of "
                    f"{dtype} of {name}; found {tensor.numel()} of {tensor.dtype}. Begin with a "
                    "new one"
                )

    def begin(self) -> None:
        """A stream uses it."""
        self._is_used = True

    def end(self) -> None:
        """That stream is at its end, or was left."""
        self._is_used = False

    def update(self, name: str, new: Tensor, dtype: torch.dtype) -> tuple[Changes, Tensor]:
        """Take new values; what has changed, and all of them as the version has them now. Until
        :meth:`confirm` the receiver counts as having none of this tensor.

        Args:
            name: of the tensor.
            new: the values, 1-D.
            dtype: in which they are sent.
        """
        old = self._tensors.get(name)
        is_known = name in self._known
        self._known.discard(name)
        if old is None:
            old = memory.empty(new.numel(), dtype, self._device or new.device)
            self._tensors[name] = old
        if is_known:
            return take_changes(new, old), old
        old.copy_(new)
        return Changes(runs=[(0, new.numel())]), old

    def confirm(self, name: str) -> None:
        """The receiver has been given the changes."""
        self._known.add(name)


def take_changes(new: Tensor, old: Tensor) -> Changes:
    """Make ``old``, in its dtype, what ``new`` is; what that has changed, bit by bit.

    Args:
        new: 1-D.
        old: as long, on any device.
    """
    found = Changes()
    elements: list[Tensor] = []
    values: list[Tensor] = []
    size = CHUNK if new.device.type == "cpu" else DEVICE_CHUNK
    scratch = memory.empty(min(size, new.numel()), old.dtype, new.device)
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
            # As integers: torch does not index every dtype.
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
    """Numbers of elements that differ, int64, ascending; None: so many that a range takes no more
    bytes.

    Several elements are compared as one integer of eight bytes first: what is not to be looked at
    one by one takes a third of the time.
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
    if new.itemsize > 8:  # two parts of a complex number
        wide = [torch.view_as_real(each).view(torch.int64) for each in (new, old)]
        return (wide[0] != wide[1]).any(-1)
    return _bits(new) != _bits(old)


def _bits(tensor: Tensor) -> Tensor:
    """As integers, where there are such: NaN equals itself there, and 0.0 is not -0.0."""
    return tensor.view(_BITS[tensor.itemsize]) if tensor.itemsize <= 8 else tensor
