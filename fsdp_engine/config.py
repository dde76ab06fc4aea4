"""The former module of ``DistributedDataParallelConfig``, now in ``fsdp_engine.megatron``."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Returns the class ``DistributedDataParallelConfig``."""
    if name != "DistributedDataParallelConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fsdp_engine.megatron.config import DistributedDataParallelConfig

    return DistributedDataParallelConfig
