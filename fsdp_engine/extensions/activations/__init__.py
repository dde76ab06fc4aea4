"""Activations of blocks are recomputed in backward, or lie on the host until then."""

from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extensions.activations.checkpointing import (
    Checkpointing,
    Recompute,
    checkpoint_units,
)
from fsdp_engine.extensions.activations.offloaded_activations import OffloadActivations

__all__ = ["Checkpointing", "OffloadActivations", "Recompute", "checkpoint_units"]


def from_argument(value: object) -> list[EngineExtension]:
    """Returns the extensions that the deprecated argument ``checkpointing`` of ``fe.shard``
    selects.

    Raises:
        ValueError: ``value`` is none of those that it took.
    """
    kinds = (OffloadActivations, Recompute)
    return [each for kind in kinds if (each := kind.of(value)) is not None]
