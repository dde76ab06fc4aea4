"""Memory on the device of state that is at homes between its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.extensions.offload.home import HomePart, Steps
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.memory.allocator import TransientStorage

# The role of the memory in the ledger.
ROLE = "optimizer"
# Tensors begin at multiples of so many bytes.
ALIGNMENT = 64


class Piece(NamedTuple):
    """The bytes of one home that the memory has.

    Attributes:
        part: Their place at the home.
        start: Their place in the memory.
        returns: The step changes them.
    """

    part: HomePart
    start: int
    returns: bool

    def within(self, memory: Tensor) -> Tensor:
        """Returns the bytes of ``memory``."""
        return memory[self.start : self.start + self.part.num_bytes]


class ChunkMemory:
    """Memory on the device for pieces of homes, and the copies to the device and back.

    Args:
        offload: The offload of the engine.
        name: The name of the state in names of operations.
    """

    def __init__(self, offload: Offloading, name: str) -> None:
        self._offload = offload
        self._name = name
        self._pieces: list[Piece] = []
        self._storage: TransientStorage | None = None
        self._bytes = torch.Tensor()  # of the storage, 1-D
        self._brought: Ticket | None = None
        self._taken: Ticket | None = None

    def reserve(self, num_bytes: int) -> None:
        """Make the storage of the memory, which is allocated afterwards."""
        self._storage = self._offload.memory.transient(num_bytes, torch.uint8, ROLE)
        self.fill()
        self._bytes = self._storage.view(0, (num_bytes,))

    def fill(self) -> None:
        """Allocate the memory."""
        assert self._storage is not None
        label = f"allocate {self._name}"
        self._offload.compute.manage(label, self._storage.fill, self._storage)

    def bring(self) -> None:
        """Allocate the memory, and begin to fill it from the homes."""
        self.fill()
        # The newest ticket of a stream is the last: compute's stream can be that of a lane.
        after = [*filter(None, [self._taken]), self._offload.compute.record()]
        lane, label = self._offload.state_in, f"bring {self._name}"
        self._brought = lane.submit(label, self._bring_pieces, after=after)

    def await_brought(self) -> None:
        """Compute waits for the copies that :meth:`bring` began."""
        if self._brought is not None:
            self._offload.compute.wait(self._brought)
            self._brought = None

    def write_back(self) -> None:
        """The step is submitted: begin to write the bytes that it changes to their homes."""
        lane, after = self._offload.state_out, [self._offload.compute.record()]
        self._taken = lane.submit(f"return {self._name}", self._take_pieces, after=after)

    def leave(self) -> None:
        """Free the memory as soon as it is written back."""
        if self._storage is None:
            return
        self.await_brought()
        if self._taken is not None:
            self._offload.compute.wait(self._taken)
        self._offload.compute.manage(f"free {self._name}", self._storage.drain, self._storage)

    def abandon(self) -> None:
        """Free the memory; its lanes have ended all submitted operations."""
        self._brought = self._taken = None
        self.leave()

    def _bring_pieces(self) -> Steps:
        for piece in self._pieces:
            yield from piece.part.home.bring(piece.within(self._bytes), piece.part.first)

    def _take_pieces(self) -> Steps:
        for piece in self._pieces:
            if piece.returns:
                yield from piece.part.home.take(piece.within(self._bytes))


def view_of(memory: Tensor, first: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor over the bytes of ``memory`` from ``first``."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory[first : first + num_bytes].view(dtype).view(shape)
