"""Gathers of one buffer's main weights, gradients and optimizer state, outside of training.

Each function is a collective over the ranks that share the buffer, unless its docstring says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fsdp_engine.buffers.param_and_grad_buffer import ParamAndGradBuffer
from fsdp_engine.buffers.published_gradients import local_part
from fsdp_engine.buffers.sharded_buffer import Gather, ShardedBuffer
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.flat_dtensor import share_attributes
from fsdp_engine.memory import allocator as mem

# The tag of the messages of these gathers. Tags from FIRST_TAG on belong to buffers.
MAIN_TAG = 1


def gather_main(buffer: ParamAndGradBuffer, into: Tensor | None = None) -> ShardedBuffer:
    """Gather the full main weights into new memory, and wait for them. If they are not sharded and
    ``into`` is None, return the result of :func:`present_main`.

    Args:
        buffer: The buffer.
        into: Memory for the result: a 1-D tensor of ``layout.numel`` elements. Shards are sent in
            its dtype.
    """
    main = present_main(buffer)
    if main.depth == 0 and into is None:
        return main
    return _gather(buffer, "main weights", main.tensor, into)


def present_main(buffer: ParamAndGradBuffer) -> ShardedBuffer:
    """Returns this rank's main weights. It is a copy if the user has put the values of a plain
    parameter into other memory (``param.data = values``), which the engine cannot observe. The old
    memory may belong to a tensor of the user and is not written."""
    main, params = buffer.weights.main, buffer.sharded_params
    if not buffer.is_plain or all(
        local_part(param).data_ptr() == main.full(index).data_ptr()
        for index, param in enumerate(params)
    ):
        return main
    present = replace(main, tensor=main.tensor.clone())
    for index, param in enumerate(params):
        present.full(index).copy_(local_part(param.detach()))
    return present


def full_main(buffer: ParamAndGradBuffer, main: ShardedBuffer, index: int) -> Tensor:
    """Returns the main weights of one parameter as a plain tensor. If the parameter is a DTensor,
    this is a collective over the mesh dimensions of the DTensor.

    Args:
        buffer: The buffer.
        main: The result of :func:`gather_main`.
        index: The position of the parameter in the layout.
    """
    spread, shard = buffer.spreads[index], main.full(index)
    return shard if spread is None else spread.gather_full(shard)


def main_parameters(buffer: ParamAndGradBuffer, main: ShardedBuffer) -> list[nn.Parameter]:
    """Returns the parameters as views of ``main``, the result of :func:`gather_main`. Not
    collective."""
    requires_grad = buffer.kind.requires_grad
    params = []
    for index, sharded in enumerate(buffer.sharded_params):
        param = buffer.as_parameter(index, nn.Parameter(main.full(index), requires_grad))
        share_attributes(param, sharded)
        params.append(param)
    return params


def write_main(buffer: ParamAndGradBuffer, main: ShardedBuffer) -> None:
    """Copy this rank's part of ``main``, the result of :func:`gather_main`, into the main weights.
    Not collective."""
    if main is buffer.weights.main:
        return
    if buffer.is_plain:
        for index, param in enumerate(buffer.sharded_params):
            local_part(param.detach()).copy_(main.full(index))
    else:
        buffer.weights.main.tensor.copy_(main.narrow(buffer.spec.optim_depth))


@torch.no_grad()
def set_main(buffer: ParamAndGradBuffer, values: Tensor, *, temporary: bool = False) -> None:
    """Set this rank's main weights. Not collective.

    Args:
        buffer: The buffer.
        values: 1-D, of as many elements as this rank's shard.
        temporary: The values replace the weights temporarily, or restore them afterwards. Pending
            backwards stay valid. False: where parameters are plain tensors, pending backwards raise
            an error, because the version counters of the parameters are increased.
    """
    weights = buffer.weights
    main = present_main(buffer)
    if weights.main_shard.before_change is not None:
        weights.main_shard.before_change()
    main.tensor.copy_(values)
    write_main(buffer, main)
    if buffer.is_plain and not temporary:
        torch.autograd.graph.increment_version([local_part(p) for p in buffer.sharded_params])
    weights.mark_stale()
    weights.main_shard.changed_on_host()


def gather_state(
    buffer: ParamAndGradBuffer, what: str, state: Sequence[Tensor | None]
) -> list[Tensor]:
    """Gather full optimizer state in one message, and wait for it. Returns one tensor for each
    parameter.

    Args:
        buffer: The buffer.
        what: The name of the state, for messages.
        state: For each parameter, a tensor that is sharded like the parameter, this rank's slice as
            a plain tensor, or None for zeros.
    """
    layout, depth = buffer.layout, buffer.spec.optim_depth
    dtype = next((each.dtype for each in state if each is not None), torch.float32)
    flat = mem.zeros(buffer.weights.main.tensor.numel(), dtype, buffer.context.memory.device)
    own = ShardedBuffer(layout, buffer.mesh.coordinate, depth, flat)
    for index, each in enumerate(state):
        if each is not None:
            own.local(index, depth).copy_(local_part(each).reshape(-1))
    if depth:
        own = _gather(buffer, what, own.tensor)
    return [own.full(index) for index in range(len(buffer.records))]


def gather_main_grads(buffer: ParamAndGradBuffer) -> None:
    """Gather reduced gradients on every rank, and hold them until gradients are cleared. Where
    full parameters have a ``main_grad``, the gathered gradients are copied into it. For sharded
    parameters, ``main_grad.cpu()`` returns the gathered gradients."""
    grads, depth = buffer.grads, buffer.spec.optim_depth
    if grads is None or not depth:
        return
    full = _gather(buffer, "gradients", grads.for_optimizer().narrow(depth))
    if not grads.writes_to_staging:
        grads.main_grads().tensor.copy_(full.tensor)
    buffer.published.publish_full([full.full(index) for index in range(len(buffer.records))])


def _gather(
    buffer: ParamAndGradBuffer, what: str, own: Tensor, into: Tensor | None = None
) -> ShardedBuffer:
    """Gather the shards ``own`` of all ranks into a full buffer, and wait for it.

    Args:
        buffer: The buffer.
        what: The name of the values, for messages.
        own: This rank's shard, 1-D, at the depth of OPTIM. It may be in host memory.
        into: Memory for the result, a 1-D tensor. Shards are sent in its dtype. None: it is
            allocated, with the dtype of ``own``.
    """
    context, spec = buffer.context, buffer.spec
    own = own.to(context.memory.device)
    source: Tensor | Callable[[Sequence[Tensor]], Steps] = own
    if into is None:
        into = mem.empty(spec.layout.numel, own.dtype, own.device)
    else:

        def cast(parts: Sequence[Tensor]) -> Steps:
            parts[0].copy_(own)
            yield from ()

        source = cast
    target = ShardedBuffer(spec.layout, buffer.mesh.coordinate, 0, into)
    chain, compute = Chain(), context.lanes.compute
    how = Gather(f"{what} of {spec.label}", MAIN_TAG, source, reads=[own])
    target.gather(chain, context, spec.optim_depth, 0, how)
    compute.wait(chain.run((compute.record(),)))
    return target
