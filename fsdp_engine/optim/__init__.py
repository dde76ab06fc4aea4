"""Optimizer steps on sharded parameters, and the norm of their gradients."""

from fsdp_engine.optim.sharded_step import shard_optimizer

__all__ = ["shard_optimizer"]
