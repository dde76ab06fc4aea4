"""Pipelines: several microbatches in progress, and weight gradients that come late."""

from fsdp_engine.extensions.pipelines.microbatches import LateGradients, microbatches

__all__ = ["LateGradients", "microbatches"]
