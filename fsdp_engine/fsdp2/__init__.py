"""FSDP2's interface to this engine. An FSDP2 script runs after changing its import:

    from fsdp_engine.fsdp2 import fully_shard, MixedPrecisionPolicy

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

docs/internals/fsdp2.md compares the two implementations call by call.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_engine.fsdp2.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fsdp_engine.fsdp2.fully_shard import fully_shard
from fsdp_engine.fsdp2.root_module import engine_of

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "engine_of",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
