"""A communicator that sends gradients as codes: see ``quantized_reduction.py``.

[Note: Errors of a rank]
A rank stores the errors of its messages: of its summands for the shards of other ranks, and of the
sum of its own shard, if all ranks gather the sums. A rank adds its summand of its own shard without
encoding it, so this summand has no errors. Errors belong to the elements of a buffer on this rank.
A checkpoint can contain their sums over ranks: see ``kept_errors.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.extensions.quantized_reduction.block_codes import BlockCodes, Errors
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import HOST, Memory

# The role under which `Engine.memory_bytes` reports errors.
_ROLE = "reduction errors"


class ErrorMemory:
    """Allocates errors: on the device, or on the host for buffers whose gradients are not stored on
    the device.

    Args:
        memory: The memory of the engine.
        on_host: The tags of messages whose errors are stored on the host.
    """

    def __init__(self, memory: Memory, on_host: Collection[int]) -> None:
        self._memory = memory
        self._on_host = frozenset(on_host)

    def allocate(self, tag: int) -> Callable[[int, torch.dtype], Tensor]:
        """Returns a function that allocates 1-D tensors of zeros for messages with a tag."""

        def allocate(count: int, dtype: torch.dtype) -> Tensor:
            if tag not in self._on_host:
                return self._memory.persistent(count, dtype, _ROLE)
            tensor = allocator.zeros(count, dtype, "cpu")
            self._memory.book_elsewhere(tensor, HOST, _ROLE, tensor)
            return tensor

        return allocate


class QuantizedCommunicator(Communicator):
    """A communicator whose reductions, and gathers of sums, send codes.

    Args:
        group: The ranks of the axis.
        device: The device of the tensors.
        codes: The encoding.
        memory: The allocator of errors. None: errors are not kept.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        codes: BlockCodes,
        memory: ErrorMemory | None,
    ) -> None:
        super().__init__(group, device)
        self._codes = codes
        self._memory = memory
        self._others = [range(self.rank), range(self.rank + 1, self.size)]
        # By tag of the messages, and by the rank of the first row of a matrix of `_ranges`.
        self._errors: dict[tuple[int, int], Errors] = {}
        # By tag of the reduction: values to add to its next sum, and the first element that they
        # are added to.
        self._loaded: dict[int, tuple[int, Tensor]] = {}
        # The same of the last sum, whose values the lane may still read.
        self._added: dict[int, tuple[int, Tensor]] = {}

    def reduce_scatter(
        self,
        full: Tensor,
        out: Tensor,
        *,
        reduce_dtype: torch.dtype | None = None,
        average: bool = False,
        divisor: float = 1.0,
        accumulate: bool = False,
        tag: int = 0,
    ) -> Steps:
        """See :class:`Communicator`. Sums are in fp32 at least, whatever ``reduce_dtype`` is."""
        total = allocator.empty(real(self.part(full)).numel(), wide(full), full.device)
        yield from self._sum(full, total, tag)
        # Values of the last call could not be freed in that call, since the host runs ahead of the
        # lane that reads them.
        self._added.pop(tag, None)
        if tag in self._loaded:
            start, values = self._added[tag] = self._loaded.pop(tag)
            total[start : start + values.numel()].add_(values)
        total.div_(divisor * self.size if average else divisor)
        target = real(out)
        if accumulate:
            target.add_(total)
        else:
            target.copy_(total)

    def all_reduce(self, tensor: Tensor, *, average: bool = False, tag: int = 0) -> Steps:
        """See :class:`Communicator`."""
        own = self.part(tensor)
        yield from self.reduce_scatter(tensor, own, average=average, tag=tag)
        yield from self.all_gather(tensor, None, tag + 1)

    def all_gather(self, full: Tensor, source: Tensor | None = None, tag: int = 0) -> Steps:
        """See :class:`Communicator`. Each rank decodes its own shard, too."""
        shard = real(self.part(full) if source is None else source).unsqueeze(0)
        ranges = list(self._ranges(full, [range(self.size)]))
        # Shards differ by one element if the ranks cannot share the elements equally.
        num_bytes = max(self._codes.num_bytes(shards.shape[1]) for _, shards in ranges)
        gathered = allocator.empty(num_bytes * self.size, torch.uint8, full.device)
        messages = gathered.view(self.size, num_bytes)
        own = messages[self.rank : self.rank + 1, : self._codes.num_bytes(shard.shape[1])]
        self._encode(shard, own, (tag, self.rank))
        yield from super().all_gather(gathered, None, tag)
        for first, shards in ranges:
            count, numel = shards.shape
            received = messages[first : first + count, : self._codes.num_bytes(numel)]
            shards.copy_(self._codes.decode(received, numel, wide(full)))

    def add_errors(self, summand: Tensor, tag: int, *, factor: float) -> None:
        """Add all errors of a reduction to this rank's summand.

        Args:
            summand: A tensor with as many elements as the reductions with this tag.
            tag: The tag of the reduction.
            factor: Multiplies the errors of gathered sums: the number of ranks if collectives
                average, since these errors are of averages.
        """
        for first, shards in self._ranges(summand, self._others):
            if (errors := self._errors.get((tag, first))) is not None:
                shards.add_(self._codes.values_of(errors, *shards.shape).to(shards.device))
        own = real(self.part(summand))
        if (errors := self._errors.get((tag + 1, self.rank))) is not None:
            values = self._codes.values_of(errors, 1, own.numel()).squeeze(0)
            own.add_(values.to(own.device), alpha=factor)
        if tag in self._loaded:
            start, values = self._loaded[tag]
            own[start : start + values.numel()].add_(values)

    def drop_errors(self, tag: int) -> None:
        """Set the errors of a reduction to zero."""
        self._loaded.pop(tag, None)
        for (of_tag, _), errors in self._errors.items():
            if of_tag in (tag, tag + 1):
                errors.scales.zero_()

    def add_once(self, tag: int, start: int, values: Tensor) -> None:
        """Add values to the next sum of a reduction.

        Args:
            tag: The tag of the reduction.
            start: The first element of this rank's shard to which ``values`` are added.
            values: 1-D, on the device of the reduction.
        """
        self._loaded[tag] = (start * (2 if values.is_complex() else 1), real(values))

    def _sum(self, full: Tensor, total: Tensor, tag: int) -> Steps:
        ranges = list(self._ranges(full, self._others))
        sent_sizes = [0] * self.size
        received_sizes = [self._codes.num_bytes(total.numel())] * self.size
        received_sizes[self.rank] = 0
        for first, shards in ranges:
            for rank in range(first, first + len(shards)):
                sent_sizes[rank] = self._codes.num_bytes(shards.shape[1])
        sent, received = (
            allocator.empty(sum(sizes), torch.uint8, full.device)
            for sizes in (sent_sizes, received_sizes)
        )
        start = 0
        for first, shards in ranges:
            count, num_bytes = len(shards), sent_sizes[first]
            messages = sent[start : start + count * num_bytes].view(count, num_bytes)
            self._encode(shards, messages, (tag, first))
            start += count * num_bytes
        yield from self.exchange(received, sent, received_sizes, sent_sizes, tag)
        # In the order of ranks, so that the sum does not depend on the rank that computes it.
        for rank, message in enumerate(received.split(received_sizes)):
            addend = real(self.part(full))
            if rank != self.rank:
                addend = self._codes.decode(message.unsqueeze(0), total.numel(), total.dtype)[0]
            if rank:
                total.add_(addend)
            else:
                total.copy_(addend)

    def _ranges(self, full: Tensor, runs: Sequence[range]) -> Iterator[tuple[int, Tensor]]:
        """Yields the shards of ranks as matrices, with the rank of the first row.

        Equal shards of a run of ranks are one matrix, so that one call encodes or decodes all of
        them. Shards that are not equal are matrices of one row.
        """
        numel = full.numel()
        for run in runs:
            count = len(run) if numel % self.size == 0 else 1
            for first in run[:: max(count, 1)]:
                begin, end = self._bounds(numel, first), self._bounds(numel, first + count)
                shards = real(full[begin:end])
                yield first, shards.view(count, shards.numel() // count)

    def _encode(self, values: Tensor, messages: Tensor, key: tuple[int, int]) -> None:
        if self._memory is None:
            self._codes.encode(values, messages, None)
            return
        if key not in self._errors:
            parts, numel = values.shape
            allocate = self._memory.allocate(key[0])
            self._errors[key] = self._codes.make_errors(parts, numel, allocate)
        kept = self._errors[key]
        near = Errors(kept.codes.to(values.device), kept.scales.to(values.device))
        self._codes.encode(values, messages, near)
        if near.codes is not kept.codes:
            kept.codes.copy_(near.codes)
            kept.scales.copy_(near.scales)


def real(tensor: Tensor) -> Tensor:
    """Returns the elements of a 1-D tensor, or the real and imaginary parts of complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype of sums."""
    return torch.promote_types(real(tensor[:0]).dtype, torch.float32)
