"""``weight_stream``: a model's weights, unit by unit, to whoever sends them on.

Three forms, one order of units:

    whole    gather a unit in the dtype that is sent, one message a buffer; (name, tensor)
    pieces   each rank its own, nothing is gathered; (name, offset, piece)
    changes  likewise, compared with what the receiver has; (name, indices, values)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.model_state import check_at_rest
from fsdp_engine.devices.agreement import agree
from fsdp_engine.engine import Engine
from fsdp_engine.export.layout_in_files import Given, given_of
from fsdp_engine.export.sent import Sent, SentBuffer, SentParam, sent_of
from fsdp_engine.export.unit_memory import UnitMemory
from fsdp_engine.export.version import Changes, WeightVersion
from fsdp_engine.layout.layout import ALIGNMENT, round_up
from fsdp_engine.pretrained.load import engine_of_model

WHAT = "weight_stream"
_INT32_MAX = 2**31 - 1

# (name, tensor), (name, offset, piece) or (name, indices, values).
Item = tuple[Any, ...]


def weight_stream(
    model_or_engine: nn.Module | Engine,
    dtype: torch.dtype | None = None,
    changed_since: WeightVersion | None = None,
    *,
    pieces: bool = False,
    as_in_files: bool = False,
) -> WeightStream:
    """A model's main weights and persistent buffers, unit by unit, to be sent elsewhere: to an
    inference engine, say. Collective, and so is each iteration over what it returns::

        for name, tensor in fe.weight_stream(engine, torch.bfloat16):
            if rank == 0:
                send(name, tensor)

    What comes is one of three:

    - by default ``(name, tensor)``, whole, on every rank. A unit is gathered in the dtype that is
      sent, one message for each of its buffers; the memory of the largest unit is held meanwhile.
    - with ``pieces`` ``(name, offset, piece)``: each rank has what it holds, and nothing is
      gathered. Pieces are 1-D, ``offset`` is the row-major element of the whole tensor at which
      they begin. All ranks together have every element once.
    - with ``changed_since`` ``(name, indices, values)``: of what a rank holds, what has changed in
      the dtype that is sent; nothing is gathered. ``whole.view(-1)[indices] = values`` is what a
      receiver does: ``indices`` is an int32 tensor (int64 for a tensor of more than 2**31 - 1
      elements), or a slice, where that takes fewer bytes.

    Tensors are to be read: they may be the engine's own memory, or the version's. They stay as they
    are until weights change, or until the next iteration with the same version.

    A tied weight comes once, under its first name. Persistent buffers come last; where each rank
    has its own, those of rank 0. Modules' extra states are left out.

    Args:
        model_or_engine: the sharded model, or its engine; at rest, and it stays so.
        dtype: of floating-point tensors; None: that of the main weights.
        changed_since: what the receiver has; a new one: nothing yet. It is brought up to date
            tensor by tensor: one counts as received when the next item is asked for. If the loop is
            left before, the tensor comes whole next time.
        pieces: each rank its own.
        as_in_files: names and layout as checkpoint files of ``transformers`` have them
            (:func:`~fsdp_engine.pretrained.save.save_pretrained`), in place of the model's own.

    Returns:
        What can be iterated over, as often as wanted: each time it streams the weights of then.

    Raises:
        ValueError, TypeError: an argument, or one that differs between ranks; the model is not
            sharded; ranks hold different experts (without ``pieces`` and ``changed_since``); or
            what transformers does to tensors is no reindexing.
        RuntimeError: within a forward, a backward or ``engine.unsharded()``, before weights are
            loaded, or after a load that failed half way. When it is iterated over: weights change
            before the end.

    Each is raised on every rank if on one, before anything is sent. (An iteration that gathers
    nothing raises on the ranks whose weights changed.)
    """
    engine = engine_of_model(model_or_engine)
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
    except Exception as caught:  # rules of transformers raise anything
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
    """Whether weights can be read.

    Raises:
        RuntimeError, ValueError: they cannot.
    """
    check_at_rest(engine)
    engine.missing_values.check()


class TensorMetadata(NamedTuple):
    """A tensor that a receiver has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """What is streamed at a time: a unit, or several of which the receiver has a tensor together.

    Attributes:
        buffers: of these units.
        given: what the receiver is given; the smallest comes last.
    """

    buffers: tuple[ParamAndGradBuffer, ...]
    given: tuple[Given, ...]


class WeightStream:
    """See :func:`weight_stream`, which makes it.

    Attributes:
        version: what the receiver has, brought up to date by each iteration; None: nobody asked.
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
        """One pass. Collective."""
        if self.version is not None:
            return self._changes(self.version)
        return self._own_pieces() if self._pieces else self._whole()

    def metadata(self) -> list[TensorMetadata]:
        """Name, dtype and shape of what a receiver has in the end, in the order in which whole
        tensors come. Nothing is sent or gathered.

        Raises:
            ValueError: see :func:`weight_stream`.
        """
        return [
            TensorMetadata(given.name, given.dtype, given.shape)
            for group in self.plan()
            for given in group.given
        ]

    def plan(self) -> list[Group]:
        """What is streamed, in order.

        Raises:
            ValueError: see :func:`weight_stream`.
        """
        params, buffers = sent_of(self._engine, self._dtype)
        if self.version is None and not self._pieces:
            _check_shared(params)
        given = given_of([*params, *buffers], self._engine.model, as_in_files=self._as_in_files)
        if self.version is not None:
            sents: list[Sent] = [*params, *buffers]
            self.version.check({each.name: (each.dtype, each.own()[1].numel()) for each in sents})
        return groups_of(self._engine, given)

    def _begin(self) -> tuple[list[Group], Any]:
        """The plan, once all ranks have one; and what tells that weights have changed since."""
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
        """Whether weights are what they were."""
        if self._state() != state:
            raise RuntimeError(
                "weight_stream: expected weights to stay as they are until the iteration is at its "
                "end; found them changed, by a step of an optimizer, a load or an edit"
            )

    def _whole(self) -> Iterator[Item]:
        groups, state = self._begin()
        sends = any(each.split_groups or each.has_dtensors for each in self._engine.buffers)
        group = self._engine.ranks.control_group if sends else None
        check = partial(self._check_together, state, group)
        most = max((self._num_bytes(each) for each in groups), default=0)
        memory = UnitMemory(self._engine.memory, most)
        try:
            for each in groups:
                check()
                yield from memory.last_apart(self._whole_of(each, memory))
            check()
        finally:
            memory.leave()

    def _check_together(self, state: Any, group: Any) -> None:
        error: Exception | None = None
        try:
            check_at_rest(self._engine)
            self._check(state)
        except Exception as caught:
            error = caught
        agree(WHAT, error, group)

    def _whole_of(self, group: Group, memory: UnitMemory) -> Iterator[Item]:
        bytes_ = memory.take() if self._num_bytes(group) else None
        lines = {}
        first = 0
        for buffer in group.buffers:
            into = None
            if count := self._line_bytes(buffer):
                assert bytes_ is not None
                into = bytes_[first : first + count].view(self._sent_dtype(buffer))
                first += round_up(count, ALIGNMENT)
            lines[id(buffer)] = buffer.gather_main(into)

        def whole_of(sent: Sent) -> Tensor:
            if isinstance(sent, SentBuffer):
                return sent.tensor.detach().to(sent.dtype)
            return sent.buffer.whole_main(lines[id(sent.buffer)], sent.index).detach()

        for given in group.given:
            yield given.name, given.whole(whole_of)

    def _sent_dtype(self, buffer: ParamAndGradBuffer) -> torch.dtype:
        main = buffer.weights.main.tensor.dtype
        return self._dtype if self._dtype is not None and main.is_floating_point else main

    def _line_bytes(self, buffer: ParamAndGradBuffer) -> int:
        """Of the whole of a buffer; none where its main weights are that already."""
        main, dtype = buffer.weights.main, self._sent_dtype(buffer)
        is_there = main.depth == 0 and main.tensor.dtype == dtype
        return 0 if is_there else buffer.layout.numel * dtype.itemsize

    def _num_bytes(self, group: Group) -> int:
        return sum(round_up(self._line_bytes(buffer), ALIGNMENT) for buffer in group.buffers)

    def _own_pieces(self) -> Iterator[Item]:
        groups, state = self._begin()
        most = max((self._own_bytes(each) for each in groups), default=0)
        memory = UnitMemory(self._engine.memory, most)
        try:
            for each in groups:
                check_at_rest(self._engine)
                for item in memory.last_apart(self._pieces_of(each, memory)):
                    yield item
                    del item
                    self._check(state)
        finally:
            memory.leave()

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
                        yield given.name, offset, _in_a_row(part)

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
    given: Given, sent: Sent, start: int, changes: Changes, values: Tensor
) -> Iterator[Item]:
    """What has changed of ``given``, as far as it is ``sent``."""
    for low, high in changes.runs:
        for offset, part in given.parts(sent, start + low, values[low:high]):
            yield given.name, slice(offset, offset + part.numel()), _in_a_row(part)
    if changes.elements is not None and changes.values is not None:
        numel = torch.Size(given.shape).numel()
        kind = torch.int32 if numel <= _INT32_MAX else torch.int64
        for where, found in given.places(sent, changes.elements + start, changes.values):
            yield given.name, where.to(kind), found


def _in_a_row(part: Tensor) -> Tensor:
    """1-D, each element behind the other. (One element counts as contiguous whatever its stride,
    but cannot be viewed as bytes.)"""
    flat = part.reshape(-1)
    if flat.stride(0) == 1:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def sources_of(group: Group) -> list[Sent]:
    """What a group's tensors are made of, each once."""
    found = {sent.name: sent for given in group.given for sent in given.sources}
    return list(found.values())


def groups_of(engine: Engine, given: list[Given]) -> list[Group]:
    """What is streamed at a time, in the order of units; buffers of modules are the last group."""
    unit_of = {id(buffer): unit.index for unit in engine.units for buffer in unit.buffers}
    # By unit, the first of those it goes with.
    goes_with = list(range(len(engine.units) + 1))

    def first(index: int) -> int:
        while goes_with[index] != index:
            index = goes_with[index]
        return index

    def unit(sent: Sent) -> int:
        return unit_of[id(sent.buffer)] if isinstance(sent, SentParam) else len(engine.units)

    for each in given:
        together = sorted({first(unit(sent)) for sent in each.sources})
        for other in together[1:]:
            goes_with[other] = together[0]
    groups: dict[int, list[Given]] = {}
    for each in given:
        groups.setdefault(first(unit(each.sources[0])), []).append(each)
    buffers: dict[int, list[ParamAndGradBuffer]] = {}
    for index, own in enumerate(engine.units):
        buffers.setdefault(first(index), []).extend(own.buffers)
    return [
        Group(tuple(buffers.get(index, ())), tuple(_smallest_last(groups[index])))
        for index in sorted(groups)
    ]


def _smallest_last(given: list[Given]) -> list[Given]:
    smallest = min(given, key=lambda each: torch.Size(each.shape).numel() * each.dtype.itemsize)
    return [*(each for each in given if each is not smallest), smallest]


def _check_shared(params: list[SentParam]) -> None:
    for each in params:
        if each.is_of_experts:
            raise ValueError(
                "weight_stream: expected parameters that all ranks share, to gather them whole; "
                f"found the expert {each.name}, of which other ranks hold others. Let each rank "
                "send its own: pieces=True, or changed_since"
            )
