"""A sharded training engine for PyTorch."""

from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.engine import Engine, shard
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.hooks import register_forward_method
from fsdp_engine.precision import MixedPrecisionPolicy

__all__ = [
    "DistributedDataParallelConfig",
    "Engine",
    "FlatDTensor",
    "MixedPrecisionPolicy",
    "register_forward_method",
    "shard",
]
