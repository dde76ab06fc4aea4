"""Transient memory from arenas, and memory that is registered with NCCL."""

from fsdp_engine.extensions.arenas.fixed_addresses import FixedAddresses

__all__ = ["FixedAddresses"]
