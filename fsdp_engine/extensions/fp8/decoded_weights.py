"""Weights that are gathered in an encoding and decoded into the compute dtype.

    main shard --encode--> wire shard --all-gather--> full wire --decode--> compute parameters

The full wire has memory only while it is decoded. If parameters are not sharded, the decoded
weights are kept at rest instead of the wire.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp_engine.buffers.sharded_buffer import Gather, ShardedBuffer
from fsdp_engine.buffers.weights import Weights
from fsdp_engine.codecs.base import ParamCodec
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain
from fsdp_engine.memory.allocator import TransientStorage, alias
from fsdp_engine.precision import ParamDtypes


class DecodedWeights(Weights):
    """Weights that are decoded after each gather. See the module docstring."""

    codec: DecodingCodec

    @property
    def _full_dtype(self) -> torch.dtype:
        return self._spec.kind.dtypes.compute

    def check_written(self, name: str) -> None:
        """See :class:`Weights`."""
        raise RuntimeError(
            f"{name}: expected weights that forward does not write, "
            "since it reads decoded copies of encoded weights; found weights that forward has "
            "written. Write the parameter between steps, or exclude it from codec_rules"
        )

    def _make_wire(self) -> ShardedBuffer | None:
        spec = self._spec
        keeps = self.codec.keeps_wire or spec.optim_depth > spec.param_depth
        return self._make_kept_wire() if self.reshards and keeps else None

    def _make_refresh(self) -> Chain:
        chain, spec = Chain(), self._spec
        if self._wire is None and self.reshards:
            return chain
        line = self._wire
        if line is None:
            line, storage = self._make_full_wire()
            self._refresh_memory.append(storage)
        how = self.main_shard.source()
        line.gather(chain, self._context, spec.optim_depth, spec.param_depth, how)
        if self._wire is None:
            self._decode(chain, line)
        return chain

    def _make_unshard(self) -> Chain:
        chain, spec = Chain(), self._spec
        line, storage = self._make_full_wire()
        self._unshard_memory.append(storage)
        if self._wire is None:
            self._unshard_memory += self.main_shard.memory
            how = self.main_shard.source()
        else:
            how = Gather(spec.label, spec.tag, self._wire.tensor)
        line.gather(chain, self._context, spec.param_depth, 0, how)
        self._decode(chain, line)
        return chain

    def _make_full_wire(self) -> tuple[ShardedBuffer, TransientStorage]:
        layout, dtype = self._spec.layout, self.codec.wire_dtype
        storage = self._context.memory.transient(layout.numel, dtype, "full")
        storage.fill()
        return ShardedBuffer(layout, self._at, 0, storage.view(0, (layout.numel,))), storage

    def _decode(self, chain: Chain, line: ShardedBuffer) -> None:
        codec, target, slots = self.codec, self._full.target, self._spec.layout.slots
        # Decode into aliases: autograd would count writes to the parameters as in-place changes.
        outputs = [alias(target.full(index)) for index in range(len(slots))]
        offsets = [slot.offset for slot in slots]

        def steps() -> Steps:
            codec.decode(line.tensor, offsets, outputs)
            yield from ()

        label, reads = f"decode {self._spec.label}", [line.tensor, *codec.state]
        lane = self._context.lanes.inner_gather
        chain.add(lane, label, steps, reads=reads, writes=[target.tensor])


class DecodingCodec(ParamCodec):
    """Base class of codecs whose full wire is decoded into the compute parameters. If
    ``keeps_wire`` is set, weights are encoded once after each change of the main weights."""

    weights_class = DecodedWeights

    @abstractmethod
    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """Decode the full wire. Parameter ``i`` starts at ``offsets[i]``."""

    def full_itemsize(self, dtypes: ParamDtypes) -> int:
        """See :class:`ParamCodec`."""
        return self.wire_dtype.itemsize + dtypes.compute.itemsize

    def kept_itemsize(self, dtypes: ParamDtypes) -> int:
        """See :class:`ParamCodec`."""
        return dtypes.compute.itemsize
