"""Replicas of an engine that other jobs train, and that may come and go."""

from fsdp_engine.extensions.replicas.replica_reduction import (
    ReplicaReduction,
    set_replica_reduction,
)

__all__ = ["ReplicaReduction", "set_replica_reduction"]
