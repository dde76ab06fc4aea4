"""Codecs, which encode parameters for all-gathers."""

from typing import Any

from fsdp_engine.codecs.base import CodecRule, ParamCodec, Piece
from fsdp_engine.codecs.cast import CastCodec
from fsdp_engine.extension_list import find

__all__ = ["CastCodec", "CodecRule", "ParamCodec", "Piece"]


def __getattr__(name: str) -> Any:
    """Returns an object that an extension defines: see ``extension_list.py``."""
    found = find("codecs", name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
