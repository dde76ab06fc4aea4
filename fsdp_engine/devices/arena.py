"""Memory in which transient storages have addresses of their own.

[Note: Arena]
An arena is one piece of memory for all storages of one role, for as long as one plan holds
([Note: Planned addresses] in ``address_plan.py``). Of each address there is a *piece*, a storage
object over those bytes. To fill a storage is to swap its memory, none, with that of its piece
(``UntypedStorage._swap_data_ptr_``, from torch 2.13 on), to drain it is to swap back: nothing is
allocated, and the storage that autograd's views are made over stays the same object. Every piece
keeps the arena's memory alive, so it outlives the last storage that is filled from it.

What happens is recorded all along. Until there is a plan, and wherever a storage meets another at
its address, :meth:`Arena.fill` declines, and ordinary memory serves. When a backward ends and
somebody was declined, a plan is due from what that step recorded, unless the plan knew it all and
had no room. It is made with the next fill at which no address is in use, so that nothing has to
move. Old plans are not forgotten as long as both find room together: steps that alternate between
two orders settle. Where steps never come to agree, a plan is made after each of the first few of
them (orders of gathers and reductions are learnt one after the other), then after 8, 16, 32, ...

On CUDA all storages of one role are drained after compute is done with them, and what fills them
comes after compute, so what one of them leaves in its address is done before another comes, on
whatever lanes they are filled and drained. An arena serves one role, and is allocated within a
fill, so that its memory belongs to that lane; or, if a step was rehearsed, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from fsdp_engine.devices.address_plan import AddressPlan, Overlaps, Recorder, plan_addresses

# Steps in a row that left the plan, each of which makes another one.
FIRST_PLANS = 4


class Arena:
    """The addresses of one role's storages. See the module docstring.

    Args:
        allocate: gives so many bytes, as a 1-D tensor of uint8.
        book: is told by how many bytes the arena grows.

    Attributes:
        memory: the arena's; None while there is no plan.
        plan: where storages lie in it.
    """

    def __init__(self, allocate: Callable[[int], Tensor], book: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._book = book
        self.memory: Tensor | None = None
        self.plan = AddressPlan((), (), 0, True)
        self._num_bytes: list[int] = []
        self._pieces: list[torch.UntypedStorage | None] = []
        self._units: list[list[int]] = []
        self._is_fixed = False
        self._served = 0  # the set of those that have memory from here
        self._recorder = Recorder()
        self._planned_from = Overlaps()
        self._due: Overlaps | None = None
        self._num_declined = 0  # fills since the last backward
        self._num_left = 0  # steps in a row that left the plan

    def begin_unit(self) -> None:
        """Storages that are added from here on are those of the next unit."""
        self._units.append([])

    def add(self, num_bytes: int) -> int:
        """One more storage; returns its number."""
        number = self._recorder.add(num_bytes)
        self._num_bytes.append(num_bytes)
        self._pieces.append(None)
        if self._units:
            self._units[-1].append(number)
        return number

    def expect(self, moments: Sequence[Sequence[int]]) -> None:
        """Make a plan before any step. The arena is as long as that one needs, for good.

        Args:
            moments: units whose storages are filled together, numbered as they were begun.
        """
        storages = [[n for unit in moment for n in self._units[unit]] for moment in moments]
        self._make_plan(Overlaps.of_moments(storages, self._recorder.sizes))
        self._is_fixed = True
        # What was filled so far, for views to be made, is no step.
        self._recorder.take()
        self._num_declined = 0

    def fill(self, number: int, storage: torch.UntypedStorage) -> bool:
        """Give ``storage``, which is empty, the memory of its address.

        Returns whether it has it: False where it has no address, or somebody else is there.
        """
        if self._due is not None and not self._served:
            self._make_plan(self._due)
        self._recorder.fill(number)
        piece = self._pieces[number]
        if piece is None or self.plan.rivals[number] & self._served:
            self._num_declined += 1
            return False
        self._served |= 1 << number
        storage._swap_data_ptr_(piece)  # type: ignore[attr-defined]
        return True

    def drain(self, number: int, storage: torch.UntypedStorage) -> bool:
        """Take the memory of its address away from ``storage``; returns whether it had that."""
        self._recorder.drain(number)
        bit = 1 << number
        if not self._served & bit:
            return False
        self._served &= ~bit
        storage._swap_data_ptr_(self._pieces[number])  # type: ignore[attr-defined]
        return True

    def end_step(self) -> None:
        """A backward is over: see whether the plan still holds."""
        record = self._recorder.take()
        if not self._num_declined:
            self._num_left = 0
            return
        self._num_declined = 0
        if record.is_within(self._planned_from):
            return
        self._num_left += 1
        if self._num_left <= FIRST_PLANS or self._num_left & (self._num_left - 1) == 0:
            self._due = record

    def _make_plan(self, record: Overlaps) -> None:
        self._due = None
        sizes = self._recorder.sizes
        limit = self.plan.num_bytes if self._is_fixed else None
        both = record.joined(self._planned_from)
        self._planned_from, self.plan = both, plan_addresses(sizes, both, limit)
        if not self.plan.is_complete:
            self._planned_from, self.plan = record, plan_addresses(sizes, record, limit)
        self._resize()
        assert self.memory is not None
        self._pieces = [
            None if offset is None else _piece(self.memory[offset : offset + num_bytes])
            for offset, num_bytes in zip(self.plan.offsets, self._num_bytes, strict=True)
        ]

    def _resize(self) -> None:
        num_bytes = 0 if self.memory is None else self.memory.numel()
        if self.memory is None or (num_bytes != self.plan.num_bytes and not self._is_fixed):
            # The old memory goes first.
            self.memory, self._pieces = None, []
            self._book(-num_bytes)
            self.memory = self._allocate(self.plan.num_bytes)
            self._book(self.plan.num_bytes)


def _piece(part: Tensor) -> torch.UntypedStorage:
    """A storage over just these bytes, which keeps all memory behind them alive."""
    piece: Tensor = from_dlpack(to_dlpack(part))
    return piece.untyped_storage()
