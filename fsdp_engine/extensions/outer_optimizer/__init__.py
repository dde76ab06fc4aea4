"""Replicas that train alone and exchange their weights every so many steps (DiLoCo)."""

from fsdp_engine.extensions.outer_optimizer.outer_optimizer import OuterOptimizer

__all__ = ["OuterOptimizer"]
