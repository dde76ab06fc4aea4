"""Memory on the device for state that is stored elsewhere between steps."""

from __future__ import annotations

from typing import Any, NamedTuple

from fsdp_engine.comm.lanes import Ticket
from fsdp_engine.extensions.offload.home import Home, Steps
from fsdp_engine.extensions.offload.offloading import Offloading
from fsdp_engine.memory.allocator import TransientStorage
from fsdp_engine.optim.chunked_step import StepChunk


class Piece(NamedTuple):
    """A part of a chunk that is stored at one home between steps.

    Attributes:
        home: The home.
        first: Offset of the part in the home, in bytes.
        start, stop: Range of the part in the chunk, in bytes.
        returns: Whether the step changes the part, so that it is copied back.
    """

    home: Home
    first: int
    start: int
    stop: int
    returns: bool


class MovedBytes(StepChunk):
    """Device memory of one chunk. Its contents are copied from homes before a step, and changed
    parts are copied back afterwards.

    Args:
        offload: The lanes and the memory of the engine.
        name: Name of the chunk in labels of copies.
    """

    def __init__(self, offload: Offloading, name: str) -> None:
        self._offload = offload
        self._name = name
        self._pieces: list[Piece] = []
        # Subclasses create the storage and a view of its bytes.
        self._storage: TransientStorage | None = None
        self._bytes: Any = None
        self._brought: Ticket | None = None
        self._taken: Ticket | None = None

    def _load_pieces(self) -> Steps:
        for piece in self._pieces:
            yield from piece.home.load(self._bytes[piece.start : piece.stop], piece.first)

    def _store_pieces(self) -> Steps:
        for piece in self._pieces:
            if piece.returns:
                yield from piece.home.store(self._bytes[piece.start : piece.stop])

    def fill(self) -> None:
        """Allocate the memory."""
        assert self._storage is not None
        self._offload.compute.manage("allocate state", self._storage.fill, self._storage)

    def start_copies(self) -> None:
        """See :class:`StepChunk`."""
        self.fill()
        # The copies into the memory follow the last copy out of it, and all work that compute was
        # given so far.
        after = [*([] if self._taken is None else [self._taken]), self._offload.compute.record()]
        self._brought = self._offload.state_in.submit(
            f"bring {self._name}", self._load_pieces, after=after
        )

    def wait_for_copies(self) -> None:
        """See :class:`StepChunk`."""
        if self._brought is not None:
            self._offload.compute.wait(self._brought)
            self._brought = None

    def begin_return(self) -> None:
        """Start to copy to their homes the parts that a submitted step changes."""
        self._taken = self._offload.state_out.submit(
            f"return {self._name}", self._store_pieces, after=[self._offload.compute.record()]
        )

    def leave(self) -> None:
        """See :class:`StepChunk`."""
        self.wait_for_copies()
        if self._taken is not None:
            self._offload.compute.wait(self._taken)
        if self._storage is not None:
            self._offload.compute.manage("free state", self._storage.free, self._storage)

    def abandon(self) -> None:
        """Free the memory like :meth:`leave`, after the lanes have finished all operations."""
        self._brought = self._taken = None
        self.leave()
