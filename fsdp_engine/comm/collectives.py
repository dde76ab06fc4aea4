"""All collectives of the engine, as operations for lanes. Their algorithm depends on the backend.

Gloo's own ``all_gather_into_tensor`` and ``reduce_scatter_tensor`` copy through intermediate
buffers. They take four to five times as long as sending shards directly between each pair of ranks,
so on gloo shards are sent directly between buffers (*pairwise*). Other backends use their own
collectives (*native*). On gloo CUDA tensors are copied through host memory (*staged*).

An operation is a generator: it issues communication, yields the works, and continues when they are
done. The lane (``lanes.py``) determines what "done" means. On CPU the host waits. On CUDA the
stream of the lane waits, and the generator runs to its end without interruption. Collectives of the
device's default backend (NCCL on CUDA) are issued synchronously: they then run on the current
stream, which is the lane's, with its priority. (With ``async_op`` they would run on a stream of the
process group, and each would need two more events.) Other backends do not order their work with the
current stream before ``Work.wait()``, so their collectives are asynchronous.

Pairwise messages have tags, so that messages of two units are never confused. If ranks disagree
about the next unit, both time out with its name, and no wrong values are received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fsdp_engine import backend
from fsdp_engine.accelerator import (
    current_accelerator,
    default_backend,
    is_accelerator,
)
from fsdp_engine.comm.activity import monitor, naming
from fsdp_engine.comm.groups import name_of_backend
from fsdp_engine.memory import allocator

Work = dist.Work
# Yields sequences of works, which are objects with a method `wait`.
Steps = Iterator[Sequence[Any]]

# Methods of groups are called directly, because the functions of torch.distributed around them
# check arguments, which doubles the time to issue a collective. torch 2.11 only has the old names.
# The methods are read from the group object, because its class may be a Python class of the user.
_IS_OLD = not hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "_allgather_base" if _IS_OLD else "all_gather_single"
_REDUCE_SCATTER = "_reduce_scatter_base" if _IS_OLD else "reduce_scatter_single"


# Maximum size in bytes of a message in which small tensors are sent together.
_MESSAGE_BYTES = 2**26


class Communicator:
    """The collectives of one process group on one device. All tensors are 1-D.

    Attributes:
        size: Number of ranks in the group.
        rank: Index of this rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self._gloo = _is_gloo(group, device)
        self._host_work = monitor().host_work
        self._staged = self._gloo and device.type != "cpu"
        self._stays_on_stream = _stays_on_stream(group, device)
        self._options = _Options(is_async=not self._stays_on_stream)
        self._all_gather = getattr(group, _ALL_GATHER)
        self._reduce_scatter = getattr(group, _REDUCE_SCATTER)

    def part(self, full: Tensor, rank: int | None = None) -> Tensor:
        """Returns the shard of ``full`` that belongs to ``rank`` (None: this rank), as a view."""
        place = self.rank if rank is None else rank
        start, stop = self._bounds(full.numel(), place), self._bounds(full.numel(), place + 1)
        return full[start:stop]

    def all_gather(self, full: Tensor, source: Tensor | None = None, tag: int = 0) -> Steps:
        """All-gather the shards of all ranks into ``full``.

        Args:
            full: The destination. It contains the shards in the order of ranks.
            source: The shard of this rank. None: ``full`` already contains it.
            tag: Tag that distinguishes these messages from others in flight.
        """
        full = _as_sent(full)
        source = self.part(full) if source is None else _as_sent(source)
        if self._staged:
            host = full.cpu()
            self.part(host).copy_(source)
            yield from self._exchange_into(host, self.part(host), tag)
            full.copy_(host)
        elif self._gloo:
            own = self.part(full)
            if not _at_one_place(source, own):
                # The source itself is sent, so that its copy into `full` overlaps with sending.
                works = self._start_gather(full, source, tag)
                own.copy_(source)
                yield works
            else:
                yield from self._exchange_into(full, own, tag)
        else:
            yield self._to_wait_for(self._all_gather(full, source, self._options.gather))

    def gather_encoded(
        self, full: Tensor, own: Tensor, encode: Callable[[Sequence[Tensor]], Steps], tag: int = 0
    ) -> Steps:
        """Encode this rank's shard of ``full`` in place, and all-gather the shards of all ranks.

        Args:
            full: The destination.
            own: This rank's shard of ``full``.
            encode: An operation whose argument is a sequence of tensors, which it writes.
            tag: Tag that distinguishes these messages from others in flight.
        """
        yield from encode((own,))
        yield from self.all_gather(full, None, tag)

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
        """Sum the ``full`` tensors of all ranks, and write this rank's shard of the sum to ``out``.

        Args:
            full: The summand of this rank. It is sent in its dtype. This rank's shard of ``full``
                may be overwritten.
            out: The destination, which may be this rank's shard of ``full``.
            reduce_dtype: The dtype of sums. None: the dtype of ``full``.
            average: Divide the sum by the number of ranks.
            divisor: Also divide by this number, in the dtype of ``out``.
            accumulate: Add to ``out`` instead of overwriting it.
            tag: Tag that distinguishes these messages from others in flight.
        """
        wide = None if reduce_dtype == full.dtype else reduce_dtype
        if self._gloo:
            if average:
                divisor *= self.size
            source, target = (full.cpu(), out.cpu()) if self._staged else (full, out)
            apart = accumulate and divisor != 1.0
            fresh = (
                allocator.empty(target.numel(), target.dtype, target.device) if apart else target
            )
            yield from self._pairwise_reduce(source, fresh, wide, accumulate and not apart, tag)
            if divisor != 1.0:
                fresh.div_(divisor)
            if apart:
                target.add_(fresh)
            if self._staged:
                out.copy_(target)
        elif wide is not None:
            received = allocator.empty(full.numel(), full.dtype, full.device)
            yield self._to_wait_for(
                dist.all_to_all_single(
                    received, full, group=self.group, async_op=not self._stays_on_stream
                )
            )
            total = received.view(self.size, -1).sum(0, dtype=wide)
            if average:
                total.div_(self.size)
            _store(out, total, accumulate, divisor)
        else:
            direct = out.dtype == full.dtype and not accumulate
            target = out if direct else self.part(full)
            options = self._options.reduce_scatter[average]
            work = self._reduce_scatter(_as_reals(target), _as_reals(full), options)
            yield self._to_wait_for(work)
            if not direct:
                _store(out, target, accumulate, divisor)
            elif divisor != 1.0:
                out.div_(divisor)

    def all_reduce(self, tensor: Tensor, *, average: bool = False, tag: int = 0) -> Steps:
        """Sum (or average) ``tensor`` over all ranks in place, with the backend's all-reduce.

        Args:
            tensor: The summand of this rank, and the result.
            average: Divide the sum by the number of ranks.
            tag: Unused here. Subclasses may send messages with ``tag`` and ``tag + 1``.
        """
        del tag
        work = self.group.allreduce([_as_reals(tensor)], self._options.all_reduce[average])
        yield [self._host_work(work)] if self._gloo else self._to_wait_for(work)

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        tag: int = 0,
    ) -> Steps:
        """Send a range of ``sent`` to each rank, and receive a range of ``received`` from each.

        Args:
            received: The destination. It contains the ranges of all ranks in the order of ranks.
            sent: The source. It contains the ranges for all ranks in the order of ranks.
            received_sizes: Number of elements from each rank. On gloo, the range from this rank
                itself is not received.
            sent_sizes: Number of elements for each rank.
            tag: Tag that distinguishes these messages from others in flight.
        """
        if not self._gloo:
            yield self._to_wait_for(
                dist.all_to_all_single(
                    received,
                    sent,
                    list(received_sizes),
                    list(sent_sizes),
                    group=self.group,
                    async_op=not self._stays_on_stream,
                )
            )
            return
        target, source = (received.cpu(), sent.cpu()) if self._staged else (received, sent)
        from_ranks, to_ranks = target.split(list(received_sizes)), source.split(list(sent_sizes))
        works = []
        for receiver, sender in self._peers():
            if received_sizes[sender]:
                works.append(self._receive(from_ranks[sender], sender, tag))
            if sent_sizes[receiver]:
                works.append(self._send(to_ranks[receiver], receiver, tag))
        yield works
        if self._staged:
            received.copy_(target)

    def _to_wait_for(self, work: Work | None) -> Sequence[Work]:
        return () if self._stays_on_stream else (_require(work),)

    def _bounds(self, numel: int, place: int) -> int:
        # If size divides numel, shards are equal, as the backends' collectives require.
        return numel * place // self.size

    def _peers(self) -> Iterator[tuple[int, int]]:
        """Yields (rank to send to, rank to receive from).

        In each iteration every rank sends to one rank and receives from one rank.
        """
        for step in range(1, self.size):
            yield (self.rank + step) % self.size, (self.rank - step) % self.size

    def _start_gather(self, full: Tensor, source: Tensor, tag: int) -> list[Work]:
        works = []
        for receiver, sender in self._peers():
            works.append(self._receive(self.part(full, sender), sender, tag))
            works.append(self._send(source, receiver, tag))
        return works

    def _exchange_into(self, full: Tensor, source: Tensor, tag: int) -> Steps:
        yield self._start_gather(full, source, tag)

    def _pairwise_reduce(
        self, full: Tensor, out: Tensor, wide: torch.dtype | None, accumulate: bool, tag: int
    ) -> Steps:
        own = self.part(full)
        # One shard is received directly into the destination, if the values there are not needed.
        # With two ranks, no other memory is then needed.
        in_place = _at_one_place(out, own)
        lands = not accumulate and not in_place and out.dtype == full.dtype and wide is None
        num_slots = self.size - 1 - int(lands)
        memory = allocator.empty(num_slots * own.numel(), full.dtype, full.device)
        slots = [memory[i * own.numel() : (i + 1) * own.numel()] for i in range(num_slots)]
        if lands:
            slots.insert(0, out)
        works, received = [], {}
        for slot, (receiver, sender) in zip(slots, self._peers(), strict=True):
            works.append(self._receive(slot, sender, tag))
            works.append(self._send(self.part(full, receiver), receiver, tag))
            received[sender] = slot
        yield works
        if lands:
            for slot in slots[1:]:
                own.add_(slot)
            out.add_(own)
            return
        received[self.rank] = own
        # In a wider dtype, shards are summed in the order of ranks, so that the result does not
        # depend on the rank that computes it. Otherwise they are added to this rank's shard in
        # place, which saves memory.
        parts = [received[rank] for rank in range(self.size)]
        if wide is not None:
            total = parts[0].to(wide)
            for part in parts[1:]:
                total.add_(part)
            _store(out, total, accumulate)
        elif accumulate and out.dtype == full.dtype and self.size == 2:
            out.add_(own).add_(received[1 - self.rank])
        else:
            for part in parts:
                if part is not own:
                    own.add_(part)
            if not in_place:
                _store(out, own, accumulate)

    def _send(self, tensor: Tensor, receiver: int, tag: int) -> Work:
        return _require(dist.isend(tensor, group=self.group, group_dst=receiver, tag=tag))

    def _receive(self, tensor: Tensor, sender: int, tag: int) -> Work:
        return _require(dist.irecv(tensor, group=self.group, group_src=sender, tag=tag))


def all_reduce_(
    tensor: Tensor, group: dist.ProcessGroup | None, op: str = "sum", what: str = "a sum over ranks"
) -> Tensor:
    """All-reduce a small tensor in place, and wait for the result.

    Args:
        tensor: The tensor.
        group: The process group. None: there is a single rank.
        op: "sum", "max" or "min".
        what: Name of the operation in errors.
    """
    if group is not None:
        with naming(what, group), _served(tensor, group) as sent:
            work = start_all_reduce(sent, group, op)
            (monitor().host_work(work) if sent.device.type == "cpu" else work).wait()
    return tensor


@contextmanager
def _served(tensor: Tensor, group: dist.ProcessGroup) -> Iterator[Tensor]:
    """Context with a tensor to communicate in place of ``tensor``.

    It is ``tensor`` itself, unless this is on the CPU and the group has no backend for the CPU
    (NCCL). Then it is a copy on the accelerator, which is copied to ``tensor`` at the end.
    """
    is_served = tensor.device.type != "cpu" or name_of_backend(group, tensor.device)
    device = None if is_served else current_accelerator()
    if device is None:
        yield tensor
        return
    sent = tensor.to(device)
    yield sent
    tensor.copy_(sent)


def bytes_to(content: bytearray, device: torch.device) -> torch.Tensor:
    """Returns a copy of ``content`` on ``device``. The host does not wait for the device."""
    tensor = torch.frombuffer(content, dtype=torch.uint8)
    if is_accelerator(device):
        # A copy from pageable memory would block the host. torch keeps the pinned block until the
        # copy has read it.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def start_all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: str) -> Work:
    """Start to all-reduce a small tensor in place. ``op`` is "sum", "max" or "min"."""
    ops = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    return _require(dist.all_reduce(tensor, op=ops[op], group=group, async_op=True))


def max_steps(tensor: Tensor, group: dist.ProcessGroup) -> Steps:
    """Compute the elementwise maximum of a small tensor over the group, in place.

    This is part of an operation on a lane.
    """
    stays = _stays_on_stream(group, tensor.device)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=not stays)
    yield () if stays else (_require(work),)


def broadcast_(tensor: Tensor, group: dist.ProcessGroup | None, source: int = 0) -> Tensor:
    """Broadcast ``tensor`` from rank ``source`` of the group. Without a group, do nothing."""
    if group is not None and tensor.numel():
        with naming("a broadcast of values", group), _served(tensor, group) as sent:
            dist.broadcast(_as_sent(sent), group=group, group_src=source)
    return tensor


def broadcast_together_(tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Broadcast many tensors of one dtype from the first rank, in few messages."""
    if group is not None and tensors:
        with naming("a broadcast of values", group):
            dist._broadcast_coalesced(group, list(tensors), _MESSAGE_BYTES, 0)


def send(tensor: Tensor, group: dist.ProcessGroup, receiver: int) -> None:
    """Send a tensor to rank ``receiver`` of the group, which calls :func:`receive_`.

    Returns when the tensor can be changed.
    """
    with naming("a transfer of a file", group):
        dist.send(tensor, group=group, group_dst=receiver)


def receive_(tensor: Tensor, group: dist.ProcessGroup, sender: int) -> None:
    """Receive a tensor from rank ``sender`` of the group, which calls :func:`send`."""
    with naming("a transfer of a file", group):
        dist.recv(tensor, group=group, group_src=sender)


class DifferentCallsError(RuntimeError):
    """Ranks have called different collective operations.

    Attributes:
        group: The process group of these ranks.
    """

    def __init__(self, text: str, group: dist.ProcessGroup) -> None:
        super().__init__(text)
        self.group = group


def gather_objects(
    value: object,
    group: dist.ProcessGroup | None,
    what: str = "a comparison of ranks",
    *,
    call: str | None = None,
) -> list[object]:
    """Returns the ``value`` of every rank, on every rank. Pickles the values, so that it is not for
    use in every step.

    Args:
        value: The object of this rank.
        group: The process group. None: there is a single rank.
        what: Name of the operation in errors.
        call: The part of ``what`` that is the same on all ranks. None: all of it.

    Raises:
        DifferentCallsError: Ranks have called different operations. All ranks raise.
    """
    if group is None:
        return [value]
    if dist.get_backend(group) == "fake":
        return [value] * group.size()  # this process stands for all ranks
    gathered: list[Any] = [None] * group.size()
    with naming(what, group):
        dist.all_gather_object(gathered, (call or what, value), group=group)
    first_ranks: dict[str, int] = {}
    for rank, (name, _) in enumerate(gathered):
        first_ranks.setdefault(name, rank)
    if len(first_ranks) > 1:
        found = ", ".join(
            f"rank {dist.get_global_rank(group, rank)} in {name}"
            for name, rank in first_ranks.items()
        )
        raise DifferentCallsError(
            f"{what}: expected all ranks to make the same calls in the same order; found {found}",
            group,
        )
    return [each for _, each in gathered]


def _store(out: Tensor, value: Tensor, accumulate: bool, divisor: float = 1.0) -> None:
    if accumulate:
        out.add_(value, alpha=1.0 / divisor)
        return
    out.copy_(value)
    if divisor != 1.0:
        out.div_(divisor)


class _Options:
    """Constant options of collectives. Options of reductions are indexed by ``average``."""

    def __init__(self, *, is_async: bool) -> None:
        self.gather = distributed_c10d.AllgatherOptions()
        self.gather.asyncOp = is_async
        self.reduce_scatter = [distributed_c10d.ReduceScatterOptions() for _ in range(2)]
        self.all_reduce = [distributed_c10d.AllreduceOptions() for _ in range(2)]
        ops: Any = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        made: Any
        for made in (self.reduce_scatter, self.all_reduce):
            for options, op in zip(made, ops, strict=True):
                options.reduceOp, options.asyncOp = op, is_async


def _as_sent(tensor: Tensor) -> Tensor:
    """Returns a view whose dtype all backends can send. Gloo does not support float8."""
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.uint8:
        return tensor.view(torch.uint8)
    return _as_reals(tensor)


def _as_reals(tensor: Tensor) -> Tensor:
    """Returns a view whose dtype all backends can sum: two real numbers for a complex one."""
    return torch.view_as_real(tensor).view(-1) if tensor.dtype.is_complex else tensor


def _is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    name = name_of_backend(group, device)
    return backend.current().is_gloo(name)


def _at_one_place(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors start at the same address. Also works for fake tensors."""
    if not backend.current().has_values:
        return allocator.begin_together(first, second)
    return first.data_ptr() == second.data_ptr()


def _stays_on_stream(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether collectives run on the current stream: see the module docstring."""
    return is_accelerator(device) and name_of_backend(group, device) == default_backend(device)


def _require(work: Work | None) -> Work:
    assert work is not None, "this rank is not in the group"
    return work
