"""Reductions of gradients in few bits. Errors are added to the next step's gradients.

    summands + errors --encode--> all-to-all --decode--> sums in fp32 --encode--> all-gather

The all-gather follows where all ranks of the axis receive the sum. Its result is decoded from the
same bytes on each rank, this one included, so that replicas stay equal bit by bit. Sources: ZeRO++
(arXiv 2306.10209) for the all-to-all in blocks, LoCo (arXiv 2407.04480) for errors in 8 bits.

[Note: What errors hold]
A rank keeps the errors of what it sends: of the shards of other ranks, and of the sums that it
gathers. Its own summand is added without encoding, and has none. Errors belong to the elements of a
buffer on this rank, and are lost with the engine: a checkpoint does not contain them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp_engine.comm.collectives import Communicator, Steps
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.quantized_reduction.block_codes import LARGEST, BlockCodes, Errors
from fsdp_engine.memory import allocator
from fsdp_engine.memory.allocator import Memory
from fsdp_engine.strategies import Axis

AXES = {"inner": (Axis.INNER,), "outer": (Axis.OUTER,), "both": (Axis.INNER, Axis.OUTER)}


@dataclass(frozen=True)
class QuantizedReduction(EngineExtension):
    """Reduces gradients in 8 or 4 bits per element; pass it in ``extensions`` of ``fe.shard``.

    Along an axis of one rank nothing is sent, and nothing changes. Sums are computed in fp32 (fp64
    for fp64 gradients). An element that is NaN or Inf on any rank is NaN or Inf in the sum.

    Args:
        bits: Bits per element, 8 or 4.
        axis: The axis along which summands are quantized: "outer" (between nodes), "inner" or
            "both". Sums along the other axis are those of an engine without this extension.
        block: Number of elements with a common scale of 4 bytes: a positive multiple of 8.
        error_feedback: Add the errors of quantization to the gradients of the next step. It takes
            1.02 bytes for each element that this rank sends.

    Raises:
        ValueError: An argument has a value that is not allowed. Raised by ``fe.shard`` on all
            ranks: the engine has ``fe.Arenas(registered=True)``.
    """

    bits: int = 8
    axis: str = "outer"
    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.bits not in LARGEST:
            raise ValueError(f"bits: expected 8 or 4; found {self.bits!r}")
        if self.axis not in AXES:
            raise ValueError(f"axis: expected one of {', '.join(AXES)}; found {self.axis!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise ValueError(f"block: expected a positive multiple of 8; found {self.block!r}")

    def start(self, engine: Engine) -> None:
        """Replace the communicators of reductions, which are not in use yet.

        Raises:
            ValueError: Reductions are built already, because all memory of collectives is
                allocated when the engine is made.
        """
        if engine.memory.is_fixed:
            raise ValueError(
                "extensions: expected QuantizedReduction without fe.Arenas(registered=True), whose "
                "registered memory its messages could not use; found both"
            )
        codes = BlockCodes(self.bits, self.block)
        # Reductions of different buffers and axes have errors of their own.
        memory = engine.memory if self.error_feedback else None
        made = (engine.communicators.data, engine.communicators.expert)
        for mesh in [each for each in made if each is not None]:
            for axis in AXES[self.axis]:
                comms = mesh.comms[axis]
                if comms.reduce is not None:
                    device, group = mesh.mesh.device, comms.reduce.group
                    quantized = QuantizedCommunicator(group, device, codes, memory)
                    mesh.comms[axis] = replace(comms, reduce=quantized)


class QuantizedCommunicator(Communicator):
    """A communicator whose reductions, and gathers of sums, send codes.

    Args:
        group: The ranks of the axis.
        device: The device of the tensors.
        codes: The encoding.
        memory: Allocates errors. None: errors are not kept.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, codes: BlockCodes, memory: Memory | None
    ) -> None:
        super().__init__(group, device)
        self._codes = codes
        self._memory = memory
        # By tag of the reduction, and by rank whose shard is sent.
        self._errors: dict[tuple[int, int], Errors] = {}

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
        total = allocator.empty(_real(self.part(full)).numel(), _wide(full), full.device)
        yield from self._sum(full, total, tag)
        total.div_(divisor * self.size if average else divisor)
        target = _real(out)
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
        shard = _real(self.part(full) if source is None else source)
        parts = [_real(self.part(full, rank)) for rank in range(self.size)]
        # Shards differ by one element if there are fewer elements than ranks could share equally.
        num_bytes = max(self._codes.num_bytes(part.numel()) for part in parts)
        gathered = allocator.empty(num_bytes * self.size, torch.uint8, full.device)
        messages = gathered.view(self.size, num_bytes)
        own = messages[self.rank][: self._codes.num_bytes(shard.numel())]
        self._codes.encode(shard, own, self._errors_of(tag, self.rank, shard.numel()))
        yield from super().all_gather(gathered, None, tag)
        for part, message in zip(parts, messages, strict=True):
            used = message[: self._codes.num_bytes(part.numel())]
            part.copy_(self._codes.decode(used, part.numel(), _wide(full)))

    def _sum(self, full: Tensor, total: Tensor, tag: int) -> Steps:
        parts = [_real(self.part(full, rank)) for rank in range(self.size)]
        numel = parts[self.rank].numel()
        sent_sizes = [
            0 if rank == self.rank else self._codes.num_bytes(part.numel())
            for rank, part in enumerate(parts)
        ]
        received_sizes = [self._codes.num_bytes(numel)] * self.size
        received_sizes[self.rank] = 0
        sent, received = (
            allocator.empty(sum(sizes), torch.uint8, full.device)
            for sizes in (sent_sizes, received_sizes)
        )
        for rank, message in enumerate(sent.split(sent_sizes)):
            if rank != self.rank:
                errors = self._errors_of(tag, rank, parts[rank].numel())
                self._codes.encode(parts[rank], message, errors)
        yield from self.exchange(received, sent, received_sizes, sent_sizes, tag)
        # In the order of ranks, so that the sum does not depend on the rank that computes it.
        for rank, message in enumerate(received.split(received_sizes)):
            addend = parts[rank]
            if rank != self.rank:
                addend = self._codes.decode(message, numel, total.dtype)
            if rank:
                total.add_(addend)
            else:
                total.copy_(addend)

    def _errors_of(self, tag: int, rank: int, numel: int) -> Errors | None:
        if self._memory is None:
            return None
        key = (tag, rank)
        if key not in self._errors:
            memory = self._memory

            def allocate(count: int, dtype: torch.dtype) -> Tensor:
                return memory.persistent(count, dtype, "grad")

            self._errors[key] = self._codes.make_errors(numel, allocate)
        return self._errors[key]


def _real(tensor: Tensor) -> Tensor:
    """Returns the elements of a 1-D tensor, or the real and imaginary parts of complex ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns the dtype of sums."""
    return torch.promote_types(_real(tensor[:0]).dtype, torch.float32)
