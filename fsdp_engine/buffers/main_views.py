"""Views of values that have the layout of main weights, one for each parameter. For extensions."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_engine.buffers.gradient_memory import like
from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.flat_dtensor import FlatDTensor


def main_views(buffer: ParamAndGradBuffer, flat: Tensor) -> dict[str, Tensor]:
    """Returns a tensor for each parameter of ``buffer`` by name, sharded like the parameter, over
    the memory of ``flat``.

    Args:
        buffer: The buffer.
        flat: 1-D, of as many elements as this rank's shard of the buffer's main weights.
    """
    depth = buffer.spec.optim_depth
    shard = ShardedBuffer(buffer.layout, buffer.mesh.coordinate, depth, flat)
    found = {}
    pairs = zip(buffer.records, buffer.sharded_params, strict=True)
    for index, (record, param) in enumerate(pairs):
        local = shard.full(index) if buffer.is_plain else shard.local(index, depth)
        found[record.name] = like(param.detach(), local)
    return found


def part_like(given: Tensor, target: Tensor) -> Tensor:
    """Returns this rank's part of ``given``, which is a full plain tensor, or is sharded as
    ``target`` is."""
    if isinstance(target, FlatDTensor) and not isinstance(given, DTensor):
        return target.flat_placement.slice_of_full(given)
    return local_part(given)
