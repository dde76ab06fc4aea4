"""Messages that send gradients to the owners of parameters, and weights back.

[Note: Messages of owners]
A message of gradients sends the parts of a parameter from the ranks that hold them to the owner. A
message of weights sends the parts of the stepped tensor to all ranks that hold them. Each message
is an all-to-all of bytes over the ranks that share the parameters. Its table of parts is computed
once:

    rank      0        1        2                 rank      0        1        2
    gradient  a a a b  b b c c  c c c c           weights   a a a .  . b b b  c c c c ..
                    \\  \\__________               owner       \\________ | _______/
    owner     a a a .  . b b b  c c c c ..        slices    a a a b  b b c c  c c c c

An owner keeps full weights between steps, unless its own slice is the full parameter, so weights
are sent only once per step, like gradients. Weights that were changed outside of a step (by a
checkpoint or the user) are sent to their owners in the next step, in a third message like that of
gradients. Before each step ranks exchange whether there are such weights.

Replicas (an axis that does not shard) send nothing to each other before the step, since each row of
ranks has all gradients; a parameter has one owner for all replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.comm.lanes import Lane, Ticket
from fsdp_engine.extensions.whole_tensor_optimizers.parameter_sites import ParamSite
from fsdp_engine.layout import round_up
from fsdp_engine.memory.allocator import Memory, begin_together

# The role of the memory of messages in the memory ledger.
ROLE = "optimizer"
# Parts start at multiples of this number of bytes.
_ALIGNMENT = 16


class Owned(NamedTuple):
    """A parameter that is stepped by its owner.

    Attributes:
        site: The site of the parameter.
        owner: The owner's rank in the mesh of the site.
        dtype: The dtype of the main weights.
    """

    site: ParamSite
    owner: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return math.prod(self.site.shape)


def sources_for(site: ParamSite, rank: int) -> range:
    """Returns the ranks nearest to ``rank`` that together hold all parts of the parameter."""
    mesh, depth = site.buffer.mesh, site.buffer.depth
    if depth == 2:
        return range(mesh.size)
    row = 1 if depth == 0 else mesh.inner.size
    first = rank - rank % row
    return range(first, first + row)


class Part(NamedTuple):
    """A part of a parameter in a message.

    Attributes:
        peer: The other rank.
        number: Number of the parameter in the chunk.
        start, stop: Range of elements of the parameter.
    """

    peer: int
    number: int
    start: int
    stop: int


class MessageTable:
    """The parts that this rank sends and receives, and their places in the memory of messages.

    Args:
        sent: The parts to send, in the order of peers.
        received: The parts to receive, in the order of peers.
        dtypes: The dtype of each parameter.
        num_ranks: Number of ranks of the mesh.

    Attributes:
        sent, received: The arguments.
        sent_sizes, received_sizes: Number of bytes for each rank.
    """

    def __init__(
        self,
        sent: Sequence[Part],
        received: Sequence[Part],
        dtypes: Sequence[torch.dtype],
        num_ranks: int,
    ) -> None:
        self._dtypes = dtypes
        self.sent, self.sent_sizes = sent, self._sizes(sent, num_ranks)
        self.received, self.received_sizes = received, self._sizes(received, num_ranks)

    def _sizes(self, parts: Sequence[Part], num_ranks: int) -> list[int]:
        sizes = [0] * num_ranks
        for part in parts:
            sizes[part.peer] += self._bytes_of(part)
        return sizes

    def _bytes_of(self, part: Part) -> int:
        num_bytes = (part.stop - part.start) * self._dtypes[part.number].itemsize
        return round_up(num_bytes, _ALIGNMENT)

    def views(self, parts: Sequence[Part], memory: Tensor) -> list[Tensor]:
        """Returns a tensor over ``memory`` for each part."""
        found, at = [], 0
        for part in parts:
            dtype = self._dtypes[part.number]
            num_bytes = (part.stop - part.start) * dtype.itemsize
            found.append(memory[at : at + num_bytes].view(dtype))
            at += self._bytes_of(part)
        return found


def _parts(chunk: Sequence[Owned], rank: int, *, to_all: bool) -> tuple[list[Part], list[Part]]:
    """Returns the parts that ``rank`` exchanges as an owner with holders, and as a holder with
    owners.

    Args:
        chunk: The parameters, in the same order on all ranks.
        rank: This rank.
        to_all: Include all holders. False: only the holders nearest to the owner.
    """
    as_owner, as_holder = [], []
    for number, (site, owner, _) in enumerate(chunk):
        if owner == rank:
            others = range(site.buffer.mesh.size) if to_all else sources_for(site, rank)
            for other in others:
                start, stop = site.range_of(other)
                if other != rank and start < stop:
                    as_owner.append(Part(other, number, start, stop))
        elif to_all or rank in sources_for(site, owner):
            start, stop = site.range_of(rank)
            if start < stop:
                as_holder.append(Part(owner, number, start, stop))
    return sorted(as_owner), sorted(as_holder)


class ChunkMessages:
    """The messages of parameters that are stepped together.

    Args:
        chunk: The parameters, in the same order on all ranks.
        memory: The memory manager of the engine.
        gradients, weights: Communicators for the messages. None: there is one rank.
        tags: Two numbers that no other messages in flight use.

    Attributes:
        mine: Numbers of the parameters that this rank owns.
        gradients: Full gradients by number, valid while memory is allocated.
        num_bytes: Number of bytes of the memory.
    """

    def __init__(
        self,
        chunk: Sequence[Owned],
        memory: Memory,
        gradients: Communicator | None,
        weights: Communicator | None,
        tags: tuple[int, int],
    ) -> None:
        mesh = chunk[0].site.buffer.mesh
        rank = mesh.outer.rank * mesh.inner.size + mesh.inner.rank
        self._communicators = gradients, weights
        self._tags = tags
        self.mine = [number for number, each in enumerate(chunk) if each.owner == rank]
        grad_dtypes = [each.site.buffer.grad_dtype for each in chunk]
        dtypes = [each.dtype for each in chunk]
        received, sent = _parts(chunk, rank, to_all=False)
        returned, taken = _parts(chunk, rank, to_all=True)
        self._in = MessageTable(sent, received, grad_dtypes, mesh.size)
        self._weights_in = MessageTable(sent, received, dtypes, mesh.size)
        self._out = MessageTable(returned, taken, dtypes, mesh.size)
        self._own = [Part(rank, n, *chunk[n].site.range_of(rank)) for n in self.mine]
        # All messages use the same memory.
        brought = self._in, self._weights_in
        as_holder = max(sum(self._out.received_sizes), *(sum(each.sent_sizes) for each in brought))
        as_owner = max(sum(self._out.sent_sizes), *(sum(each.received_sizes) for each in brought))
        at, places = as_holder + as_owner, {}
        for number in self.mine:
            num_bytes = chunk[number].numel * grad_dtypes[number].itemsize
            places[number] = at, at + num_bytes
            at += round_up(num_bytes, _ALIGNMENT)
        self.num_bytes = at
        self._storage = memory.transient(at, torch.uint8, ROLE)
        with self._storage.while_filled():
            whole = self._storage.view(0, (at,))
            self._as_holder = whole[:as_holder]
            self._as_owner = whole[as_holder : as_holder + as_owner]
            self.gradients = {
                n: whole[start:stop].view(grad_dtypes[n]).view(chunk[n].site.shape)
                for n, (start, stop) in places.items()
            }

    def fill(self, compute: Lane) -> None:
        """Allocate the memory of the messages."""
        compute.manage("allocate messages of owners", self._storage.fill, self._storage)

    def free(self, compute: Lane) -> None:
        """Free the memory of the messages."""
        compute.manage("free messages of owners", self._storage.free, self._storage)

    def bring_gradients(self, lane: Lane, after: Ticket, slices: Sequence[Tensor | None]) -> Ticket:
        """Start to send gradients to their owners.

        Args:
            lane: The lane of the message.
            after: The ticket to wait for first.
            slices: This rank's gradient slices, 1-D, by number. None: no rank has a gradient.

        Returns:
            A ticket after which :attr:`gradients` are complete.
        """
        targets = {number: grad.view(-1) for number, grad in self.gradients.items()}
        return self._submit(lane, "gradients to owners", after, slices, targets, self._in)

    def bring_weights(
        self, lane: Lane, after: Ticket, slices: Sequence[Tensor], wholes: dict[int, Tensor]
    ) -> Ticket:
        """Start to send weights to their owners, into ``wholes``; see :meth:`bring_gradients`."""
        return self._submit(lane, "weights to owners", after, slices, wholes, self._weights_in)

    def return_weights(
        self, lane: Lane, after: Ticket, slices: Sequence[Tensor], wholes: dict[int, Tensor]
    ) -> Ticket:
        """Start to send stepped weights from their owners to all slices.

        Args:
            lane: The lane of the message.
            after: The ticket to wait for first.
            slices: This rank's slices, 1-D, by number.
            wholes: Flat full tensors of the parameters that this rank owns, by number.
        """
        return self._submit(lane, "weights from owners", after, slices, wholes, self._out)

    def _submit(
        self,
        lane: Lane,
        label: str,
        after: Ticket,
        slices: Sequence[Tensor | None],
        wholes: dict[int, Tensor],
        table: MessageTable,
    ) -> Ticket:
        """Copy parts between ``slices`` and ``wholes``, in the direction of ``table``."""

        def part_of_slice(part: Part) -> Any:
            return slices[part.number]

        def part_of_whole(part: Part) -> Any:
            return wholes[part.number][part.start : part.stop]

        ends = [(part_of_slice, self._as_holder), (part_of_whole, self._as_owner)]
        returns = table is self._out
        (source, sent), (target, received) = ends[::-1] if returns else ends

        def steps() -> Steps:
            _copy(table.views(table.sent, sent), map(source, table.sent))
            # A slice that is the full parameter is stepped in place and needs no copy.
            own = [p for p in self._own if source(p) is not None]
            own = [p for p in own if not begin_together(target(p), source(p))]
            _copy(map(target, own), map(source, own))
            yield from self._exchange(returns, table, received, sent)
            _copy(map(target, table.received), table.views(table.received, received))

        return lane.submit(label, steps, after=[after])

    def _exchange(self, which: int, table: MessageTable, received: Tensor, sent: Tensor) -> Steps:
        communicator = self._communicators[which]
        if communicator is not None:
            yield from communicator.exchange(
                received[: sum(table.received_sizes)],
                sent[: sum(table.sent_sizes)],
                table.received_sizes,
                table.sent_sizes,
                self._tags[which],
            )


@torch.no_grad()
def _copy(targets: Iterable[Tensor], sources: Iterable[Tensor | None]) -> None:
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if s is not None and s.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
