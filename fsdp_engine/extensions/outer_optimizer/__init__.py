"""Replicas that train independently and exchange their weights every few steps (DiLoCo)."""

from fsdp_engine.extensions.outer_optimizer.outer_optimizer import OuterOptimizer

__all__ = ["OuterOptimizer"]
