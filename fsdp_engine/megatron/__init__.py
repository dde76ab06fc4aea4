"""Megatron-Core's names for the engine, and what belongs to its parallelism."""

from fsdp_engine.megatron.get_optimizer import get_megatron_optimizer

__all__ = ["get_megatron_optimizer"]
