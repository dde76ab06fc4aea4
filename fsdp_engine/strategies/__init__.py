"""Sharding levels, one file each, and strategies: a level for each of two mesh axes."""

from fsdp_engine.strategies.level import Axis, Level, Role, Traffic
from fsdp_engine.strategies.no_shard import NO_SHARD
from fsdp_engine.strategies.optim import OPTIM
from fsdp_engine.strategies.optim_grads import OPTIM_GRADS
from fsdp_engine.strategies.optim_grads_params import OPTIM_GRADS_PARAMS
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
