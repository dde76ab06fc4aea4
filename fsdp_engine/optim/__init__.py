"""Optimizer steps on sharded parameters, and the norm of their gradients."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_engine.optim.sharded_step import shard_optimizer

__all__ = ["shard_optimizer"]


def __getattr__(name: str) -> Any:
    """Returns ``shard_optimizer``, whose module is imported at its first use."""
    if name != "shard_optimizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_engine.optim.sharded_step import shard_optimizer

    return shard_optimizer
