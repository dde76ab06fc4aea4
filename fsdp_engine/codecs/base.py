"""What a codec says: how main weights become the bytes that travel, and those become parameters.

    main shard --encode--> wire shard --gather--> wire, full --decode--> compute parameters

A codec whose wire *is* the compute parameters (``decodes`` False) needs no second buffer: it
encodes into this rank's slice of the full buffer, which is gathered in place. One codec object
serves one buffer of parameters and may keep small replicated state, such as scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_engine.collectives import Steps
from fsdp_engine.precision import ParamDtypes


@dataclass(frozen=True)
class Piece:
    """The part of one parameter in a shard: elements ``start..stop`` of the row-major parameter,
    at ``offset`` elements into the shard. ``start == stop`` where this rank holds none of it."""

    index: int
    start: int
    stop: int
    offset: int


class ParamCodec(ABC):
    """Encoding of one buffer's main weights.

    Attributes:
        wire_dtype: dtype of the bytes that travel.
        decodes: whether full bytes are decoded into a separate buffer of compute parameters.
        is_identity: main bytes are wire bytes, so main weights may be a view of the wire.
    """

    wire_dtype: torch.dtype
    decodes: bool = False
    is_identity: bool = False

    @property
    def state(self) -> Sequence[Tensor]:
        """Tensors that outlive a call: ``encode`` writes them, ``decode`` reads them."""
        return ()

    def granule(self, shape: tuple[int, ...]) -> int:
        """Elements of a parameter that must stay on one rank."""
        return 1

    def bind(  # noqa: B027  nothing to do is the common case
        self,
        shapes: Sequence[tuple[int, ...]],
        pieces: Sequence[Piece],
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        """Called once, when the buffer is built.

        Args:
            shapes: the parameters' shapes.
            pieces: what this rank's main shard holds, a piece for each parameter.
            groups: process groups over which the main shard is cut, for encodings that need a
                global value (an amax).
            device: where state lives.
        """

    @abstractmethod
    def encode(self, main: Tensor, wire: Tensor) -> Steps:
        """Encode the main shard into the wire shard; both 1-D. May communicate (yield works)."""

    def decode(self, wire: Tensor, offsets: Sequence[int], params: Sequence[Tensor]) -> None:
        """Decode the full wire; parameter ``i`` lies at ``offsets[i]``. For ``decodes`` only."""
        raise NotImplementedError

    def after_gather(self, params: Sequence[Tensor]) -> None:  # noqa: B027
        """Full parameters are there, on the gather lane."""

    def before_release(self, params: Sequence[Tensor]) -> None:  # noqa: B027
        """Full parameters are about to go."""


# Looks at a parameter and its dtypes and returns a key and a factory, or None for "not mine".
# Parameters with equal keys may share a buffer and so a codec.
CodecRule = Callable[
    [str, torch.Tensor, ParamDtypes], "tuple[str, Callable[[], ParamCodec]] | None"
]
