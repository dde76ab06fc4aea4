"""Layouts of flat buffers: the offset of each tensor, and the range of each rank."""

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
