"""The errors of quantized reductions in checkpoints.

A rank's errors belong to its part of the buffers, so they cannot be loaded with another number of
ranks or at another level. Training needs only their sum over ranks: the amount that previous
messages have left out. ``state_dict`` computes this sum, in the layout of main weights. After
``load_state_dict`` the owner of each element adds it to the next sum of gradients, once.

    errors of ranks --sum along the inner axis--> --sum along the outer axis--> main shard
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.main_views import main_views, part_like
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.comm.collectives import all_reduce_
from fsdp_engine.extensions.quantized_reduction.communicator import QuantizedCommunicator
from fsdp_engine.memory import allocator
from fsdp_engine.strategies import AXIS_BELOW_DEPTH

if TYPE_CHECKING:
    from fsdp_engine.engine import Engine


class KeptErrors:
    """The errors of an engine's reductions, for ``extra`` of a checkpointer.

    Args:
        engine: The engine.

    Raises:
        ValueError: Gradients are sent in fp16: a ``GradScaler`` multiplies them, and so the errors,
            by a number that changes. Or tensor-parallel parameters are at ``no_shard``, whose
            errors would be DTensors, which ``extra`` cannot contain. The message names a parameter.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._averages = engine.options.average_in_collective
        self._buffers = [each for each in engine.buffers if each.grads is not None]
        for buffer in self._buffers:
            if buffer.spec.kind.dtypes.comm == torch.float16:
                raise ValueError(
                    f"{buffer.records[0].name}: expected gradients that are sent in bf16 or fp32, "
                    "to save the errors of their reductions; found fp16"
                )
            if buffer.is_plain and any(isinstance(p, DTensor) for p in buffer.sharded_params):
                raise ValueError(
                    f"{buffer.records[0].name}: expected a level that shards optimizer state, to "
                    "save the errors of tensor-parallel parameters; found no_shard"
                )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of errors over all ranks, as sharded tensors by parameter name: the
        amounts by which the next gradients would be larger. Collective.

        Raises:
            RuntimeError: A forward or a backward is running.
        """
        self._begin("state_dict")
        found: dict[str, Any] = {}
        for buffer in self._buffers:
            lost = self._lost(buffer).to(buffer.weights.main.tensor.device)
            found |= main_views(buffer, lost)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace all errors by those of ``state_dict``, which may be from another number of ranks
        or another level. Errors of buffers that this engine does not quantize, for example on one
        rank, are dropped. Warns about parameters that only the engine or only ``state_dict`` has:
        their errors are zero or dropped.

        Raises:
            ValueError: A parameter has another shape; names it. Nothing is loaded.
            RuntimeError: A forward or a backward is running.
        """
        self._begin("load_state_dict")
        shapes = {
            record.name: param.shape
            for buffer in self._buffers
            for record, param in zip(buffer.records, buffer.sharded_params, strict=True)
        }
        for name, shape in shapes.items():
            if name in state_dict and state_dict[name].shape != shape:
                raise ValueError(
                    f"errors of reductions: expected {name} with shape {tuple(shape)}; found "
                    f"{tuple(state_dict[name].shape)}"
                )
        if differ := sorted(shapes.keys() ^ state_dict.keys()):
            warnings.warn(
                f"errors of reductions: expected errors of {len(shapes)} parameters; found errors "
                f"of {len(state_dict)}: {', '.join(differ[:8])} are only in one of them; their "
                "errors are zero or dropped",
                stacklevel=2,
            )
        for buffer in self._buffers:
            self._load(buffer, state_dict)

    def _begin(self, what: str) -> None:
        self._engine.scheduler.check_at_rest(f"errors of reductions, {what}")
        self._engine.await_ranks()
        self._engine.wait_for_reductions()

    def _lost(self, buffer: ParamAndGradBuffer) -> Tensor:
        """Returns this rank's main shard of the sum of errors."""
        start, stop = buffer.layout.range(0, buffer.mesh.coordinate)
        communicators = buffer.context.mesh_communicators
        total = allocator.zeros(stop - start, _dtype(buffer), communicators.mesh.device)
        for index, axis in enumerate(AXIS_BELOW_DEPTH):
            comm = communicators.comms[axis].reduce
            if comm is None:
                continue
            if isinstance(comm, QuantizedCommunicator):
                factor = comm.size if self._averages else 1
                comm.add_errors(total, buffer.spec.tag, factor=factor)
            all_reduce_(total, comm.group, what="the sum of errors of reductions")
            if self._averages:
                total.div_(comm.size)
            if index < buffer.spec.optim_depth:
                total = comm.part(total).clone()
        return total

    def _load(self, buffer: ParamAndGradBuffer, state_dict: dict[str, Any]) -> None:
        at, depth = buffer.mesh.coordinate, buffer.spec.optim_depth
        start, stop = buffer.layout.range(depth, at)
        communicators = buffer.context.mesh_communicators
        values = allocator.zeros(stop - start, _dtype(buffer), communicators.mesh.device)
        for name, view in main_views(buffer, values).items():
            if name in state_dict:
                local_part(view).copy_(part_like(state_dict[name], view))
        # The values are added to the sum along the last quantized axis. Sums along later axes then
        # contain them.
        last: tuple[int, QuantizedCommunicator] | None = None
        factor = 1.0
        for index, axis in enumerate(AXIS_BELOW_DEPTH):
            comm = communicators.comms[axis].reduce
            if comm is None:
                continue
            if isinstance(comm, QuantizedCommunicator):
                comm.drop_errors(buffer.spec.tag)
                last, factor = (index, comm), float(comm.size) if self._averages else 1.0
            elif self._averages and index < depth:
                factor *= comm.size
            elif not self._averages and index >= depth:
                factor /= comm.size
        if last is None:
            return
        index, quantized = last
        # This rank's shard of the sum overlaps with its main shard.
        low, high = buffer.layout.range(min(index, depth), at)
        size = (high - low) // quantized.size
        low += quantized.rank * size
        begin, end = max(low, start), min(low + size, stop)
        own = values[begin - start : max(begin, end) - start].mul(factor)
        quantized.add_once(buffer.spec.tag, begin - low, own)


def _dtype(buffer: ParamAndGradBuffer) -> torch.dtype:
    return torch.promote_types(buffer.weights.main.tensor.dtype, torch.float32)
