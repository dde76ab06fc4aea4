"""Encodings of parameters on the wire."""

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.codecs.cast import CastCodec
from fsdp_engine.codecs.float8 import Float8, Float8Codec
from fsdp_engine.codecs.scaled import ScaledCodec, ScaledEncoding
from fsdp_engine.codecs.transformer_engine import TransformerEngine, TransformerEngineCodec

__all__ = [
    "CastCodec",
    "CodecRule",
    "Float8",
    "Float8Codec",
    "ParamCodec",
    "Piece",
    "ScaledCodec",
    "ScaledEncoding",
    "TransformerEngine",
    "TransformerEngineCodec",
]
