"""Megatron-Core's interface to the engine, with the parts that its model parallelism needs."""

from fsdp_engine.megatron.distributed_data_parallel import (
    DistributedDataParallel,
    FullyShardedDataParallel,
    TorchFullyShardedDataParallel,
)
from fsdp_engine.megatron.finalize_model_grads import finalize_model_grads
from fsdp_engine.megatron.get_optimizer import get_megatron_optimizer
from fsdp_engine.megatron.process_groups import ModelParallelGroups

__all__ = [
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "ModelParallelGroups",
    "TorchFullyShardedDataParallel",
    "finalize_model_grads",
    "get_megatron_optimizer",
]
