"""Where the shards of buffers are between uses."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_engine.buffers.gradient_shard import GradientShard
from fsdp_engine.buffers.main_shard import MainShard
from fsdp_engine.buffers.redistribute import BufferContext
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.comm.lanes import Lane
from fsdp_engine.comm.pending_steps import PendingStep


class Placement:
    """A seam: makes the shards of buffers. Here they are in the memory of the device."""

    def make_main(self, spec: BufferSpec, context: BufferContext, codec: ParamCodec) -> MainShard:
        """Returns the main weights of a buffer, which are no part of compute weights."""
        return MainShard(spec, context, codec)

    def make_gradients(
        self, spec: BufferSpec, context: BufferContext, depth: int, dtype: torch.dtype
    ) -> GradientShard:
        """Returns the accumulated gradients of a buffer, or those that its optimizer reads."""
        return GradientShard(spec, context, depth, dtype)

    def make_pending_step(self, compute: Lane) -> PendingStep:
        """Returns the pending step of a buffer. ``compute``: the engine's lane."""
        return PendingStep(compute)

    def start(self, engine: Any) -> None:
        """Take part in an :class:`~.engine.Engine`, which has buffers with such shards and has just
        been built."""

    def rebuilt(self, engine: Any, unit: Any) -> None:
        """The shards of a :class:`~.runtime.unit.Unit` of ``engine`` were made anew."""
