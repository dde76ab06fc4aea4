"""Pipelines: several microbatches in flight, and weight gradients computed after backward."""

from fsdp_engine.extensions.pipelines.microbatches import LateGradients, microbatches

__all__ = ["LateGradients", "microbatches"]
