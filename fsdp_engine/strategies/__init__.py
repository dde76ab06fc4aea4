"""Sharding levels, and strategies: one level for each of the two mesh axes."""

from fsdp_engine.strategies.levels import (
    NO_SHARD,
    OPTIM,
    OPTIM_GRADS,
    OPTIM_GRADS_PARAMS,
    Axis,
    Level,
    Role,
    Traffic,
)
from fsdp_engine.strategies.pair import (
    ALL_STRATEGIES,
    AXIS_BELOW_DEPTH,
    LEVELS,
    Strategy,
    level_from_name,
)

__all__ = [
    "ALL_STRATEGIES",
    "AXIS_BELOW_DEPTH",
    "LEVELS",
    "NO_SHARD",
    "OPTIM",
    "OPTIM_GRADS",
    "OPTIM_GRADS_PARAMS",
    "Axis",
    "Level",
    "Role",
    "Strategy",
    "Traffic",
    "level_from_name",
]
