"""How weights climb: the operations of which chains are put together when a tower is built.

    main[OPTIM] --encode--> wire[OPTIM] --gather, axis by axis--> wire[...] --decode--> parameters

A chain says which tensors each operation reads and writes; lanes order it (``lanes.py``). Encoding
and the first climb are one operation where nothing else has to come between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from fsdp_engine.buffers.sharded_buffer import Ladder, ShardedBuffer
from fsdp_engine.codecs import ParamCodec
from fsdp_engine.devices.collectives import Steps
from fsdp_engine.devices.lanes import Chain, Lanes
from fsdp_engine.devices.memory import alias
from fsdp_engine.strategies import AXIS_BELOW_DEPTH

# Where a climb's first bytes come from: a tensor, an encoding into the first part, or (None) they
# lie there already.
Source = Tensor | Callable[[Tensor], Steps] | None


class Ascent:
    """Adds operations on one buffer's weights to chains.

    Args:
        label: of the buffer, for people.
        main: main weights.
        codec, ladder, lanes: of the buffer.
        tag: tells its messages from others in flight.
    """

    def __init__(
        self,
        label: str,
        main: ShardedBuffer,
        codec: ParamCodec,
        ladder: Ladder,
        lanes: Lanes,
        tag: int,
    ) -> None:
        self.label = label
        self.main = main
        self.codec = codec
        self.lanes = lanes
        self._ladder = ladder
        self._tag = tag

    def encode_into(self, wire: Tensor) -> Steps:
        """Encode main weights, by a codec of one plane."""
        return self.codec.encode(self.main.tensor, (wire,))

    def climb(
        self, chain: Chain, target: ShardedBuffer, from_depth: int, to_depth: int, source: Source
    ) -> None:
        """Bring bytes to ``from_depth`` of ``target`` and gather them depth by depth, each axis on
        its lane."""
        begin, lanes = target.narrow(from_depth), self.lanes
        encodes = callable(source)
        # What the first step reads, and writes beside the target.
        brought = source if isinstance(source, Tensor) else self.main.tensor if encodes else begin
        state = self.codec.state if encodes else ()
        if from_depth == to_depth:
            if callable(source):
                chain.add(
                    lanes.inner_gather,
                    f"encode {self.label}",
                    partial(source, begin),
                    reads=[brought],
                    writes=[begin, *state],
                )
            return
        for depth in range(from_depth - 1, to_depth - 1, -1):
            axis = AXIS_BELOW_DEPTH[depth]
            chain.add(
                lanes.gather(axis),
                f"all-gather of {self.label} over the {axis.value} axis",
                self._step(target, depth, source),
                reads=[brought],
                writes=[target.narrow(depth), *state],
            )
            source, brought, state = None, target.narrow(depth), ()

    def encode_in_whole_lines(
        self, chain: Chain, lines: Sequence[ShardedBuffer], kept: Sequence[ShardedBuffer]
    ) -> None:
        """Encode every plane into this rank's part of its full line, all of which may be written,
        and bring that part from there to where it is kept, if that is elsewhere."""
        depth, main = self.main.depth, self.main.tensor
        parts = [line.narrow(depth) for line in lines]
        copies = [
            (wire.narrow(depth), part)
            for line, wire, part in zip(lines, kept, parts, strict=True)
            if wire is not line
        ]

        def encode() -> Steps:
            yield from self.codec.encode(main, parts)
            for wire, part in copies:
                wire.copy_(part)

        writes = [*(line.tensor for line in lines), *(wire for wire, _ in copies)]
        chain.add(
            self.lanes.inner_gather,
            f"encode {self.label}",
            encode,
            reads=[main],
            writes=[*writes, *self.codec.state],
        )

    def decode(
        self, chain: Chain, wire: ShardedBuffer, target: ShardedBuffer, params: Sequence[Tensor]
    ) -> None:
        """Decode a full wire into full parameters, which lie in ``target``."""
        # Not the parameters themselves: decoding is no in-place change that autograd may see.
        outputs = [alias(param) for param in params]
        offsets = [slot.offset for slot in wire.layout.slots]

        def decode() -> Steps:
            self.codec.decode(wire.tensor, offsets, outputs)
            yield from ()

        chain.add(
            self.lanes.inner_gather,
            f"decode {self.label}",
            decode,
            reads=[wire.tensor, *self.codec.state],
            writes=[target.tensor],
        )

    def _step(self, target: ShardedBuffer, depth: int, source: Source) -> Callable[[], Steps]:
        if not callable(source):
            return lambda: self._ladder.climb(target, depth, source, self._tag)
        begin = target.narrow(depth + 1)

        def steps() -> Steps:
            yield from source(begin)
            yield from self._ladder.climb(target, depth, None, self._tag)

        return steps
