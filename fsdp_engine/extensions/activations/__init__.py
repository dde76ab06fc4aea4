"""Activations of blocks are recomputed in backward, or lie on the host until then."""

from fsdp_engine.extensions.activations.checkpointing import Checkpointing, checkpoint_units
from fsdp_engine.extensions.activations.offloaded_activations import OffloadActivations
from fsdp_engine.extensions.activations.settings import ActivationSettings

__all__ = ["ActivationSettings", "Checkpointing", "OffloadActivations", "checkpoint_units"]
