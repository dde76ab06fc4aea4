"""Reduction of gradients over replicas of an engine in other jobs, which may join and leave."""

from fsdp_engine.extensions.replicas.replica_reduction import (
    ReplicaReduction,
    set_replica_reduction,
)

__all__ = ["ReplicaReduction", "set_replica_reduction"]
