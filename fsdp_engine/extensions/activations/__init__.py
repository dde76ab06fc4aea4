"""Activations of blocks: recomputed in backward, or offloaded to host memory until backward."""

from fsdp_engine.extensions.activations.checkpointing import (
    Checkpointing,
    Recompute,
    checkpoint_units,
)
from fsdp_engine.extensions.activations.offloaded_activations import (
    OffloadActivations,
    from_argument,
)

__all__ = ["Checkpointing", "OffloadActivations", "Recompute", "checkpoint_units", "from_argument"]
