"""A codec's operations as links of a chain, between main weights and the bytes that travel.

    main[OPTIM] --encode--> wire[OPTIM] --gather, axis by axis--> wire[...] --decode--> parameters

Encoding and the first gather are one operation where nothing else has to come between: such a
gather takes the encoding as its source (``redistribute.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fsdp_engine.buffers.redistribute import Gather
from fsdp_engine.buffers.sharded_buffer import ShardedBuffer
from fsdp_engine.buffers.spec import BufferSpec
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lane import Chain, Lane
from fsdp_engine.devices.memory import alias


def encoded(spec: BufferSpec, codec: ParamCodec, main: ShardedBuffer) -> Gather:
    """A gather of main weights, encoded by a codec of one plane."""

    if codec.is_identity:
        return Gather(spec.label, spec.tag)  # they lie where they are sent from

    def encode(wire: Tensor) -> Steps:
        return codec.encode(main.tensor, (wire,))

    return Gather(spec.label, spec.tag, encode, reads=[main.tensor], writes=[*codec.state])


def encode_in_whole_lines(
    chain: Chain,
    lane: Lane,
    label: str,
    codec: ParamCodec,
    main: ShardedBuffer,
    lines: Sequence[tuple[ShardedBuffer, ShardedBuffer]],
) -> None:
    """Encode every plane into this rank's part of its full line, all of which may be written,
    and bring that part from there to where it is kept, if that is elsewhere.

    Args:
        lines: for each plane the full line, and where its part is kept.
    """
    parts = [line.narrow(main.depth) for line, _ in lines]
    copies = [
        (kept.narrow(main.depth), part)
        for (line, kept), part in zip(lines, parts, strict=True)
        if kept is not line
    ]

    def encode() -> Steps:
        yield from codec.encode(main.tensor, parts)
        for kept, part in copies:
            kept.copy_(part)

    writes = [*(line.tensor for line, _ in lines), *(kept for kept, _ in copies), *codec.state]
    chain.add(lane, f"encode {label}", encode, reads=[main.tensor], writes=writes)


def decode(
    chain: Chain,
    lane: Lane,
    label: str,
    codec: ParamCodec,
    wire: ShardedBuffer,
    target: tuple[ShardedBuffer, Sequence[Tensor]],
) -> None:
    """Decode a full wire into full parameters; ``target``: where they lie, and they."""
    line, params = target
    # Not the parameters themselves: decoding is no in-place change that autograd may see.
    outputs = [alias(param) for param in params]
    offsets = [slot.offset for slot in wire.layout.slots]

    def steps() -> Steps:
        codec.decode(wire.tensor, offsets, outputs)
        yield from ()

    reads = [wire.tensor, *codec.state]
    chain.add(lane, f"decode {label}", steps, reads=reads, writes=[line.tensor])
