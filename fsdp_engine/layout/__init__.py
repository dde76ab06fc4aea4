"""Where elements sit: which part of a flat buffer a tensor has, and which a rank."""

from fsdp_engine.layout.layout import (
    ALIGNMENT,
    BLOCK,
    MIN_BLOCK_NUMEL,
    Coordinate,
    Layout,
    TensorSlot,
    round_up,
)

__all__ = [
    "ALIGNMENT",
    "BLOCK",
    "MIN_BLOCK_NUMEL",
    "Coordinate",
    "Layout",
    "TensorSlot",
    "round_up",
]
