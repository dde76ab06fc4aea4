"""Encodings that gather parameters in few bits per element, with scales."""

from fsdp_engine.extensions.fp8.decoded_weights import DecodingCodec
from fsdp_engine.extensions.fp8.float8 import Float8, Float8Codec
from fsdp_engine.extensions.fp8.scaled import ScaledCodec, ScaledEncoding

__all__ = ["DecodingCodec", "Float8", "Float8Codec", "ScaledCodec", "ScaledEncoding"]
