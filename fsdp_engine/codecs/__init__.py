"""Encodings of parameters for all-gathers."""

import importlib
from typing import TYPE_CHECKING, Any

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.codecs.cast import CastCodec

if TYPE_CHECKING:
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

# Modules of names that are imported at their first use.
_LAZY = {
    "Float8": "float8",
    "Float8Codec": "float8",
    "ScaledCodec": "scaled",
    "ScaledEncoding": "scaled",
    "TransformerEngine": "transformer_engine",
    "TransformerEngineCodec": "transformer_engine",
}


def __getattr__(name: str) -> Any:
    """Returns the object of a lazy name."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
