"""``weight_stream``: iterates over a model's weights, unit by unit, to send them to a receiver.

There are three modes, which use the same order of units:

    full     each unit is gathered in the streamed dtype; yields (name, tensor)
    pieces   each rank yields its own elements, nothing is gathered; (name, offset, piece)
    changes  as pieces, but only elements that the receiver does not have; (name, indices, values)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.full_values import full_main, gather_main
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.model_state import check_at_rest
from fsdp_engine.comm.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.layout.layout import ALIGNMENT, round_up
from fsdp_engine.memory.allocator import Memory, TransientStorage
from fsdp_engine.pretrained.load import engine_of_model
from fsdp_engine.pretrained.streamed_tensors import (
    OutputTensor,
    StreamedBuffer,
    StreamedParam,
    StreamedTensor,
    output_tensors,
    streamed_tensors,
)
from fsdp_engine.pretrained.weight_version import Changes, WeightVersion


class UnitMemory:
    """The memory of one streamed unit. It is reused for the next unit, unless tensors over it are
    still referenced. In this case the tensors keep it, and new memory is allocated.

    Args:
        memory: The engine's memory manager.
        num_bytes: The number of bytes of the largest unit.
    """

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes
        self._held: tuple[TransientStorage, Tensor, int] | None = None

    def take(self) -> Tensor:
        """Returns all bytes for the next unit, as a uint8 tensor, 1-D."""
        if self._held is not None and self._held[0].num_uses > self._held[2]:
            self.release()
        if self._held is None:
            storage = self._memory.lasting(self._num_bytes, torch.uint8, "stream")
            storage.fill()
            whole = storage.view(0, (self._num_bytes,))
            self._held = storage, whole, storage.num_uses
        return self._held[1]

    def has(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is stored in this memory."""
        if self._held is None:
            return False
        mine: int = self._held[1].untyped_storage()._cdata
        is_mine: bool = tensor.untyped_storage()._cdata == mine
        return is_mine

    def release(self) -> None:
        """Release the memory. It is freed with the last tensor over it."""
        if self._held is not None:
            self._held[0].leave()
            self._held = None

    def last_separate(self, items: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield a unit's items, whose last elements are tensors. The tensor of the last item is
        copied, because the caller's loop variable still refers to it when the next unit takes
        memory."""
        held: tuple[Any, ...] | None = None
        for item in items:
            if held is not None:
                yield held
            held = item
        if held is not None:
            *rest, tensor = held
            yield (*rest, tensor.clone() if self.has(tensor) else tensor)


WHAT = "weight_stream"
_INT32_MAX = 2**31 - 1

# An item is (name, tensor), (name, offset, piece) or (name, indices, values).
Item = tuple[Any, ...]


def weight_stream(
    model_or_engine: nn.Module | Engine,
    dtype: torch.dtype | None = None,
    changed_since: WeightVersion | None = None,
    *,
    pieces: bool = False,
    as_in_files: bool = False,
) -> WeightStream:
    """Stream a model's main weights and persistent buffers, unit by unit, for example to an
    inference engine. This call is collective, and so is each iteration over the result::

        for name, tensor in fe.weight_stream(engine, torch.bfloat16):
            if rank == 0:
                send(name, tensor)

    Items have one of three forms:

    - By default items are ``(name, tensor)``, unsharded, on every rank. Each unit is gathered in
      the streamed dtype, with one all-gather for each of its buffers, into memory for the largest
      unit.
    - With ``pieces`` items are ``(name, offset, piece)``: each rank yields the elements that it
      holds, and nothing is gathered. A piece is 1-D, and ``offset`` is the row-major index of its
      first element in the unsharded tensor. Each element is yielded by exactly one rank.
    - With ``changed_since`` items are ``(name, indices, values)``: each rank yields those of its
      elements that have changed in the streamed dtype, and nothing is gathered. A receiver executes
      ``full.view(-1)[indices] = values``. ``indices`` is an int32 tensor (int64 for a tensor of
      more than 2**31 - 1 elements), or a slice if that needs fewer bytes.

    Do not modify the yielded tensors: they may share memory with the engine or the version. They
    are valid until weights change, or until the next iteration with the same version.

    A tied weight is yielded once, under its first name. Persistent buffers are yielded last; with
    ``pieces`` or ``changed_since`` only rank 0 yields them. Extra states of modules are omitted.

    Args:
        model_or_engine: The sharded model, or its engine. No forward or backward may run during an
            iteration.
        dtype: The dtype of floating-point tensors. None: the dtype of the main weights.
        changed_since: The version that the receiver has; a new object if it has nothing yet. The
            version is updated tensor by tensor: a tensor counts as received when the loop requests
            the next item. If the loop ends earlier, the next stream yields the full tensor.
        pieces: Yield each rank's own elements.
        as_in_files: Use the names and layout of checkpoint files of ``transformers``
            (``save_pretrained``) instead of the model's.

    Returns:
        An iterable for any number of iterations. Each iteration streams the current weights.

    Raises:
        ValueError, TypeError: An argument is not legal or differs between ranks, the model is not
            sharded, ranks hold different experts (without ``pieces`` and ``changed_since``), or a
            conversion of transformers is not a reindexing.
        RuntimeError: The call is within a forward, a backward or ``engine.unsharded()``, weights
            are not loaded yet, or a load failed halfway. During an iteration: weights have changed
            before its end.

    All ranks raise each error, before anything is sent. If nothing is gathered, only the ranks
    whose weights have changed during an iteration raise.
    """
    engine = engine_of_model(model_or_engine)
    engine.await_ranks()
    stream = WeightStream(engine, dtype, changed_since, pieces=pieces, as_in_files=as_in_files)
    error: Exception | None = None
    try:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype: expected a floating-point dtype or None; found {dtype!r}")
        if changed_since is not None and not isinstance(changed_since, WeightVersion):
            raise TypeError(
                f"changed_since: expected a WeightVersion or None; found {changed_since!r}"
            )
        check_ready(engine)
        stream.plan()
    except Exception as caught:  # conversions of transformers raise errors of any type
        error = caught
    mine = (str(dtype), changed_since is not None, pieces, as_in_files)
    all_ranks = agree(WHAT, error, engine.ranks.control_group, mine)
    if any(other != all_ranks[0] for other in all_ranks):
        raise ValueError(
            "dtype, changed_since, pieces, as_in_files: expected the same on all ranks; found "
            + " and ".join(sorted({str(other) for other in all_ranks}))
        )
    return stream


def check_ready(engine: Engine) -> None:
    """Check that the weights of an engine can be read.

    Raises:
        RuntimeError, ValueError: A forward, a backward or ``unsharded()`` is running, or values are
            missing.
    """
    check_at_rest(engine)
    engine.missing_values.check()


class TensorMetadata(NamedTuple):
    """The name, dtype and shape of a tensor that the receiver gets."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Tensors that are streamed together: those of one unit, or of several units that contribute to
    one tensor of the receiver.

    Attributes:
        buffers: The buffers of the units.
        given: The tensors that the receiver gets. The smallest one is last, because
            :meth:`UnitMemory.last_separate` copies the last tensor.
    """

    buffers: tuple[ParamAndGradBuffer, ...]
    given: tuple[OutputTensor, ...]


class WeightStream:
    """The iterable that ``weight_stream`` returns.

    Attributes:
        version: The version of the receiver, which each iteration updates. None: not used.
    """

    def __init__(
        self,
        engine: Engine,
        dtype: torch.dtype | None,
        version: WeightVersion | None,
        *,
        pieces: bool,
        as_in_files: bool,
    ) -> None:
        self.version = version
        self._engine = engine
        self._dtype = dtype
        self._pieces = pieces
        self._as_in_files = as_in_files

    def __iter__(self) -> Iterator[Item]:
        """Start an iteration. Collective."""
        if self.version is not None:
            return self._changes(self.version)
        return self._own_pieces() if self._pieces else self._full()

    def metadata(self) -> list[TensorMetadata]:
        """Returns the name, dtype and shape of all tensors that the receiver gets, in the order in
        which full tensors are yielded. Communicates nothing.

        Raises:
            ValueError: The tensors cannot be streamed; see ``weight_stream``.
        """
        return [
            TensorMetadata(given.name, given.dtype, given.shape)
            for group in self.plan()
            for given in group.given
        ]

    def plan(self) -> list[Group]:
        """Returns the groups of tensors in the order in which they are streamed.

        Raises:
            ValueError: The tensors cannot be streamed; see ``weight_stream``.
        """
        params, buffers = streamed_tensors(self._engine, self._dtype)
        if self.version is None and not self._pieces:
            _check_shared(params)
        given = output_tensors(
            [*params, *buffers], self._engine.model, as_in_files=self._as_in_files
        )
        if self.version is not None:
            sents: list[StreamedTensor] = [*params, *buffers]
            self.version.check({each.name: (each.dtype, each.own()[1].numel()) for each in sents})
        return groups_of(self._engine, given)

    def _begin(self) -> tuple[list[Group], Any]:
        """Check that all ranks have a plan. Returns the plan and the state of the weights.
        Collective."""
        self._engine.await_ranks()
        error: Exception | None = None
        groups: list[Group] = []
        try:
            check_ready(self._engine)
            groups = self.plan()
        except Exception as caught:
            error = caught
        agree(WHAT, error, self._engine.ranks.control_group)
        return groups, self._state()

    def _state(self) -> Any:
        return [(id(buffer.weights), buffer.weights.changes) for buffer in self._engine.buffers]

    def _check(self, state: Any) -> None:
        """Check that weights have not changed since ``state`` was taken."""
        if self._state() != state:
            raise RuntimeError(
                "weight_stream: expected unchanged weights during the iteration; found them "
                "changed by a step of an optimizer, a load or an edit"
            )

    def _full(self) -> Iterator[Item]:
        groups, state = self._begin()
        sends = any(each.split_groups or each.has_dtensors for each in self._engine.buffers)
        group = self._engine.ranks.control_group if sends else None
        check = partial(self._check_together, state, group)
        most = max((self._num_bytes(each) for each in groups), default=0)
        memory = UnitMemory(self._engine.memory, most)
        try:
            for each in groups:
                check()
                yield from memory.last_separate(self._full_of(each, memory))
            check()
        finally:
            memory.release()

    def _check_together(self, state: Any, group: Any) -> None:
        error: Exception | None = None
        try:
            check_at_rest(self._engine)
            self._check(state)
        except Exception as caught:
            error = caught
        agree(WHAT, error, group)

    def _full_of(self, group: Group, memory: UnitMemory) -> Iterator[Item]:
        bytes_ = memory.take() if self._num_bytes(group) else None
        flats = {}
        first = 0
        for buffer in group.buffers:
            into = None
            if count := self._full_bytes(buffer):
                assert bytes_ is not None
                into = bytes_[first : first + count].view(self._sent_dtype(buffer))
                first += round_up(count, ALIGNMENT)
            flats[id(buffer)] = gather_main(buffer, into)

        def whole_of(sent: StreamedTensor) -> Tensor:
            if isinstance(sent, StreamedBuffer):
                return sent.tensor.detach().to(sent.dtype)
            return full_main(sent.buffer, flats[id(sent.buffer)], sent.index).detach()

        for given in group.given:
            yield given.name, given.whole(whole_of)

    def _sent_dtype(self, buffer: ParamAndGradBuffer) -> torch.dtype:
        main = buffer.weights.main.tensor.dtype
        return self._dtype if self._dtype is not None and main.is_floating_point else main

    def _full_bytes(self, buffer: ParamAndGradBuffer) -> int:
        """Returns the bytes of an unsharded buffer; 0 if its main weights are already unsharded and
        have the streamed dtype."""
        main, dtype = buffer.weights.main, self._sent_dtype(buffer)
        is_there = main.depth == 0 and main.tensor.dtype == dtype
        return 0 if is_there else buffer.layout.numel * dtype.itemsize

    def _num_bytes(self, group: Group) -> int:
        return sum(round_up(self._full_bytes(buffer), ALIGNMENT) for buffer in group.buffers)

    def _own_pieces(self) -> Iterator[Item]:
        groups, state = self._begin()
        most = max((self._own_bytes(each) for each in groups), default=0)
        memory = UnitMemory(self._engine.memory, most)
        try:
            for each in groups:
                check_at_rest(self._engine)
                for item in memory.last_separate(self._pieces_of(each, memory)):
                    yield item
                    del item
                    self._check(state)
        finally:
            memory.release()

    def _pieces_of(self, group: Group, memory: UnitMemory) -> Iterator[Item]:
        bytes_ = memory.take() if self._own_bytes(group) else None
        own: dict[str, tuple[int, Tensor]] = {}
        first = 0
        for sent in sources_of(group):
            start, flat = sent.own()
            if flat.dtype != sent.dtype and flat.numel():
                assert bytes_ is not None
                count = flat.numel() * sent.dtype.itemsize
                flat = bytes_[first : first + count].view(sent.dtype).copy_(flat)
                first += round_up(count, ALIGNMENT)
            own[sent.name] = (start, flat)
        for given in group.given:
            for sent in given.sources:
                start, flat = own[sent.name]
                if flat.numel():
                    for offset, part in given.parts(sent, start, flat):
                        yield given.name, offset, _flat_contiguous(part)

    def _own_bytes(self, group: Group) -> int:
        return sum(
            round_up(flat.numel() * sent.dtype.itemsize, ALIGNMENT)
            for sent in sources_of(group)
            if (flat := sent.own()[1]).dtype != sent.dtype
        )

    def _changes(self, version: WeightVersion) -> Iterator[Item]:
        groups, state = self._begin()
        version.begin()
        try:
            for group in groups:
                check_at_rest(self._engine)
                for sent in sources_of(group):
                    start, flat = sent.own()
                    if flat.numel():
                        changes, values = version.update(sent.name, flat, sent.dtype)
                        for given in group.given:
                            if sent in given.sources:
                                yield from _items(given, sent, start, changes, values)
                        self._check(state)
                        version.confirm(sent.name)
        finally:
            version.end()


def _items(
    given: OutputTensor, sent: StreamedTensor, start: int, changes: Changes, values: Tensor
) -> Iterator[Item]:
    """Yield the items of one source's changes for one tensor of the receiver."""
    for low, high in changes.runs:
        for offset, part in given.parts(sent, start + low, values[low:high]):
            yield given.name, slice(offset, offset + part.numel()), _flat_contiguous(part)
    if changes.elements is not None and changes.values is not None:
        numel = torch.Size(given.shape).numel()
        kind = torch.int32 if numel <= _INT32_MAX else torch.int64
        for where, found in given.places(sent, changes.elements + start, changes.values):
            yield given.name, where.to(kind), found


def _flat_contiguous(part: Tensor) -> Tensor:
    """Returns a 1-D tensor of stride 1. (A tensor of one element is contiguous for any stride, but
    can be viewed as bytes only with stride 1.)"""
    flat = part.reshape(-1)
    if flat.stride(0) == 1:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def sources_of(group: Group) -> list[StreamedTensor]:
    """Returns the sources of a group's tensors, without duplicates."""
    found = {sent.name: sent for given in group.given for sent in given.sources}
    return list(found.values())


def groups_of(engine: Engine, given: list[OutputTensor]) -> list[Group]:
    """Group tensors by units, in the order of units. Persistent buffers are the last group."""
    unit_of = {id(buffer): unit.index for unit in engine.units for buffer in unit.buffers}
    # Disjoint sets of units that are streamed together: each unit refers to itself or to an earlier
    # unit of its set.
    parent = list(range(len(engine.units) + 1))

    def first(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    def unit(sent: StreamedTensor) -> int:
        return unit_of[id(sent.buffer)] if isinstance(sent, StreamedParam) else len(engine.units)

    for each in given:
        together = sorted({first(unit(sent)) for sent in each.sources})
        for other in together[1:]:
            parent[other] = together[0]
    groups: dict[int, list[OutputTensor]] = {}
    for each in given:
        groups.setdefault(first(unit(each.sources[0])), []).append(each)
    buffers: dict[int, list[ParamAndGradBuffer]] = {}
    for index, own in enumerate(engine.units):
        buffers.setdefault(first(index), []).extend(own.buffers)
    return [
        Group(tuple(buffers.get(index, ())), tuple(_smallest_last(groups[index])))
        for index in sorted(groups)
    ]


def _smallest_last(given: list[OutputTensor]) -> list[OutputTensor]:
    smallest = min(given, key=lambda each: torch.Size(each.shape).numel() * each.dtype.itemsize)
    return [*(each for each in given if each is not smallest), smallest]


def _check_shared(params: list[StreamedParam]) -> None:
    for each in params:
        if each.is_of_experts:
            raise ValueError(
                "weight_stream: expected parameters that all ranks share, to gather them; "
                f"found the expert {each.name}, where other ranks hold other experts. Let each "
                "rank send its own: pieces=True, or changed_since"
            )
