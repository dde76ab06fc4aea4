"""Main weights that are stored at a home."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fsdp_engine.accelerator import is_accelerator
from fsdp_engine.buffers.placement import MainShard
from fsdp_engine.buffers.sharded_buffer import BufferContext, Gather
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.extensions.offload.home import Home, Homes
from fsdp_engine.layout import Coordinate
from fsdp_engine.memory.allocator import TransientStorage, alias
from fsdp_engine.strategies import Role, Strategy


class HomedMain(MainShard):
    """Main weights at a home, from which gathers copy them:

        identity codec     home --> this rank's part of the full weights
        cast               home --cast by the host--> home of compute weights --> this rank's part
        others             home --> transient memory --encode--> as without a home

    The second case requires that OPTIM and PARAM are sharded to the same depth, and a home in host
    memory: each microbatch copies compute weights, which the host casts once per step. On a disk,
    compute weights would need additional writes.
    """

    is_resident = False

    def __init__(
        self,
        spec: BufferSpec,
        context: BufferContext,
        codec: ParamCodec,
        homes: Homes,
        *,
        is_cast: bool,
    ) -> None:
        at = context.mesh_communicators.mesh.coordinate
        self.home = homes.make(bytes_of_main(spec, at), context.lanes.drain)
        main = alias(self.home.bytes.view(spec.kind.dtypes.main))
        super().__init__(spec, context, codec, main)
        if is_accelerator(context.memory.device):
            self.before_change = context.lanes.drain_gathers  # Gathers read the home.
        self._lane = context.lanes.encode
        self._sent: Home | None = self.home if codec.is_identity else None
        if is_cast:
            num_bytes = main.numel() * codec.wire_dtype.itemsize
            self._sent = homes.make(num_bytes, context.lanes.drain)
        self._main: TransientStorage | None = None
        if self._sent is None:
            self._main = context.memory.transient(main.numel(), main.dtype, "full")
            self.memory = (self._main,)

    def prepare(self) -> Chain:
        """See :class:`MainShard`. Casts on the host if compute weights have a home."""
        chain, codec, main = Chain(), self._codec, self.buffer.tensor
        if self._sent is not None and self._sent is not self.home:
            sent = self._sent.bytes.view(codec.wire_dtype)
            cast = partial(codec.encode, main, (sent,))
            label = f"encode {self._spec.label}"
            chain.add(self._lane, label, cast, reads=[main], writes=[sent])
        return chain

    def source(self) -> Gather:
        """See :class:`MainShard`."""
        spec, codec, home = self._spec, self._codec, self.home
        if (sent := self._sent) is not None:

            def load(parts: Sequence[Tensor]) -> Steps:
                return sent.load(parts[0].view(torch.uint8))

            return Gather(spec.label, spec.tag, load, reads=[sent.bytes])
        assert self._main is not None
        with self._main.while_filled():
            main_on_device = self._main.view(0, (self._main.numel,))
            main_bytes = main_on_device.view(torch.uint8)

        def load_and_encode(wires: Sequence[Tensor]) -> Steps:
            yield from home.load(main_bytes)
            yield from codec.encode(main_on_device, wires)

        writes = [main_on_device, *codec.state]
        reads = [self.buffer.tensor]
        return Gather(spec.label, spec.tag, load_and_encode, reads=reads, writes=writes)

    def changed_on_host(self) -> None:
        """See :class:`MainShard`."""
        self.home.flush()


def bytes_of_main(spec: BufferSpec, at: Coordinate) -> int:
    """Returns the number of bytes of main weights on the rank at ``at``."""
    start, stop = spec.layout.range(spec.optim_depth, at)
    return (stop - start) * spec.kind.dtypes.main.itemsize


def can_leave_device(strategy: Strategy, codec: ParamCodec) -> bool:
    """Returns whether main weights can be offloaded: they are not part of compute weights that stay
    on the device."""
    if codec.is_identity:
        return strategy.depth(Role.OPTIM) == strategy.depth(Role.PARAM) > 0
    return codec.encodes_shards


def check_leaves_device(
    strategy: Strategy, codec: ParamCodec, main: torch.dtype, of: str = ""
) -> None:
    """Check that trainable main weights can be offloaded from an accelerator.

    Args:
        strategy: The levels of the buffer.
        codec: The codec of the buffer.
        main: Dtype of the main weights.
        of: "of" and the unit's label, for the error.

    Raises:
        ValueError: The weights would stay on the accelerator, but their gradients would not.
    """
    if not can_leave_device(strategy, codec):
        named = f" {of}" if of else ""
        raise ValueError(
            f"offload.main_weights: expected main weights{named} that are not part of compute "
            "weights on the device: the level optim_grads_params, or another param_dtype; found "
            f"{strategy} with both in {main}"
        )


def is_cast_at_home(strategy: Strategy, codec: ParamCodec) -> bool:
    """Returns whether compute weights have a home in host memory in addition to main weights."""
    encodes = codec.is_identity or codec.weights_class is not None
    return not encodes and strategy.depth(Role.OPTIM) == strategy.depth(Role.PARAM)
