"""What is sent of a model: its parameters and persistent buffers, and which part this rank has.

[Note: Each its own]
Where each rank sends what it holds, every element is sent by one rank. Ranks that hold the same
slice of a buffer's line share it out in equal parts, so that at every level each sends, and keeps a
version of, ``1 / number of ranks`` of the model:

    line of a buffer              [................................]
    cut over 2 inner ranks        [   inner 0     ][    inner 1    ]
    and the same on 2 outer ones  [out 0  ][out 1 ][out 0  ][out 1 ]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.checkpoint.export_source import Part
from fsdp_engine.checkpoint.model_state import is_extra_state
from fsdp_engine.checkpoint.sharded_model import SavedParam, saved_params
from fsdp_engine.devices import memory
from fsdp_engine.engine import Engine
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.flat_dtensor.tensor_parallel_spec import TensorParallelSpec
from fsdp_engine.strategies import AXIS_BELOW_DEPTH, Axis


@dataclass(frozen=True, eq=False)
class SentParam:
    """A parameter.

    Attributes:
        name: the first of its names, in the order of modules.
        shape: of the whole tensor.
        dtype: in which it is sent.
        buffer, index: where its main weights are.
        before: elements of the whole that lie before those that this rank's buffer knows: others'
            experts.
        is_of_experts: not all ranks share it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    buffer: ParamAndGradBuffer
    index: int
    before: int
    is_of_experts: bool

    def own(self) -> Part:
        """What this rank sends where each sends its own ([Note: Each its own]): the number of the
        first element in what its buffer knows of the parameter, and main weights, 1-D."""
        buffer = self.buffer
        depth, at = buffer.spec.optim_depth, buffer.mesh.coordinate
        local = buffer.weights.main.local(self.index, depth)
        low, high = buffer.layout.tensor_range(self.index, depth, at)
        if not buffer.records[self.index].is_written:
            return low, local[:0]
        begin, end = _share(buffer)
        offset = buffer.layout.slots[self.index].offset
        start, stop = max(low, begin - offset), min(high, end - offset)
        return (start, local[start - low : stop - low]) if start < stop else (low, local[:0])

    def parts(self, first: int, flat: Tensor) -> Iterator[Part]:
        """Elements from ``first`` on of what the buffer knows, in parts that are contiguous in the
        whole: the number of the first there, and they."""
        if self._spread is None:
            yield self.before + first, flat
            return
        for there, here, count in self._spread.runs(first, first + flat.numel()):
            yield there, flat[here - first : here - first + count]

    def places(self, elements: Tensor) -> Tensor:
        """Where elements of what the buffer knows are in the whole.

        Args:
            elements: their numbers, int64, ascending; so are the places.
        """
        if self._spread is None:
            return elements + self.before
        place = memory.zeros_like(elements, torch.int64)
        for dim, size in enumerate(self._spread.local_shape):
            step = math.prod(self._spread.local_shape[dim + 1 :])
            index = elements // step % size + self._spread.offsets[dim]
            place += index * math.prod(self.shape[dim + 1 :])
        return place

    @property
    def _spread(self) -> TensorParallelSpec | None:
        return self.buffer.records[self.index].spread


@dataclass(frozen=True, eq=False)
class SentBuffer:
    """A persistent buffer of a module; attributes and methods as of :class:`SentParam`. Where each
    rank sends its own, that of the first rank is sent.

    Attributes:
        tensor: it.
        is_mine: this is the first rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor
    is_mine: bool

    def own(self) -> Part:
        """As of a parameter."""
        flat = self.tensor.detach().reshape(-1)
        return 0, flat if self.is_mine else flat[:0]

    def parts(self, first: int, flat: Tensor) -> Iterator[Part]:
        """As of a parameter."""
        yield first, flat

    def places(self, elements: Tensor) -> Tensor:
        """As of a parameter."""
        return elements


Sent = SentParam | SentBuffer


def sent_of(engine: Engine, dtype: torch.dtype | None) -> tuple[list[SentParam], list[SentBuffer]]:
    """Parameters, unit by unit, and persistent buffers. A tied one is there once. What a user's
    hook takes out of the model's ``state_dict`` is not there.

    Args:
        engine: at rest.
        dtype: for floating-point tensors; None: that of the main weights.

    Raises:
        ValueError: what cannot be sent; names it.
    """
    found: dict[int, tuple[Tensor, str]] = {}
    for name, value in engine.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_extra_state(name):
            found.setdefault(id(value), (value, name))
    saved = saved_params(engine)
    params: list[SentParam] = []
    for buffer in engine.buffers:
        for index, param in enumerate(buffer.sharded_params):
            if (entry := found.pop(id(param), None)) is not None:
                as_saved = saved[id(param)]
                name = as_saved.name if as_saved.is_of_experts else entry[1]
                params.append(_param(buffer, index, name, as_saved, dtype))
    is_first = engine.ranks.rank == 0
    buffers = []
    for tensor, name in found.values():
        if isinstance(tensor, DTensor):
            raise ValueError(f"{name}: expected a plain persistent buffer; found a DTensor")
        sent = _sent_dtype(tensor.dtype, dtype)
        buffers.append(SentBuffer(name, tuple(tensor.shape), sent, tensor, is_first))
    return params, buffers


def _param(
    buffer: ParamAndGradBuffer,
    index: int,
    name: str,
    as_saved: SavedParam,
    dtype: torch.dtype | None,
) -> SentParam:
    shape, before = tuple(buffer.placement(index).shape), 0
    if isinstance(as_saved.saved, FlatDTensor) and as_saved.saved is not as_saved.held:
        if buffer.records[index].spread is not None:
            raise ValueError(
                f"{name}: expected experts that are no DTensors, or such that all ranks share; "
                "found a DTensor of which ranks hold different experts"
            )
        place = as_saved.saved.flat_placement
        low, _ = buffer.layout.tensor_range(index, buffer.spec.optim_depth, buffer.mesh.coordinate)
        shape, before = tuple(place.shape), place.start - low
    main = buffer.weights.main.tensor.dtype
    sent = _sent_dtype(main, dtype)
    return SentParam(name, shape, sent, buffer, index, before, as_saved.is_of_experts)


def _share(buffer: ParamAndGradBuffer) -> tuple[int, int]:
    """What of its line this rank sends: see [Note: Each its own]."""
    depth, mesh = buffer.spec.optim_depth, buffer.mesh
    start, stop = buffer.layout.range(depth, mesh.coordinate)
    number, count = 0, 1
    for axis in (Axis.OUTER, Axis.INNER):
        if axis not in AXIS_BELOW_DEPTH[:depth]:
            place = mesh.axis(axis)
            number, count = number * place.size + place.rank, count * place.size
    length = stop - start
    return start + length * number // count, start + length * (number + 1) // count


def _sent_dtype(found: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and found.is_floating_point else found
