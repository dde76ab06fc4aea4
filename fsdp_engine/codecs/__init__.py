"""Encodings of parameters on the wire."""

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.codecs.cast import CastCodec

__all__ = ["CastCodec", "CodecRule", "ParamCodec", "Piece"]
