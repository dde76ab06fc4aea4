"""Weights that Transformer Engine has quantized.

[Note: Encodings]
With most recipes, one *encoding* serves forward and backward. Weights with two encodings encode the
same main weights once for each phase. Each encoding has its own wire and full parameters, which are
gathered only for its phase; a recomputation within backward needs both. One refresh updates all
encodings. Only the encodings that the next use reads are then gathered in full.

Encoding may write anywhere in a parameter of which this rank holds a part. So each encoding is
written into its full parameters, which have memory during that time, and copied to the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from fsdp_engine.buffers.sharded_buffer import Gather, ShardedBuffer
from fsdp_engine.buffers.weights import FullParams, KeptWeights
from fsdp_engine.comm.collectives import Steps
from fsdp_engine.comm.lanes import Chain, Ticket
from fsdp_engine.extensions.transformer_engine.phased_unit import PhasedUnit
from fsdp_engine.extensions.transformer_engine.scratch import ThroughScratch
from fsdp_engine.runtime.unit import BACKWARD, BOTH, FORWARD

# The encodings that a use reads, if there are two.
_READ: dict[int, tuple[int, ...]] = {FORWARD: (0,), BACKWARD: (1,), BOTH: (0, 1)}


class Encoding(NamedTuple):
    """One encoding of a buffer's weights.

    Attributes:
        wire: The bytes that are stored between uses, at the depth of PARAM.
        full: The full parameters.
    """

    wire: ShardedBuffer
    full: FullParams


class QuantizedWeights(KeptWeights):
    """Weights with one or two encodings. See the module docstring.

    Attributes:
        wanted: Phases that the next gather must serve.
        phases: Phases whose full parameters are gathered or in flight.
        for_backward: Whether a backward reads the gathered parameters.
    """

    unit_class = PhasedUnit
    codec: Any  # a TransformerEngineCodec
    _is_written_by_params = True

    def __init__(self, *args: Any) -> None:
        self.wanted = BOTH
        self.phases = BOTH
        self.for_backward = False
        self._missing = BOTH
        self._encodings: list[Encoding] = []
        self._unshards: list[Chain] = []
        self._through_scratch: ThroughScratch | None = None
        super().__init__(*args)
        self.num_gathers = len(self._encodings)

    @property
    def is_split(self) -> bool:
        """Whether forward and backward gather different bytes."""
        return self.reshards and len(self._encodings) > 1

    @property
    def can_be_written(self) -> bool:
        """See :class:`Weights`."""
        return len(self._encodings) == 1

    def belong_to(self, buffer: Any) -> None:
        """See :class:`Weights`."""
        spec = self._spec
        if self.codec.gathers_through_scratch and not self.reshards and spec.optim_depth > 0:
            targets = [each.full.target.tensor for each in self._encodings]
            self._through_scratch = ThroughScratch(
                spec, self._context, self.codec, self._main, targets, buffer
            )
            self.num_gathers = 1

    def bind(self, index: int, param: nn.Parameter) -> nn.Parameter:
        """See :class:`Weights`."""
        full = [each.full.params[index] for each in self._encodings]
        bound: nn.Parameter = self.codec.bind(param, full)
        return bound

    def gather(self, compute_now: Ticket | None = None, *, is_held: bool = False) -> list[Ticket]:
        """See :class:`Weights`. Gathers the encodings that uses in the phases ``wanted`` read."""
        self._missing = self.wanted & ~self.phases
        return super().gather(compute_now, is_held=is_held)

    def _start_gathers(
        self, refreshed: Sequence[Ticket], stepped: Sequence[Ticket], *, is_held: bool
    ) -> Sequence[Ticket]:
        missing = self.wanted
        if is_held:
            missing = self._missing if len(self._encodings) > 1 else 0
        return [
            self._start_gather(self._unshards[number], encoding.full.storages, refreshed, stepped)
            for number, encoding in enumerate(self._encodings)
            if missing and number in self._read_in(missing)
        ]

    def _bring_up_to_date(self, compute_now: Ticket | None) -> list[Ticket]:
        if self._through_scratch is not None:
            self._seen_version = self._main.tensor._version
            self.pending.finish()  # The pending step reads the gradients, whose memory is reused.
            return [self._through_scratch.refresh()]
        return super()._bring_up_to_date(None if self._fill(self._storages) else compute_now)

    def gathered(self) -> None:
        """See :class:`Weights`."""
        self.pending.finish()
        if self._through_scratch is not None:
            self._through_scratch.finish()
        self.free_all_but(self.phases)  # Free memory that only the encoding needed.
        for storage in self._storages:
            if storage.filled:
                storage.expose()
        self.codec.after_gather(for_backward=self.for_backward or not self.reshards)

    def free_all_but(self, phases: int) -> None:
        """Free the encodings that no use in ``phases`` reads."""
        read = self._read_in(phases)
        for number, encoding in enumerate(self._encodings):
            if number not in read:
                for storage in encoding.full.storages:
                    self._free(storage)

    def note_access(self) -> None:
        """See :class:`Weights`."""
        read = self._read_in(self.phases if self.reshards else BOTH)
        reads = [self._encodings[number].full.target.tensor for number in read]
        self._context.lanes.compute.access(reads=reads)

    def _read_in(self, phases: int) -> Sequence[int]:
        return (0,) if len(self._encodings) == 1 else _READ[phases]

    def _make_refresh(self) -> Chain:
        self._encodings.append(Encoding(self._wire, self._full))
        for _ in range(self.codec.num_encodings - 1):
            wire = self._make_kept_wire()
            full = self._make_full(wire)
            self._storages += full.storages
            self._encodings.append(Encoding(wire, full))
        chain, spec = Chain(), self._spec
        self._encode(chain)
        for each in self._encodings:
            depths = spec.optim_depth, spec.param_depth
            how = Gather(spec.label, spec.tag)
            each.wire.gather(chain, self._context, *depths, how)
        return chain

    def _make_unshard(self) -> Chain:
        spec = self._spec
        for each in self._encodings:
            chain, how = Chain(), Gather(spec.label, spec.tag, each.wire.tensor)
            each.full.target.gather(chain, self._context, spec.param_depth, 0, how)
            self._unshards.append(chain)
        return self._unshards[0]

    def _encode(self, chain: Chain) -> None:
        """Encode into this rank's part of the full parameters, other parts of which may be
        overwritten. Copy the part to the wire if that is another buffer."""
        codec, main = self.codec, self._main
        parts = [each.full.target.narrow(main.depth) for each in self._encodings]
        copies = [
            (each.wire.narrow(main.depth), part)
            for each, part in zip(self._encodings, parts, strict=True)
            if each.wire is not each.full.target
        ]

        def encode() -> Steps:
            yield from codec.encode(main.tensor, parts)
            for kept, part in copies:
                kept.copy_(part)

        targets = [each.full.target.tensor for each in self._encodings]
        writes = [*targets, *(kept for kept, _ in copies), *codec.state]
        label, lane = f"encode {self._spec.label}", self._context.lanes.encode
        chain.add(lane, label, encode, reads=[main.tensor], writes=writes)
